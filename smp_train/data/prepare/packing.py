"""Documents in order, the split that each is for, and the packing of a split into blocks of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from smp_train.data.bad_rows import LeftOut
from smp_train.data.source import IGNORED, Row
from smp_train.data.text.fields import Document, Fields
from smp_train.data.text.read import TextFile, documents


class Position(NamedTuple):
    """The position of a document: the ``number``-th that is not blank, after ``before`` others of file ``file``."""

    file: int = 0
    before: int = 0
    number: int = 0


def numbered(
    files: Sequence[TextFile], fields: Fields, start: Position, left_out: LeftOut | None
) -> Iterator[tuple[Position, int, Document]]:
    """Yield (position, number in the file from 1, document) of documents that are not blank, from ``start`` on.

    Malformed ones are left out where ``left_out`` counts them. Raises DataError.
    """
    number = start.number
    for index in range(start.file, len(files)):
        first = start.before if index == start.file else 0
        coming = documents(files[index], fields, start=first, left_out=left_out)
        for before, (at, document) in enumerate(coming, first):
            if document:
                yield Position(index, before, number), at, document
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

    def saved(self) -> tuple[dict[str, int], dict[str, np.ndarray]]:
        """Return the numbers and the arrays that continue an interrupted preparation."""
        numbers = {"rows": self.rows, "documents": self.documents, "left": self.left}
        return numbers, {"counts": self.counts, "rest": np.concatenate([np.empty(0, dtype=np.uint32), *self.rest])}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up what `saved` returned."""
        self.rows, self.documents, self.left = saved["rows"], saved["documents"], saved["left"]
        self.counts, self.rest = saved["counts"], [saved["rest"]]

    def totals(self) -> dict[str, int]:
        """Return what the manifest says of the split."""
        tokens = self.rows * self.seq_len
        return {"documents": self.documents, "rows": self.rows, "tokens": tokens, "tokens_dropped": self.left}

    def copy(self) -> Packer:
        """Return the state as it is now."""
        return replace(self, rest=[*self.rest])

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


@dataclass
class Collector:
    """Collects rows of any length into blocks, one for each shard: conversations, which are not joined."""

    rows_per_shard: int
    max_rows: int
    counts: np.ndarray
    """How often each token is counted in a block, int64 [vocabulary]."""
    rows: int = 0
    """In blocks."""
    tokens: int = 0
    """In blocks."""
    longest: int = 0
    documents: int = 0
    rest: list[Row] = field(default_factory=list)
    """Rows that are in no block yet."""

    @property
    def available(self) -> int:
        """Rows, those in blocks included."""
        return self.rows + len(self.rest)

    @property
    def full(self) -> bool:
        """True when no further row is wanted."""
        return self.available >= self.max_rows

    def saved(self) -> tuple[dict[str, int], dict[str, np.ndarray]]:
        """Return the numbers and the arrays that continue an interrupted preparation."""
        names = ("rows", "tokens", "longest", "documents")
        columns = [[row.input_ids for row in self.rest], [row.labels for row in self.rest if row.labels is not None]]
        ids, labels = (np.concatenate([np.empty(0, dtype=np.int64), *column]) for column in columns)
        sizes = np.array([row.input_ids.size for row in self.rest], dtype=np.int64)
        arrays = {"counts": self.counts, "rest": ids, "labels": labels, "sizes": sizes}
        return {name: getattr(self, name) for name in names}, arrays

    def restore(self, saved: dict[str, Any]) -> None:
        """Take up what `saved` returned."""
        for name in ("rows", "tokens", "longest", "documents", "counts"):
            setattr(self, name, saved[name])
        ends = np.cumsum(saved["sizes"])[:-1]
        parts = zip(np.split(saved["rest"], ends), np.split(saved["labels"], ends), strict=True)
        self.rest = [
            Row(ids.astype(np.uint32), labels=labels.astype(np.int32)) for ids, labels in parts if ids.size
        ]

    def totals(self) -> dict[str, int]:
        """Return what the manifest says of the split."""
        counted = int(self.counts.sum())
        return {"documents": self.documents, "rows": self.rows, "tokens": self.tokens, "counted_tokens": counted}

    def copy(self) -> Collector:
        """Return the state as it is now."""
        return replace(self, rest=[*self.rest])

    def add(self, row: Row) -> Iterator[list[Row]]:
        """Append a row with labels; yield the blocks, of ``rows_per_shard`` rows, that it fills."""
        self.documents += 1
        self.rest.append(row)
        return self.blocks(self.rows_per_shard)

    def blocks(self, least: int = 1) -> Iterator[list[Row]]:
        """Yield blocks while there are ``least`` rows."""
        while len(self.rest) >= least and self.rows < self.max_rows:
            many = min(self.rows_per_shard, self.max_rows - self.rows)
            block, self.rest = self.rest[:many], self.rest[many:]
            labels = np.concatenate([row.labels for row in block if row.labels is not None])
            self.counts = self.counts + np.bincount(labels[labels != IGNORED], minlength=self.counts.size)
            self.rows += len(block)
            self.tokens += labels.size
            self.longest = max(self.longest, *(row.input_ids.size for row in block))
            yield block


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
