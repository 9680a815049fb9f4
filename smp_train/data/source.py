"""What a data set is to the rest of the program: rows by number, and an identity."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from smp_train.errors import DataError

IGNORED = -100
"""The label of a token that carries no loss."""


class Row(NamedTuple):
    """One sample, before it is cut or padded to the sequence length."""

    input_ids: np.ndarray
    """Token ids, any integer type, shape [length]."""
    counted: np.ndarray | None = None
    """True where attention_mask is 1, bool, shape [length]; None when it is 1 everywhere."""
    documents: np.ndarray | None = None
    """Lengths of the documents packed into this row, which must not see each other; None when it is one."""
    labels: np.ndarray | None = None
    """Target at each place, any integer type, shape [length], not shifted, `IGNORED` where a token carries no loss;
    None when the targets are the ids."""

    def cut(self, begin: int, end: int) -> Row:
        """Return tokens ``begin`` to ``end`` of a row that is one document."""
        part = slice(begin, end)
        return Row(
            self.input_ids[part],
            None if self.counted is None else self.counted[part],
            None,
            None if self.labels is None else self.labels[part],
        )

    def targets(self) -> np.ndarray | None:
        """Return where attention mask and labels leave a token to the loss, bool [length]; None when everywhere."""
        if self.labels is None:
            return self.counted
        labelled = self.labels != IGNORED
        return labelled if self.counted is None else labelled & self.counted

    def has_target(self) -> bool:
        """Return whether a token that has one before it carries loss."""
        targets = self.targets()
        return self.input_ids.size > 1 if targets is None else bool(targets[1:].any())


@runtime_checkable
class Source(Protocol):
    """A data set with random access. Subclass it, or give any object these four members.

    `row` must depend on the index alone: the same index gives the same row on every rank and after every
    restart, or a resumed run does not continue the one before it. Some members more are used where a source
    has them: ``shards``, the rows of each shard as a list of `range`; ``lengths(shard)``, the tokens of
    each row of a shard without padding at its ends, as an integer array; ``gaps(shard, beginning)``, the stretches
    without loss in the rows of a shard, as `targets.row_gaps` returns them, needed only where one at the beginning of a
    row has at least ``beginning`` tokens; ``fill(indices, into)``, which reads
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
    attended = np.flatnonzero(row.counted)
    inner = row.cut(int(attended[0]), int(attended[-1]) + 1) if attended.size else row.cut(0, 0)
    return inner._replace(counted=None) if inner.counted is not None and inner.counted.all() else inner


def refuse_uncounted(row: Row, what: str, then: str) -> None:
    """Raise DataError when the row has no target; ``what`` names its tokens, ``then`` says what to do."""
    if not row.has_target():
        raise DataError(f"{what} is counted: nothing to learn; {then}")


def lengths(source: Source) -> np.ndarray:
    """Return the tokens of every row without padding at its ends, int64; reads all rows if it must."""
    ask = getattr(source, "lengths", None)
    if ask is None:
        return np.array([trimmed(source.row(i)).input_ids.size for i in range(len(source))], dtype=np.int64)
    parts = [np.asarray(ask(shard), dtype=np.int64) for shard in range(len(shards(source)))]
    return np.concatenate(parts)
