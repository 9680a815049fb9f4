"""What a data set is to the rest of the program: rows by number, and an identity."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from smp_train.errors import DataError


class Row(NamedTuple):
    """One sample, before it is cut or padded to the sequence length."""

    input_ids: np.ndarray
    """Token ids, any integer type, shape [length]."""
    counted: np.ndarray | None = None
    """True where attention_mask is 1, bool, shape [length]; None when it is 1 everywhere."""
    documents: np.ndarray | None = None
    """Lengths of the documents packed into this row, which must not see each other; None when it is one."""


@runtime_checkable
class Source(Protocol):
    """A data set with random access. Subclass it, or give any object these four members.

    `row` must depend on the index alone: the same index gives the same row on every rank and after every
    restart, or a resumed run does not continue the one before it. Some members more are used where a source
    has them: ``shards``, the rows of each shard as a list of `range`; ``lengths(shard)``, the tokens of
    each row of a shard without padding at its ends, as an integer array; ``fill(indices, into)``, which reads
    rows into int64 [rows, tokens] and returns True, or False when one is not so long or not all counted; and, for
    ``--shuffle window:K``, ``want(needed, following)``, told before every step from which shards (numbers in
    ``shards``) rows are read next and after that, and from no others, and ``rest()``, told when reading ends.
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


def nothing(*_: object) -> None:
    """Do nothing: what a source does that lacks one of the members it may have."""


def shards(source: Source) -> list[range]:
    """Return the rows of each shard, in order; one range of all rows when the source has no shards."""
    found: list[range] | None = getattr(source, "shards", None)
    return [range(len(source))] if found is None else found


def trimmed(row: Row) -> Row:
    """Return the row without the padding at its ends."""
    if row.counted is None:
        return row
    counted = np.flatnonzero(row.counted)
    span = slice(counted[0], counted[-1] + 1) if counted.size else slice(0, 0)
    inner = row.counted[span]
    return Row(row.input_ids[span], None if inner.all() else inner)


def refuse_uncounted(row: Row, what: str, then: str) -> None:
    """Raise DataError when no token behind the first is counted; ``what`` names them, ``then`` says what to do."""
    if row.counted is not None and not row.counted[1:].any():
        raise DataError(f"{what} is counted: nothing to learn; {then}")


def lengths(source: Source) -> np.ndarray:
    """Return the tokens of every row without padding at its ends, int64; reads all rows if it must."""
    ask = getattr(source, "lengths", None)
    if ask is None:
        return np.array([trimmed(source.row(i)).input_ids.size for i in range(len(source))], dtype=np.int64)
    parts = [np.asarray(ask(shard), dtype=np.int64) for shard in range(len(shards(source)))]
    return np.concatenate(parts)
