"""Malformed records: the run stops at the first, or leaves them out (--bad_rows skip) up to --max_bad."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_train.errors import DataError

if TYPE_CHECKING:
    from smp_train.data.files import DataFile

logger = logging.getLogger("smp_train.data")

FEWEST_JUDGED = 1000
"""A stream is judged as if at least this many of its records had been read: one early bad record is no tendency."""


@dataclass
class BadRecords:
    """Counts the malformed records that are left out (--bad_rows skip); without ``skip`` the first is an error.

    ``first`` is the first as ``PATH:LINE: reason; what to do``; ``first_number`` and ``first_problem`` are its parts.
    """

    skip: bool
    count: int = 0
    first: str = ""
    first_number: int = 0
    first_problem: str = ""
    read: int = 0
    """Records read, good and bad, where the reader counts them."""

    def add(self, file: DataFile, number: int, problem: str) -> None:
        """Count a malformed record. Raises DataError unless malformed records are skipped."""
        message = f"{file.at(number)}: {problem}"
        if not self.skip:
            raise DataError(f"{message}, or leave such records out with --bad_rows skip")
        if not self.count:
            self.first, self.first_number, self.first_problem = message, number, problem
        self.count += 1
        if self.count & (self.count - 1) == 0:  # at 1, 2, 4, 8, ... records
            logger.warning("left out %d malformed records so far (--bad_rows skip); the latest is %s",
                           self.count, message)  # fmt: skip

    def judge(self, max_bad: float | None, records: int) -> None:
        """Raise DataError where more than ``max_bad`` of the ``records`` read so far, good and bad, are bad."""
        _refuse_too_many(self.count, records, max(records, FEWEST_JUDGED), max_bad or 0.0, self.first)


def judge_bad_records(
    bad: Iterable[tuple[DataFile, int, int, str]], rows: int, max_bad: float | None, remedy: str = ""
) -> None:
    """Raise DataError where more records were left out than ``max_bad`` allows; else warn about them.

    ``bad`` has (file, count, number of the first, its problem) of each file; ``rows`` remain. If ``max_bad`` is None,
    every bad record is an error, with ``remedy`` added to its message.
    """
    counted = [(f"{file.at(number)}: {problem}", count) for file, count, number, problem in bad if count]
    if counted and max_bad is None:
        raise DataError(f"{counted[0][0]}{remedy}")
    if counted and max_bad is not None:
        skipped = sum(count for _, count in counted)
        _refuse_too_many(skipped, rows + skipped, rows + skipped, max_bad, counted[0][0])
        logger.warning("left out %d of %d records as malformed (--bad_rows skip); the first is %s",
                       skipped, rows + skipped, counted[0][0])  # fmt: skip


def _refuse_too_many(count: int, records: int, judged: int, max_bad: float, first: str) -> None:
    if count > max_bad * judged:
        raise DataError(
            f"{count} of {records} records are malformed, more than --max_bad {max_bad:.4%}; the first is {first}"
        )
