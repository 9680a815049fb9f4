"""A row of tokens, and random access to rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

IGNORED = -100
"""The label of a token that carries no loss."""


def digest_of(*content: Any) -> str:
    """Return a digest (32 characters) of values that `repr` shows in full; the same in every process."""
    return hashlib.blake2b(repr(content).encode(), digest_size=16).hexdigest()


class Row(NamedTuple):
    """The tokens of one record, or of one sample; without padding."""

    input_ids: np.ndarray
    """Token ids, any integer type, shape [length]."""
    labels: np.ndarray | None = None
    """Target at each position, not shifted; `IGNORED` where a token carries no loss. None: the targets are the ids."""
    documents: np.ndarray | None = None
    """Lengths of the documents packed into this sample, which must not attend to each other; None: one document."""

    def cut(self, begin: int, end: int) -> Row:
        """Return tokens ``begin`` to ``end`` of a row that is one document."""
        part = slice(begin, end)
        return Row(self.input_ids[part], None if self.labels is None else self.labels[part])

    def targets(self) -> np.ndarray:
        """Return the target at each position: the labels, or for a row without labels the ids."""
        return self.input_ids if self.labels is None else self.labels

    def first_target(self) -> int:
        """Return the index (at least 1) of the first token that carries loss; the row's length if no token does."""
        if self.labels is None:
            return min(1, self.input_ids.size)
        targets = np.flatnonzero(self.labels[1:] != IGNORED)
        return int(targets[0]) + 1 if targets.size else self.input_ids.size

    def has_target(self) -> bool:
        """Return whether any token after the first carries loss."""
        return self.first_target() < self.input_ids.size


class Problem(str):
    """The reason why a record is no row, and the remedy: ``reason; what to do``."""


class Source:
    """A data set with random access: subclass it, and give it a `fingerprint`, a length, `row` and `name`.

    `row` must depend on the index alone: the same index gives the same row on every rank and after every restart.
    Otherwise a resumed run does not continue the earlier run.
    """

    fingerprint: str
    """Identity of the content. A run refuses to resume on a data set with another fingerprint."""
    shards: Sequence[range] | None = None
    """Rows of each shard; None: one shard holds all rows."""

    def __len__(self) -> int:
        """Return the number of rows."""
        raise NotImplementedError

    def row(self, index: int) -> Row:
        """Return row ``index``, 0 <= index < len; raises IndexError for any other index."""
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return the name by which a person finds the row, such as ``train-00003.json.gz:17``."""
        return f"row {index}"

    def lengths(self, rows: range) -> np.ndarray:
        """Return the number of tokens of each of some rows, int64; this default reads the rows."""
        return np.array([self.row(index).input_ids.size for index in rows], dtype=np.int64)

    @cached_property
    def _first_tokens_of_rows(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths(range(len(self))))])

    def token_count(self) -> int:
        """Return the number of tokens of all rows; this default, and that of `find_token`, need every row's length."""
        return int(self._first_tokens_of_rows[-1])

    def find_token(self, token: int) -> tuple[int, int]:
        """Return (row that holds ``token``, first token of that row); tokens are counted over all rows end to end."""
        row = int(np.searchsorted(self._first_tokens_of_rows, token, side="right")) - 1
        return row, int(self._first_tokens_of_rows[row])

    def report(self) -> dict[str, Any] | None:
        """Return totals (rows, tokens, longest row), or None if only reading all rows would show them."""
        return None
