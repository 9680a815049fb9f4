"""Rows into shards: token ids are packed end to end into rows of one length, rows into files of one size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from smp_train.data.prepare.documents import BEGIN, Place


@dataclass
class Done:
    """What of a split is in finished shards: all that is needed to go on behind them."""

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


class Packer:
    """Packs the documents of one split into blocks of rows, one for each shard.

    A row is filled from one document to the next across their ends, and what a row has not room for begins
    the next one; only what does not fill the last row of all is dropped (`dropped`, tokens).

    Args:
        emit: takes (rows uint32 [n, seq_len], what is done once they are written).
        seq_len: tokens per row.
        rows_per_shard: rows per file.
        max_rows: stop there; None for no limit.
        vocab_size: length of `counts`.
        done: where to go on.
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
        self.max_rows = max_rows
        self.begin = done
        self.rows = done.rows
        self.documents = done.documents
        self.dropped = 0
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        self.counts[: len(done.counts)] += np.array(done.counts, dtype=np.int64)
        self._pending: deque[tuple[Place, int, np.ndarray]] = deque()
        """(document, its tokens that are in a row already, those that are not)."""
        self._waiting = 0

    @property
    def full(self) -> bool:
        """True when no further row is wanted."""
        return self.max_rows is not None and self.rows + self._waiting // self.seq_len >= self.max_rows

    def add(self, place: Place, ids: np.ndarray) -> None:
        """Append a document, its end token included."""
        begin = self.begin
        skipped = begin.offset if place == begin.place else 0
        self.documents += 1
        self._pending.append((place, skipped, ids[skipped:]))
        self._waiting += ids.size - skipped
        while self._waiting >= self.seq_len * self.rows_per_shard:
            self._flush(self.rows_per_shard)

    def finish(self) -> None:
        """Emit the rows that are left."""
        while not (self.max_rows is not None and self.rows >= self.max_rows):
            rows = min(self._waiting // self.seq_len, self.rows_per_shard)
            if rows == 0:
                break
            self._flush(rows)
        self._take(self._waiting)

    def _flush(self, rows: int) -> None:
        if self.max_rows is not None:
            rows = min(rows, self.max_rows - self.rows)
        if rows <= 0:
            # The limit is reached: what came on top is not for any row.
            self._take(self._waiting)
            return
        last = self._pending[-1][0]
        block = np.concatenate(self._take(rows * self.seq_len, dropped=False))
        self.counts += np.bincount(block, minlength=self.counts.size)
        self.rows += rows
        place, offset = last._replace(before=last.before + 1, number=last.number + 1), 0
        if self._pending:
            place, offset, _ = self._pending[0]
        done = Done(place, offset, self.documents - len(self._pending), self.rows, self.counts.tolist())
        self.emit(block.reshape(rows, self.seq_len), done)

    def _take(self, tokens: int, *, dropped: bool = True) -> list[np.ndarray]:
        self._waiting -= tokens
        self.dropped += tokens if dropped else 0
        taken = []
        while tokens:
            place, begin, ids = self._pending.popleft()
            part = ids[:tokens]
            taken.append(part)
            tokens -= part.size
            if part.size < ids.size:
                self._pending.appendleft((place, begin + part.size, ids[part.size :]))
        return taken


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
