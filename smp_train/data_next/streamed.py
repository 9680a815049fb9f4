"""Training on streams of records: nothing on disk, the first step at once, exactly once per epoch, exact resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from smp_train.data_next.files import FileSet
from smp_train.data_next.loader import Loader
from smp_train.data_next.rows import Recipe
from smp_train.data_next.source import Source

if TYPE_CHECKING:
    from smp_train.arguments import Arguments


class StreamedData(Loader):
    """The samples of V virtual streams: position p of the run is sample p // V of stream p % V."""


def open_streams(
    args: Arguments, sources: Sequence[tuple[FileSet, Recipe]], *, seq_len: int, dp_rank: int, dp_size: int,
    local_ranks: int, pin_memory: bool = False,
) -> StreamedData:  # fmt: skip
    """Return the streams of a run, the first records of which were checked. Collective."""
    raise NotImplementedError


def first_samples(
    args: Arguments, sources: Sequence[tuple[FileSet, Recipe]], *, seq_len: int, most: int
) -> Source:  # fmt: skip
    """Return the first ``most`` samples in stored order, in memory. Not collective. Raises DataError."""
    raise NotImplementedError
