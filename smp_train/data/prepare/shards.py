"""Rows into shards: token ids are packed end to end into rows of one length, rows into files of one size."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from smp_train.data.token_cache import atomic_file
from smp_train.data.utils import open_gzip_writer


def encode_rows(rows: np.ndarray) -> bytes:
    """Write rows, int64 [n, seq_len], as JSON lines in the shard format, every token counted."""
    mask = ",".join("1" * rows.shape[1])
    return "".join(
        f'{{"input_ids":[{",".join(map(str, row))}],"attention_mask":[{mask}]}}\n' for row in rows.tolist()
    ).encode()


class ShardWriter:
    """Packs the documents of one split into shards ``<split>-00000.json.gz``, ``<split>-00001.json.gz``, ...

    A row is filled from one document to the next across their ends, and what a row has not room for begins
    the next one; only what does not fill the last row of all is dropped (`dropped`, tokens).

    Args:
        folder: where the shards go.
        split: their name's first part.
        seq_len: tokens per row.
        rows_per_shard: rows per file.
        max_rows: stop there; None for no limit.
        vocab_size: length of `counts`.
        zipped: gzip the shards.
        advance: told of every row written out.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        seq_len: int,
        rows_per_shard: int,
        max_rows: int | None,
        vocab_size: int,
        zipped: bool,
        advance: Callable[[int], None] = lambda rows: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.split = split
        self.seq_len = seq_len
        self.rows_per_shard = rows_per_shard
        self.max_rows = max_rows
        self.zipped = zipped
        self.advance = advance
        self.rows = 0
        self.documents = 0
        self.dropped = 0
        self.shards: list[dict[str, str | int]] = []
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        """How often each token was written."""
        self._pending: list[int] = []

    @property
    def full(self) -> bool:
        """True when no further row is wanted."""
        return self.max_rows is not None and self.rows + len(self._pending) // self.seq_len >= self.max_rows

    def add(self, ids: list[int]) -> None:
        """Append a document, its end token included."""
        self.documents += 1
        self._pending += ids
        while len(self._pending) >= self.seq_len * self.rows_per_shard:
            self._flush(self.rows_per_shard)

    def finish(self) -> None:
        """Write the rows that are left."""
        while not (self.max_rows is not None and self.rows >= self.max_rows):
            rows = min(len(self._pending) // self.seq_len, self.rows_per_shard)
            if rows == 0:
                break
            self._flush(rows)
        self.dropped += len(self._pending)
        self._pending = []

    def _flush(self, rows: int) -> None:
        if self.max_rows is not None:
            rows = min(rows, self.max_rows - self.rows)
        used = rows * self.seq_len
        if rows > 0:
            block = np.array(self._pending[:used], dtype=np.int64)
            self.counts += np.bincount(block, minlength=self.counts.size)
            self._write(encode_rows(block.reshape(rows, self.seq_len)), rows)
        else:
            # The limit is reached: what came on top is not for any row.
            used = len(self._pending)
            self.dropped += used
        self._pending = self._pending[used:]

    def _write(self, text: bytes, rows: int) -> None:
        name = f"{self.split}-{len(self.shards):05d}.json{'.gz' if self.zipped else ''}"
        if self.zipped:
            buffer = io.BytesIO()
            with open_gzip_writer(buffer) as stream:
                stream.write(text)
            text = buffer.getvalue()
        with atomic_file(os.path.join(self.folder, name)) as file:
            file.write(text)
        self.shards.append(
            {"name": name, "rows": rows, "bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        )
        self.rows += rows
        self.advance(rows)


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
