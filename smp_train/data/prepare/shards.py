"""The rows of a split, and the shards that they are written to."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data.atomic_file import atomic_file
from smp_train.data.readers import open_gzip_writer
from smp_train.data.source import IGNORED, Row
from smp_train.data.writer import writing

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
    tokens that do not fill the last row are dropped. Rows with answers keep their length.

    Args:
        folder: of the split; its name begins the shards' names.
        seq_len: tokens of a row of text; None for rows with answers.
        rows_per_shard: rows of each shard but the last.
        max_rows: most rows; None: no limit.
        vocab_size: token ids are below it.
        output_type: ``shards`` or ``cache``.
        zipped: gzip the shards.
    """

    def __init__(
        self, folder: Path, seq_len: int | None, rows_per_shard: int, max_rows: int | None, vocab_size: int,
        output_type: str, zipped: bool,
    ) -> None:  # fmt: skip
        self.folder, self.seq_len, self.rows_per_shard = folder, seq_len, rows_per_shard
        self.max_rows = sys.maxsize if max_rows is None else max_rows
        self.output_type, self.zipped = output_type, zipped
        self.counts = np.zeros(vocab_size, dtype=np.int64)
        """How often each token carries loss."""
        self.rows = self.tokens = self.longest = self.documents = 0
        self.shards: list[dict[str, Any]] = []
        """Name, rows, bytes and checksum of each shard."""
        self._pending: deque[Row] = deque()
        self._pending_tokens = 0
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def available(self) -> int:
        """Return the number of rows that the records so far suffice for."""
        return self.rows + (len(self._pending) if self.seq_len is None else self._pending_tokens // self.seq_len)

    @property
    def full(self) -> bool:
        """Return whether no further row is needed."""
        return self.available >= self.max_rows

    def add(self, row: Row) -> int:
        """Add the row of a record; return the number of rows that were written."""
        if self.full:
            return 0
        self.documents += 1
        self._pending.append(row)
        self._pending_tokens += row.input_ids.size
        return self.write(self.rows_per_shard)

    def write(self, least: int = 1) -> int:
        """Write shards while there are at least ``least`` rows; return the number of rows that were written."""
        before = self.rows
        while (number := self.available - self.rows) >= least and self.rows < self.max_rows:
            number = min(number, self.rows_per_shard, self.max_rows - self.rows)
            rows = [self._take() for _ in range(number)] if self.seq_len is None else self._fill(number)
            targets = np.concatenate([row.targets() for row in rows])
            self.counts += np.bincount(targets[targets != IGNORED], minlength=self.counts.size)
            self.rows += number
            self.tokens += targets.size
            self.longest = max(self.longest, *(row.input_ids.size for row in rows))
            self._write_shard(rows)
        return self.rows - before

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
        assert self.seq_len is not None
        parts, missing = [], number * self.seq_len
        while missing:
            parts.append(self._take(missing).input_ids)
            missing -= parts[-1].size
        return [Row(ids) for ids in np.concatenate(parts).reshape(number, self.seq_len)]

    def _write_shard(self, rows: list[Row]) -> None:
        path = self.folder / f"{self.folder.name}-{len(self.shards):05d}"
        if self.output_type == "cache":
            with writing(str(path), self.counts.size) as writer:
                writer.add(path.name, 0, "", enumerate(rows, 1))
            path = path.with_suffix(".tok")
            content = path.read_bytes()
        else:
            path, content = path.with_suffix(".json"), b"".join(map(_line, rows))
            if self.zipped:
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
        dropped = self._pending_tokens
        more = {"counted_tokens": int(self.counts.sum())} if self.seq_len is None else {"tokens_dropped": dropped}
        return {**totals, **more, "shards": self.shards}


def _line(row: Row) -> bytes:
    mask = ",".join("1" * row.input_ids.size).encode()
    labels = b"" if row.labels is None else b',"labels":' + _numbers(row.labels)
    return b'{"input_ids":' + _numbers(row.input_ids) + b',"attention_mask":[' + mask + b"]" + labels + b"}\n"


def _numbers(values: np.ndarray) -> bytes:
    values = np.ascontiguousarray(values, dtype=np.int64)
    if orjson is not None:
        return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)
    return json.dumps(values.tolist(), separators=(",", ":")).encode()


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
