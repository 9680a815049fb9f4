"""Malformed records: the run stops at the first, or leaves them out (--bad_rows skip) up to --max_bad."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_train.errors import DataError

if TYPE_CHECKING:
    from smp_train.data.files import DataFile

logger = logging.getLogger("smp_train.data")

FEWEST_JUDGED = 1000
"""A stream is judged as if it had read at least this many records: one early bad record does not stop the run."""


@dataclass
class BadRecords:
    """Counts the malformed records that are left out (--bad_rows skip); without ``skip`` the first one is an error."""

    skip: bool
    count: int = 0
    first: str = ""  # the first bad record as "PATH:LINE: reason; what to do"
    first_number: int = 0  # its number, from 1
    first_problem: str = ""  # its "reason; what to do"
    read: int = 0  # good and bad records, if the reader counts them

    def add(self, file: DataFile, number: int, problem: str) -> None:
        """Count a malformed record. Raises DataError unless malformed records are skipped."""
        message = f"{file.at(number)}: {problem}"
        if not self.skip:
            raise DataError(f"{message}, or leave such records out with --bad_rows skip")
        if not self.count:
            self.first, self.first_number, self.first_problem = message, number, problem
        self.count += 1
        if self.count & (self.count - 1) == 0:  # at 1, 2, 4, 8, ... records
            logger.warning("%d malformed records left out (--bad_rows skip); the latest is %s", self.count, message)

    def judge(self, max_bad: float | None, records: int) -> None:
        """Raise DataError where more than ``max_bad`` of the ``records`` read so far, good and bad, are bad."""
        if self.count > (max_bad or 0.0) * max(records, FEWEST_JUDGED):
            raise _too_many(self.count, records, self.first, max_bad or 0.0)


def judge_bad_records(count: int, records: int, first: str, max_bad: float | None) -> None:
    """Raise DataError if more than ``max_bad`` of all records are bad, or any if it is None; else warn about them.

    ``first`` is the first bad record as ``PATH:LINE: reason; what to do``.
    """
    if count and max_bad is None:
        raise DataError(f"{first}, or leave such records out with --bad_rows skip")
    if count > (max_bad or 0.0) * records:
        raise _too_many(count, records, first, max_bad or 0.0)
    if count:
        logger.warning("%d of %d records are bad (--bad_rows skip); the first is %s", count, records, first)


def _too_many(count: int, records: int, first: str, max_bad: float) -> DataError:
    return DataError(f"{count} of {records} records are bad, more than --max_bad {max_bad:.4%}; the first is {first}")
