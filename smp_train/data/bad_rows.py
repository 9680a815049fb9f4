"""What becomes of rows that are none: the verdict on all that were left out when data was converted or checked."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from smp_train.distributed import ALL_RANKS
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")


class LeftOut:
    """Counts the documents of streamed text that are left out (--bad_rows skip), and says so ever more rarely."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, why: str) -> None:
        """Count one."""
        self.number += 1
        if self.number & (self.number - 1) == 0:
            logger.warning("left out %d documents so far (--bad_rows skip); the last is %s", self.number, why)


def judge(
    found: Iterable[tuple[str, int, str]],
    rows: int,
    max_bad: float | None,
    then: str = "",
    *,
    what: tuple[str, str] = ("lines", "are no rows"),
) -> None:
    """Hold what was left out against what may be; the same verdict on every rank and every start.

    Args:
        found: (path, rows left out of it, the first of them as ``NUMBER: reason; what to do``) of each file.
        rows: rows that are left.
        max_bad: the fraction of all that may be left out (--bad_rows skip); None tolerates none.
        then: what to do where reading the data again is not possible.
        what: what is left out, and why.

    Raises:
        DataError: with the first of them.
    """
    bad = [(path, number, first) for path, number, first in found if number]
    if not bad:
        return
    skipped = sum(number for _, number, _ in bad)
    first = f"{bad[0][0]}:{bad[0][2]}"
    if max_bad is None:
        raise DataError(f"{first}{then}")
    noun, why = what
    if skipped > max_bad * (rows + skipped):
        raise DataError(
            f"{skipped} of {rows + skipped} {noun} {why}, more than --max_bad {max_bad:.4%}; the first is {first}"
        )
    logger.warning(
        "left out %d of %d %s that %s (--bad_rows skip); the first is %s",
        skipped, rows + skipped, noun, why, first, extra=ALL_RANKS,
    )  # fmt: skip
