"""Collects the rows of a split and writes them to shards."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from smp_train.data.arrays_file import atomic_file
from smp_train.data.readers import compress
from smp_train.data.source import IGNORED, Row

GZIP_LEVEL = 2


def is_held_out(record: str, fraction: float) -> bool:
    """Return whether a record, named by its file and number, is for validation."""
    draw = hashlib.blake2b(f"smp-train prepare {record}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(draw, "big") < fraction * 2**64


class SplitWriter:
    """Collects the rows of one split, at most ``max_rows``, and writes them as shards.

    Texts are joined end to end and cut into rows of ``seq_len`` tokens, so a row may hold parts of several documents;
    only the tokens that do not fill the last row are dropped. Rows with answers have no ``seq_len`` and keep their
    length.
    """

    def __init__(self, args: argparse.Namespace, split: str, max_rows: int, vocab_size: int) -> None:
        self.folder, self.seq_len, self.args, self.max_rows = Path(args.output, split), args.seq_len, args, max_rows
        self.counts = np.zeros(vocab_size, dtype=np.int64)  # how often each token carries loss
        self.rows = self.longest = self.documents = self.tokens = self.tokens_added = 0
        self.shards: list[dict[str, Any]] = []  # name, rows, bytes and checksum of each shard
        self._unwritten: list[Row] = []
        self._remainder = np.empty(0, dtype=np.uint32)  # the last tokens, which do not fill a row of text

    @property
    def full(self) -> bool:
        """Return whether no further row is needed."""
        return self.rows >= self.max_rows

    def add(self, row: Row) -> None:
        """Add the row of a record, unless the split is full; write each shard that this completes."""
        if self.full:
            return
        self.documents += 1
        self.tokens_added += row.input_ids.size
        rows = [row]
        if self.seq_len:
            ids = np.concatenate([self._remainder, row.input_ids])
            whole = ids.size // self.seq_len * self.seq_len
            rows = [Row(part) for part in ids[:whole].reshape(-1, self.seq_len)]
            self._remainder = ids[whole:]
        rows = rows[: self.max_rows - self.rows]
        self.rows += len(rows)
        self._unwritten += rows
        while len(self._unwritten) >= self.args.rows_per_shard:
            self.write()

    def write(self) -> None:
        """Write the next shard, unless all rows are written."""
        rows = self._unwritten[: self.args.rows_per_shard]
        if not rows:
            return
        del self._unwritten[: len(rows)]
        targets = np.concatenate([row.targets() for row in rows])
        self.counts += np.bincount(targets[targets != IGNORED], minlength=self.counts.size)
        self.tokens += targets.size
        self.longest = max(self.longest, *(row.input_ids.size for row in rows))
        path = self.folder / f"{self.folder.name}-{len(self.shards):05d}.json"
        content = b"".join(map(_line, rows))
        if self.args.zip:
            # Without a time stamp, equal content gives equal bytes.
            path, content = path.with_suffix(".json.gz"), compress(content, GZIP_LEVEL, mtime=0)
        with atomic_file(str(path)) as file:
            file.write(content)
        sha256 = hashlib.sha256(content).hexdigest()
        self.shards.append({"name": path.name, "rows": len(rows), "bytes": len(content), "sha256": sha256})

    def totals(self) -> dict[str, Any]:
        """Return the entry of the split in the manifest."""
        totals = {"documents": self.documents, "rows": self.rows, "tokens": self.tokens}
        dropped, counted = self.tokens_added - self.tokens, int(self.counts.sum())
        more = {"tokens_dropped": dropped} if self.seq_len else {"counted_tokens": counted}
        return {**totals, **more, "shards": self.shards}


def _line(row: Row) -> bytes:
    columns = {"input_ids": row.input_ids, "attention_mask": np.ones(row.input_ids.size), "labels": row.labels}
    record = {name: values.astype(np.int64) for name, values in columns.items() if values is not None}
    return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)


def entropy(counts: np.ndarray) -> float:
    """Return Shannon's entropy of single tokens in nats: the loss of the best predictor that ignores context."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
