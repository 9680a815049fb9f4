"""The rows of a split, and the shards that they are written to."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data.arrays_file import atomic_file
from smp_train.data.readers import open_gzip_writer
from smp_train.data.source import IGNORED, Row

try:
    import orjson
except ImportError:
    orjson = None  # type: ignore[assignment]


def is_held_out(record: str, fraction: float) -> bool:
    """Return whether a record, named by its file and number, is for validation."""
    draw = hashlib.blake2b(f"smp-train prepare {record}".encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(draw, "big") < fraction * 2**64


class SplitWriter:
    """Collects the rows of one split and writes them as shards. The same rows give the same bytes.

    Text fills rows of ``seq_len`` tokens end to end: a document may end in a row and the next one begin in it; only the
    tokens that do not fill the last row are dropped. Rows with answers (no ``seq_len``) keep their length.
    """

    def __init__(self, args: argparse.Namespace, split: str, max_rows: int, vocab_size: int) -> None:
        self.folder, self.seq_len, self.args, self.max_rows = Path(args.output, split), args.seq_len, args, max_rows
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        """How often each token carries loss."""
        self.rows = self.tokens = self.longest = self.documents = 0
        self.shards: list[dict[str, Any]] = []
        """Name, rows, bytes and checksum of each shard."""
        self._pending: deque[Row] = deque()
        self._pending_tokens = 0

    @property
    def available(self) -> int:
        """Return the number of rows that the records so far suffice for."""
        return self.rows + (self._pending_tokens // self.seq_len if self.seq_len else len(self._pending))

    @property
    def full(self) -> bool:
        """Return whether no further row is needed."""
        return self.available >= self.max_rows

    def add(self, row: Row) -> None:
        """Add the row of a record, unless the split is full; write the shard that it fills."""
        if not self.full:
            self.documents += 1
            self._pending.append(row)
            self._pending_tokens += row.input_ids.size
            self.write(self.args.rows_per_shard)

    def write(self, least: int = 1) -> None:
        """Write shards while there are at least ``least`` rows."""
        while (number := self.available - self.rows) >= least and self.rows < self.max_rows:
            number = min(number, self.args.rows_per_shard, self.max_rows - self.rows)
            rows = self._fill(number) if self.seq_len else [self._take() for _ in range(number)]
            targets = np.concatenate([row.targets() for row in rows])
            self.counts += np.bincount(targets[targets != IGNORED], minlength=self.counts.size)
            self.rows += number
            self.tokens += targets.size
            self.longest = max(self.longest, *(row.input_ids.size for row in rows))
            self._write_shard(rows)

    def _take(self, most: int = sys.maxsize) -> Row:
        """Return the next pending row, or its first ``most`` tokens."""
        row = self._pending.popleft()
        size = row.input_ids.size
        if size > most:
            self._pending.appendleft(row.cut(most, size))
        self._pending_tokens -= min(size, most)
        return row.cut(0, min(size, most))

    def _fill(self, number: int) -> list[Row]:
        """Return a number of rows of text, filled end to end."""
        parts, missing = [], number * self.seq_len
        while missing:
            parts.append(self._take(missing).input_ids)
            missing -= parts[-1].size
        return [Row(ids) for ids in np.concatenate(parts).reshape(number, self.seq_len)]

    def _write_shard(self, rows: list[Row]) -> None:
        path = self.folder / f"{self.folder.name}-{len(self.shards):05d}.json"
        content = b"".join(map(_line, rows))
        if self.args.zip:
            buffer = io.BytesIO()
            with open_gzip_writer(buffer) as stream:
                stream.write(content)
            path, content = path.with_suffix(".json.gz"), buffer.getvalue()
        with atomic_file(str(path)) as file:
            file.write(content)
        sha256 = hashlib.sha256(content).hexdigest()
        self.shards.append({"name": path.name, "rows": len(rows), "bytes": len(content), "sha256": sha256})

    def totals(self) -> dict[str, Any]:
        """Return the entry of the split in the manifest."""
        totals = {"documents": self.documents, "rows": self.rows, "tokens": self.tokens}
        more = {"tokens_dropped": self._pending_tokens} if self.seq_len else {"counted_tokens": int(self.counts.sum())}
        return {**totals, **more, "shards": self.shards}


def _line(row: Row) -> bytes:
    columns = {"input_ids": row.input_ids, "attention_mask": np.ones(row.input_ids.size), "labels": row.labels}
    record = {name: values.astype(np.int64) for name, values in columns.items() if values is not None}
    if orjson is not None:
        return orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n"
    lists = {name: values.tolist() for name, values in record.items()}
    return json.dumps(lists, separators=(",", ":")).encode() + b"\n"


def entropy(counts: np.ndarray) -> float:
    """Return Shannon's entropy of single tokens in nats: the loss of the best predictor that ignores context."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
