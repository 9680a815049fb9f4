"""Rows into shards: token ids are packed end to end into rows of one length, rows into files of one size."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from smp_train.data.prepare.documents import BEGIN, Place


@dataclass
class Done:
    """What of a split is in finished shards: all that is needed to continue after them."""

    place: Place = BEGIN
    """The document that the next row begins in."""
    offset: int = 0
    """Its tokens that are in a shard already."""
    documents: int = 0
    """Documents before it."""
    rows: int = 0
    counts: list[int] = field(default_factory=list)
    """How often each token was written."""
    shards: list[dict[str, Any]] = field(default_factory=list)


class _Part(NamedTuple):
    """A document of which tokens are in no shard yet."""

    place: Place
    begin: int
    """Its first token, counted from the first that this run packs: negative where an interrupted run packed some."""
    end: int


class Packer:
    """Packs the documents of one split into blocks of rows, one for each shard.

    A row is filled from one document to the next across their ends, and what a row has no room for begins
    the next one; only what does not fill the last row of all is dropped (`dropped`, tokens).

    Args:
        emit: takes (rows uint32 [n, seq_len], what is done once they are written).
        seq_len: tokens per row.
        rows_per_shard: rows per file.
        max_rows: stop there; None for no limit.
        vocab_size: length of `counts`.
        done: what an earlier run has done.
    """

    def __init__(
        self,
        emit: Callable[[np.ndarray, Done], None],
        *,
        seq_len: int,
        rows_per_shard: int,
        max_rows: int | None,
        vocab_size: int,
        done: Done | None = None,
    ) -> None:
        done = done or Done()
        self.emit = emit
        self.seq_len = seq_len
        self.rows_per_shard = rows_per_shard
        self.max_rows = sys.maxsize if max_rows is None else max_rows
        self.begin = done
        self.rows = done.rows
        self.documents = done.documents
        self.dropped = 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.counts[: len(done.counts)] += np.array(done.counts, dtype=np.int64)
        self._parts: deque[_Part] = deque()
        self._tokens: list[np.ndarray] = []
        """Of those parts, end to end."""
        self._packed = self._added = 0
        """Tokens that are in a block, and all."""

    @property
    def full(self) -> bool:
        """True when no further row is wanted."""
        return self.rows + (self._added - self._packed) // self.seq_len >= self.max_rows

    def add(self, place: Place, ids: np.ndarray) -> None:
        """Append a document, its end token included."""
        skipped = self.begin.offset if place == self.begin.place else 0
        self.documents += 1
        self._parts.append(_Part(place, self._added - skipped, self._added - skipped + ids.size))
        self._tokens.append(ids[skipped:])
        self._added += ids.size - skipped
        while self._added - self._packed >= self.seq_len * self.rows_per_shard and self.rows < self.max_rows:
            self._emit_block()

    def finish(self) -> None:
        """Emit the rows that are left."""
        while self._added - self._packed >= self.seq_len and self.rows < self.max_rows:
            self._emit_block()
        self.dropped = self._added - self._packed

    def _emit_block(self) -> None:
        waiting = self._tokens[0] if len(self._tokens) == 1 else np.concatenate(self._tokens)
        rows = min(waiting.size // self.seq_len, self.rows_per_shard, self.max_rows - self.rows)
        block, rest = np.split(waiting, [rows * self.seq_len])
        self._tokens = [rest]
        self._packed += block.size
        self.counts += np.bincount(block, minlength=self.counts.size)
        self.rows += rows
        last = self._parts[-1].place
        while self._parts and self._parts[0].end <= self._packed:
            self._parts.popleft()
        place, offset = last._replace(before=last.before + 1, number=last.number + 1), 0
        if self._parts:
            place, offset = self._parts[0].place, self._packed - self._parts[0].begin
        done = Done(place, offset, self.documents - len(self._parts), self.rows, self.counts.tolist())
        self.emit(block.reshape(rows, self.seq_len), done)


def entropy(counts: np.ndarray, model: np.ndarray | None = None) -> float:
    """Return the mean of -ln p(token) in nats per token over ``counts``, p being ``model``'s frequencies.

    With ``model`` None the frequencies are those of ``counts`` itself (Shannon's entropy of single tokens);
    else they are smoothed by adding one to each count (Laplace), so that a token the model has not met has
    a probability. This is the loss of the best predictor that ignores context.
    """
    weights = counts / counts.sum()
    if model is None:
        seen = weights[weights > 0]
        return float(-(seen * np.log(seen)).sum())
    return float(-(weights * np.log((model + 1) / (model.sum() + model.size))).sum())
