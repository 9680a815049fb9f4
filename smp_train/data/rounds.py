"""Work of different length on each rank, during which no rank waits for long in a collective."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

from smp_train import distributed

ROUND_SECONDS = 10.0
"""A failure on one rank stops the others after so long, or after the step they are in."""


def in_rounds(what: str, steps: Generator[Any, None, None]) -> None:
    """Run this rank's steps to their end, and return when all ranks have; collective.

    Ranks meet every `ROUND_SECONDS`: a failure on one is a failure on all (`distributed.gather`), and a rank that is
    done does not run into the time-out of collectives while another has work for hours. Steps contain no collective.
    """
    end = object()

    def done() -> bool:
        until = time.monotonic() + ROUND_SECONDS
        while next(steps, end) is not end:
            if time.monotonic() >= until:
                return False
        return True

    try:
        while not all(distributed.gather(what, done)):
            pass
    finally:
        steps.close()
