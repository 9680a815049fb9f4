"""Writing token files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from smp_train.data_next.source import Row


class Writer:
    """Writes shards one after the other into one pair of files; made by `writing`."""

    def add(self, name: str, size: int, version: str, rows: Iterable[tuple[int, Row]]) -> None:
        """Add a shard of (number of the record, row). Raises DataError where it has no row."""


@contextlib.contextmanager
def writing(base: str, vocab_size: int) -> Iterator[Writer]:
    """Write ``<base>.tok`` and ``<base>.idx``, which appear complete and synced; on an error nothing is left."""
    raise NotImplementedError
