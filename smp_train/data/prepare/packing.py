"""Documents in order, the split that each is for, and the packing of a split into blocks of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from smp_train.data.bad_rows import LeftOut
from smp_train.data.text.files import TextFile
from smp_train.data.text.read import documents


class Position(NamedTuple):
    """The position of a document: the ``number``-th that is not blank, after ``before`` others of file ``file``."""

    file: int = 0
    before: int = 0
    number: int = 0


def numbered(
    files: Sequence[TextFile], column: str, start: Position, left_out: LeftOut | None
) -> Iterator[tuple[Position, str]]:
    """Yield the documents that are not blank, nor malformed where ``left_out`` counts those, from ``start`` on.

    Raises DataError.
    """
    number = start.number
    for index in range(start.file, len(files)):
        first = start.before if index == start.file else 0
        for before, (_, text) in enumerate(documents(files[index], column, start=first, left_out=left_out), first):
            if text:
                yield Position(index, before, number), text
                number += 1


def held_out(number: int, fraction: float) -> bool:
    """True when document ``number`` is for validation: a function of its number alone."""
    draw = hashlib.blake2b(f"smp-train document {number}".encode(), digest_size=8).digest()
    return int.from_bytes(draw, "big") < fraction * 2**64


@dataclass
class Packer:
    """Packs the documents of one split into blocks of rows, one for each shard.

    A row is filled from one document to the next across their ends, and what a row has no room for begins
    the next one; only what does not fill the last row of all is dropped.
    """

    seq_len: int
    rows_per_shard: int
    max_rows: int
    counts: np.ndarray
    """How often each token is in a block, int64 [vocabulary]."""
    rows: int = 0
    """In blocks."""
    documents: int = 0
    rest: list[np.ndarray] = field(default_factory=list)
    """Tokens that are in no block yet."""

    left: int = 0
    """Their number."""

    @property
    def available(self) -> int:
        """Rows that there are tokens for, those in blocks included."""
        return self.rows + self.left // self.seq_len

    @property
    def full(self) -> bool:
        """True when no further row is wanted."""
        return self.available >= self.max_rows

    def add(self, ids: np.ndarray) -> Iterator[np.ndarray]:
        """Append a document, its end token included; yield the blocks, uint32 [rows_per_shard, seq_len], it fills."""
        self.documents += 1
        self.rest.append(ids)
        self.left += ids.size
        return self.blocks(self.rows_per_shard)

    def blocks(self, least: int = 1) -> Iterator[np.ndarray]:
        """Yield blocks while there are tokens for ``least`` rows."""
        while self.left >= least * self.seq_len and self.rows < self.max_rows:
            tokens = np.concatenate(self.rest)
            rows = min(self.left // self.seq_len, self.rows_per_shard, self.max_rows - self.rows)
            block, rest = np.split(tokens, [rows * self.seq_len])
            self.rest, self.left = [rest], rest.size
            self.counts = self.counts + np.bincount(block, minlength=self.counts.size)
            self.rows += rows
            yield block.reshape(rows, self.seq_len)


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
