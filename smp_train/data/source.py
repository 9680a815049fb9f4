"""What a data set is to the rest of the program: rows by number, and an identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from smp_train.errors import DataError

ONE_ROW = "a sample is a row"
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
    """Target at each position, any integer type, shape [length], not shifted, `IGNORED` where a token carries no loss;
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


class Source:
    """A data set with random access: subclass it, and give it a `fingerprint`, a length, `row` and `name`.

    `row` must depend on the index alone: the same index gives the same row on every rank and after every
    restart, or a resumed run does not continue the one before it. The other members are better answers than their
    defaults here, where a source has them.
    """

    fingerprint: str
    """Identity of the content. A run refuses to resume on a data set with another fingerprint."""
    layout: str = ONE_ROW
    """How samples are made of stored rows."""
    shards: Any = None
    """Rows of each shard, as a sequence of `range`; None: one shard of all."""
    staged: bool = False
    """True where rows can be read only of shards that `want` has named."""

    def __len__(self) -> int:
        """Return the number of rows."""
        raise NotImplementedError

    def row(self, index: int) -> Row:
        """Return row ``index``, 0 <= index < len; IndexError for another."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return what a person would look the row up by, such as ``train-00003.json.gz:17``."""
        return f"row {index}"

    def lengths(self, shard: int) -> np.ndarray:
        """Return the tokens of each row of a shard without padding at its ends, int64; the default reads all rows."""
        return np.array([trimmed(self.row(i)).input_ids.size for i in shards(self)[shard]], dtype=np.int64)

    def gaps(self, shard: int, beginning: int = 0) -> np.ndarray:
        """Return the stretches without loss in the rows of a shard, as `targets.row_gaps`; none where not known.

        They are needed only where one at the beginning of a row has at least ``beginning`` tokens.
        """
        return np.empty((0, 3), dtype=np.int64)

    def fill(self, indices: list[int], into: np.ndarray) -> bool:
        """Read rows into int64 [rows, tokens], faster than one by one; False when one is not just ``tokens`` long and
        all counted, or this source has no faster way: then read them one by one.
        """
        return False

    def report(self) -> dict[str, Any] | None:
        """Return totals (rows, tokens, the longest row: as `TokenShards.report`); None where they are not known."""
        return None

    def want(self, needed: list[int], following: list[int]) -> None:
        """Called before every step of ``--shuffle window:K`` with the shards that rows are read from next, and after
        that, and from no others; collective.
        """

    def rest(self) -> None:
        """Called when reading ends, after `want`."""


class View(Source):
    """A source made of one other, ``source``: what it does not change is asked of that one."""

    source: Source

    def report(self) -> dict[str, Any] | None:
        """Return the totals of the source, of all its rows."""
        return self.source.report()

    def want(self, needed: list[int], following: list[int]) -> None:
        """Pass on which shards are read next."""
        self.source.want(needed, following)

    def rest(self) -> None:
        """Pass on that reading ends."""
        self.source.rest()


def shards(source: Source) -> Sequence[range]:
    """Return the rows of each shard, in order."""
    found: Sequence[range] | None = source.shards
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
    """Return the tokens of every row without padding at its ends, int64."""
    return np.concatenate([source.lengths(shard) for shard in range(len(shards(source)))])
