"""The records of one file, with their numbers: lines of JSON, rows of tables, whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smp_train.data_next.files import DataFile

Record = bytes | dict[str, Any] | str
"""A line of JSON; a row of a table, by column; a whole text."""
LINE_BYTES = 64 << 20
"""Longest line that is read."""


def records(
    file: DataFile,
    fields: Sequence[str] | None = None,
    *,
    first: int = 0,
    step: int = 1,
    copy: str | None = None,
    tick: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, int, Record]]:
    """Yield (index from 0, number from 1: of the line or row, record) of a file's records.

    Blank lines are no records, but count in the numbers.

    Args:
        file: to read.
        fields: columns of a table to read, those that exist; None: all.
        first: index of the first record to yield.
        step: yield each ``step``-th record from ``first`` on.
        copy: path of a local copy of an object in S3; without one the object is streamed.
        tick: called with the number of bytes read since its last call.

    Raises DataError, with file and line, where the file is damaged.
    """
    raise NotImplementedError


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ValueError, "reason; what to do", also for a key that occurs twice."""
    raise NotImplementedError
