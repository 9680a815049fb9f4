"""Malformed rows that were left out (--bad_rows skip): how many may be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from smp_train.distributed import ALL_RANKS
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")


class LeftOut:
    """Counts the documents of streamed text that are left out (--bad_rows skip); logs the count at growing
    intervals."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, why: str) -> None:
        """Count one."""
        self.number += 1
        if self.number & (self.number - 1) == 0:
            logger.warning("left out %d documents so far (--bad_rows skip); the last is %s", self.number, why)


def leave_out(why: str, left_out: Callable[[str], None] | None) -> None:
    """Count a malformed document, ``PLACE: reason; what to do``; raise DataError where none may be left out."""
    if left_out is None:
        raise DataError(f"{why}, or leave such documents out with --bad_rows skip")
    left_out(why)


def judge(
    found: Iterable[tuple[str, int, str]], rows: int, max_bad: float | None, then: str = "", *,
    what: tuple[str, str] = ("lines", "are no rows"),
) -> None:
    """Raise DataError, naming the first, where more was left out than ``max_bad`` allows; else warn of it.

    The verdict is the same on every rank and at every start.

    Args:
        found: (path, rows left out of it, the first of them as ``NUMBER: reason; what to do``) of each file.
        rows: rows that are left.
        max_bad: the fraction of all that may be left out (--bad_rows skip); None tolerates none.
        then: what to do where reading the data again is not possible.
        what: what is left out, and why.
    """
    bad = [(path, number, reason) for path, number, reason in found if number]
    if not bad:
        return
    skipped = sum(number for _, number, _ in bad)
    first = f"{bad[0][0]}:{bad[0][2]}"
    if max_bad is None:
        raise DataError(f"{first}{then}")
    of = f"{skipped} of {rows + skipped} {what[0]}"
    if skipped > max_bad * (rows + skipped):
        raise DataError(f"{of} {what[1]}, more than --max_bad {max_bad:.4%}; the first is {first}")
    logger.warning("left out %s that %s (--bad_rows skip); the first is %s", of, what[1], first, extra=ALL_RANKS)
