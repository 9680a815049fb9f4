"""Malformed records: the run stops at the first one, or leaves out (--bad_rows skip) a fraction of up to --max_bad."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_train.errors import DataError

if TYPE_CHECKING:
    from smp_train.data.files import DataFile

logger = logging.getLogger("smp_train.data")


@dataclass
class BadRecords:
    """Counts the malformed records that --bad_rows skip leaves out, up to a fraction ``max_bad`` of all records.

    Without ``max_bad`` the first malformed record is an error.
    """

    max_bad: float | None = None
    count: int = 0
    first: str = ""  # the first bad record as "PATH:LINE: reason; what to do"
    first_number: int = 0  # number of the first bad record, from 1
    first_problem: str = ""  # problem of the first bad record: "reason; what to do"
    read: int = 0  # number of good and bad records, if the reader counts them

    def add(self, file: DataFile, number: int, problem: str) -> None:
        """Count a malformed record. Raises DataError unless malformed records are skipped."""
        self.count += 1
        message = f"{file.at(number)}: {problem}"
        if self.count == 1:
            self.first, self.first_number, self.first_problem = message, number, problem
        if self.max_bad is None:
            self.judge(1)
        if self.count & (self.count - 1) == 0:  # at 1, 2, 4, 8, ... records
            logger.warning("%d malformed records left out (--bad_rows skip); the latest is %s", self.count, message)

    def judge(self, records: int) -> None:
        """Raise DataError if more than a fraction ``max_bad`` of the ``records`` read so far, good and bad, is bad."""
        if self.count and self.max_bad is None:
            raise DataError(f"{self.first}, or leave such records out with --bad_rows skip")
        if self.count > (self.max_bad or 0.0) * records:
            raise DataError(
                f"{self.count} of {records} records are bad, more than --max_bad {self.max_bad:.4%}; "
                f"the first is {self.first}"
            )

    def judge_all(self, records: int) -> None:
        """Judge a data set that was read to its end and has ``records`` records; warn if any are bad."""
        self.judge(records)
        if count := self.count:
            logger.warning("%d of %d records are bad (--bad_rows skip); the first is %s", count, records, self.first)
