"""One virtual stream of records: an order that needs no index, and a cursor of five numbers that resumes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smp_train.data_next.files import DataFile, FileSet
from smp_train.data_next.samples import Sample


class Cursor(NamedTuple):
    """Position of a stream: the samples taken so far end before this token."""

    epoch: int = 0
    piece: int = 0
    """Position in the order of this epoch's pieces."""
    block: int = 0
    """Index of the block's first record in the piece."""
    record: int = 0
    """Position in the permuted block."""
    token: int = 0


class Piece(NamedTuple):
    """Every ``step``-th record of a file, from index ``first`` on."""

    file: DataFile
    source: int
    """Number of the file's source among the run's sources."""
    first: int
    step: int


def stream_count(files: Sequence[DataFile]) -> int:
    """Return the number of streams of a data set: a power of two, by its files alone."""
    raise NotImplementedError


def assign_pieces(sources: Sequence[FileSet], streams: int) -> list[list[Piece]]:
    """Return the pieces of each stream; every record of the sources is in one piece."""
    raise NotImplementedError


class Stream:
    """One virtual stream, read from a cursor on."""

    cursor: Cursor
    taken: int
    """Samples taken so far, also by earlier runs."""

    def take(self) -> Sample | None:
        """Return the next sample and move the cursor; None after the last epoch. Raises DataError."""
        raise NotImplementedError
