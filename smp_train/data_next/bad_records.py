"""Malformed records: the run stops at the first, or leaves them out (--bad_rows skip) up to --max_bad."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from smp_train.data_next.files import DataFile


@dataclass
class BadRecords:
    """Counts the malformed records that are left out; raises at the first where none may be."""

    skip: bool
    """--bad_rows skip."""
    count: int = 0
    first: str = ""
    """The first, as ``PATH:LINE: reason; what to do``."""
    first_number: int = 0
    """The number of its record in its file."""
    first_problem: str = ""
    """``reason; what to do``."""

    def add(self, file: DataFile, number: int, problem: str) -> None:
        """Count a malformed record. Raises DataError unless malformed records are skipped."""
        raise NotImplementedError

    def judge(self, max_bad: float | None, records: int) -> None:
        """Raise DataError where more than ``max_bad`` of ``records`` (good and bad, at least 1000) are bad."""
        raise NotImplementedError


def judge_bad_records(
    bad: Iterable[tuple[DataFile, int, int, str]], rows: int, max_bad: float | None, remedy: str = ""
) -> None:
    """Raise DataError where more records were left out than ``max_bad`` allows; else warn of them.

    Args:
        bad: (file, count, number of the first, its problem) of each file.
        rows: rows that remain.
        max_bad: --max_bad, the fraction of all records that may be left out; None allows none.
        remedy: added to the message where none is allowed.
    """
    raise NotImplementedError
