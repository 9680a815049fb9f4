"""What a data set is to the rest of the program: rows by number, and an identity."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np


class Row(NamedTuple):
    """One sample as stored, before it is cut or padded to the sequence length."""

    input_ids: np.ndarray
    """Token ids, any integer type, shape [length]."""
    counted: np.ndarray | None = None
    """True where attention_mask is 1, bool, shape [length]; None when it is 1 everywhere."""


@runtime_checkable
class Source(Protocol):
    """A data set with random access. Subclass it, or give any object these four members.

    `row` must depend on the index alone: the same index gives the same row on every rank and after every
    restart, or a resumed run does not continue the one before it.
    """

    fingerprint: str
    """Identity of the content. A run refuses to resume on a data set with another fingerprint."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def row(self, index: int) -> Row:
        """Return row ``index``, 0 <= index < len."""
        ...

    def name(self, index: int) -> str:
        """Return what a person would look the row up by, such as ``train-00003.json.gz:17``."""
        return f"row {index}"


def last_shard(source: Source) -> range:
    """Return the rows of the source's last shard, or all of them when it has no shards."""
    rows: range | None = getattr(source, "last_shard", None)
    return range(len(source)) if rows is None else rows
