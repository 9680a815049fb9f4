"""Work that takes some ranks much longer than others, such as the conversion of terabytes on one rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import TypeVar, cast

from smp_train.distributed.agree import gather, is_alone, world_size
from smp_train.distributed.failures import start_thread
from smp_train.progress import Progress

T = TypeVar("T")

REPORT_SECONDS = 1.0
"""Interval at which ranks exchange their progress."""


class Interrupted(Exception):
    """Raised in a rank's work when another rank has failed."""


def finish_together(
    action: str, work: Callable[[Callable[[int], None]], T], *, progress: Progress, total: int = 0
) -> list[T]:
    """Run ``work`` on every rank, however long it takes, and return all results, by rank; collective.

    The work runs in a thread. The main threads exchange progress every second, so no collective waits for the work.

    Args:
        action: for messages of failures, which reach all ranks within seconds, as in `gather`.
        work: called with a function to report progress: call it often with the units done since its last call. It
            raises an exception to end this rank's work when another rank has failed. It must contain no collective.
        progress: shows the units of all ranks, on rank 0.
        total: number of these units.
    """
    if is_alone() or world_size() == 1:
        return gather(action, partial(work, progress.update))
    done, stopped = 0, threading.Event()

    def report(units: int = 0) -> None:
        nonlocal done
        done += units
        if stopped.is_set():
            raise Interrupted

    def state() -> tuple[int, bool, bool]:
        ended = running.done()
        return done, ended, ended and running.exception() is not None

    running = start_thread(lambda: work(report), "smp-train-long-work")
    try:
        finished, failed = False, False
        while not (finished or failed):
            wait([running], REPORT_SECONDS)
            counts, ends, failures = zip(*gather(action, state), strict=True)
            progress.set_count(sum(counts), total)
            finished, failed = all(ends), any(failures)
    finally:
        stopped.set()
    wait([running])

    def result() -> T:
        if isinstance(running.exception(), Interrupted):
            return cast(T, None)  # `gather` raises the failure of another rank
        return running.result()

    return gather(action, result)
