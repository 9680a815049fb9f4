"""Which split a record is for, and the rows of a split on their way into shards."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from smp_train.data_next.source import IGNORED, Row


class Position(NamedTuple):
    """A token of the input."""

    file: int = 0
    """Number of the file in the input."""
    record: int = 0
    """Index of the record in the file."""
    token: int = 0
    """Index of the token in the record's row."""


BEGIN = Position()


def is_held_out(file: str, record: int, fraction: float) -> bool:
    """Return whether a record is for validation: by its file's name and its index alone."""
    draw = hashlib.blake2b(f"smp-train record {record} of {file}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(draw, "big") < fraction * 2**64


@dataclass
class Split:
    """The rows of one split, collected into blocks of ``rows_per_shard`` rows, one for each shard.

    Text fills rows of ``seq_len`` tokens end to end: a document may end in a row and the next one begin; only tokens
    that do not fill the last row are dropped. Rows with answers keep their length.
    """

    seq_len: int | None
    """Tokens of a row of text; None for rows with answers."""
    rows_per_shard: int
    max_rows: int
    counts: np.ndarray
    """How often each token carries loss in a block, int64 [vocabulary]."""
    rows: int = 0
    """Rows in blocks."""
    tokens: int = 0
    """Tokens in blocks."""
    longest: int = 0
    documents: int = 0
    """Records added."""
    begin: Position = BEGIN
    """The first token that is in no block yet."""
    last: Position | None = None
    """The record that filled the split."""
    shards: list[dict[str, Any]] = field(default_factory=list)
    """The shards that are written, as the manifest lists them."""
    _pending: deque[tuple[Position, Row]] = field(default_factory=deque)
    """Records that are not in blocks as a whole, each with the position of its first token that is not."""
    _pending_tokens: int = 0

    @property
    def available(self) -> int:
        """Return the number of rows that the records so far suffice for."""
        return self.rows + (len(self._pending) if self.seq_len is None else self._pending_tokens // self.seq_len)

    @property
    def full(self) -> bool:
        """Return whether no further row is needed."""
        return self.available >= self.max_rows

    def accepts(self, position: Position) -> bool:
        """Return whether a record belongs to this split: not after the record that filled it."""
        return self.last is None or position[:2] <= self.last[:2]

    def add(self, position: Position, row: Row) -> Iterator[list[Row]]:
        """Add a record's row, and yield the blocks that it fills.

        A record that is in blocks already is ignored, and so are all records after the split is full.
        """
        if position[:2] < self.begin[:2] or self.full:
            return iter(())
        if position[:2] == self.begin[:2]:
            position = self.begin
            row = row.cut(position.token, row.input_ids.size)
        self.documents += not position.token
        self._pending.append((position, row))
        self._pending_tokens += row.input_ids.size
        if self.full and self.last is None:
            self.last = position
        return self.blocks(self.rows_per_shard)

    def blocks(self, least: int = 1) -> Iterator[list[Row]]:
        """Yield blocks while there are at least ``least`` rows."""
        while self.available - self.rows >= least and self.rows < self.max_rows:
            number = min(self.available - self.rows, self.rows_per_shard, self.max_rows - self.rows)
            block = [self._take()[1] for _ in range(number)] if self.seq_len is None else self._fill(number)
            for row in block:
                targets = row.targets()
                self.counts += np.bincount(targets[targets != IGNORED], minlength=self.counts.size)
                self.tokens += row.input_ids.size
                self.longest = max(self.longest, row.input_ids.size)
            self.rows += number
            yield block

    def _take(self, most: int | None = None) -> tuple[int, Row]:
        """Take the next pending record, or its first ``most`` tokens; return (tokens, row)."""
        position, row = self._pending.popleft()
        size = row.input_ids.size if most is None else min(most, row.input_ids.size)
        self._pending_tokens -= size
        self.begin = Position(position.file, position.record, position.token + size)
        if size < row.input_ids.size:
            self._pending.appendleft((self.begin, row.cut(size, row.input_ids.size)))
        return size, row.cut(0, size)

    def _fill(self, number: int) -> list[Row]:
        """Return a number of rows of text, filled end to end."""
        assert self.seq_len is not None
        parts, missing = [], number * self.seq_len
        while missing:
            size, row = self._take(missing)
            parts.append(row.input_ids)
            missing -= size
        return [Row(ids) for ids in np.concatenate(parts).reshape(number, self.seq_len)]

    def totals(self) -> dict[str, int]:
        """Return the counts in the manifest."""
        totals = {"documents": self.documents, "rows": self.rows, "tokens": self.tokens}
        if self.seq_len is None:
            return {**totals, "counted_tokens": int(self.counts.sum())}
        return {**totals, "tokens_dropped": self._pending_tokens}

    def state(self) -> dict[str, Any]:
        """Return the state after the blocks so far; records that are not in blocks will be added again."""
        begun = bool(self._pending and self._pending[0][0].token)
        return {
            "rows": self.rows, "tokens": self.tokens, "longest": self.longest, "begin": self.begin, "last": self.last,
            "documents": self.documents - len(self._pending) + begun, "counts": self.counts.copy(),
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        """Take up what `state` returned, with the shards written until then."""
        for name in ("rows", "tokens", "longest", "documents", "counts", "shards"):
            setattr(self, name, state[name])
        self.begin = Position(*state["begin"])
        self.last = None if state["last"] is None else Position(*state["last"])


def entropy(counts: np.ndarray, model: np.ndarray | None = None) -> float:
    """Return the mean of -ln p(token) in nats per token over ``counts``, where p is the frequency in ``model``.

    Without ``model`` the frequencies are those in ``counts`` (Shannon's entropy of single tokens); else each count of
    ``model`` is increased by one (Laplace), so that a token the model has not met has a probability. This is the loss
    of the best predictor that ignores context.
    """
    shares = counts / counts.sum()
    if model is None:
        present = shares[shares > 0]
        return float(-(present * np.log(present)).sum())
    return float(-(shares * np.log((model + 1) / (model.sum() + model.size))).sum())
