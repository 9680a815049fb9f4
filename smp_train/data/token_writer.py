"""Writing token files (`token_file` has the format): lines of shards are parsed, checked and summed up in an index."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import IO

import numpy as np

from smp_train.data import targets
from smp_train.data.atomic_file import atomic_file, settle, temporary_file
from smp_train.data.lines import read_lines
from smp_train.data.rows import RowParser
from smp_train.data.shard import Shard
from smp_train.data.source import Row
from smp_train.data.token_file import (
    GAPS,
    LABELS,
    MAGIC,
    PREFIX,
    VERSION,
    Header,
    crc32,
    dtype_for,
    version_of,
)
from smp_train.errors import DataError


class _Rows:
    """The arrays of a shard while it is being converted."""

    def __init__(self) -> None:
        self.crc, self.starts, self.lines = array("I"), array("Q", [0]), array("Q")
        self.valid, self.extent = array("Q"), array("Q")
        self.bits: dict[int, bytes] = {}
        """Masks of the rows that are not simply padded on the right."""
        self.gaps = tuple(array("I") for _ in GAPS)
        self.counted = self.attended = self.longest = self.longest_line = self.skipped = 0
        self.latest = 1
        self.first_bad = ""
        self.labelled = False

    def add(self, line: int, row: Row, dtype: np.dtype) -> bytes:
        """Take the next row; return what to store of it."""
        n, mask = row.input_ids.size, row.counted
        stored = row.input_ids.astype(dtype).tobytes()
        if row.labels is not None:
            self.labelled = True
            stored += row.labels.astype(LABELS).tobytes()
        valid = n if mask is None else int(np.count_nonzero(mask))
        bits, extent = b"", valid
        if mask is not None and not mask[:valid].all():
            places = np.flatnonzero(mask)
            extent = int(places[-1] - places[0]) + 1
            bits = self.bits[len(self.crc)] = np.packbits(mask).tobytes()
        counted = valid
        if row.labels is not None or extent > valid or extent < 2:
            counted = self._add_gaps(row)
        self.crc.append(crc32(bits or valid.to_bytes(8, "little"), crc32(stored)))
        self.starts.append(self.starts[-1] + n)
        self.lines.append(line)
        self.valid.append(valid)
        self.extent.append(extent)
        self.counted += counted
        self.attended += valid
        if n > self.longest:
            self.longest, self.longest_line = n, line
        return stored

    def _add_gaps(self, row: Row) -> int:
        """Note where a row carries no loss; return how many of its tokens do."""
        where = row.targets()
        assert where is not None
        found = targets.row_gaps(where, row.counted, np.array([0, where.size]))
        found[:, 0] = len(self.crc)
        for column, values in zip(self.gaps, found.T, strict=True):
            column.extend(values.tolist())
        self.latest = max(self.latest, targets.latest(found))
        return int(np.count_nonzero(where))

    def bitmap(self) -> bytes:
        if not self.bits:
            return b""
        rows = len(self.crc)
        bitmap = bytearray(self.starts[rows] // 8 + rows)
        for row in range(rows):
            start, n = self.starts[row], self.starts[row + 1] - self.starts[row]
            bits = self.bits.get(row) or np.packbits(np.arange(n) < self.valid[row]).tobytes()
            bitmap[start // 8 + row : start // 8 + row + len(bits)] = bits
        return bytes(bitmap)

    def arrays(self) -> dict[str, np.ndarray]:
        crc = np.frombuffer(self.crc, dtype="<u4")
        starts = np.frombuffer(self.starts, dtype="<u8")
        valid = np.frombuffer(self.valid, dtype="<u8")
        lines = np.frombuffer(self.lines, dtype="<u8")
        lengths = np.diff(starts)
        found = {"starts": starts} if (lengths != lengths[0]).any() else {}
        if self.bits or (valid != lengths).any():
            found["valid"] = valid
        if self.bits:
            found["extent"] = np.frombuffer(self.extent, dtype="<u8")
        if (lines != np.arange(1, lines.size + 1, dtype=np.uint64)).any():
            found["lines"] = lines
        if self.gaps[0]:
            found |= {name: np.frombuffer(column, dtype="<u4") for name, column in zip(GAPS, self.gaps, strict=True)}
        return {**found, "crc": crc}

    def header(self, shard: Shard, vocab_size: int, dtype: np.dtype, tok_bytes: int) -> tuple[Header, bytes]:
        """Return what the index says of the shard, and its arrays."""
        arrays = self.arrays()
        header = Header(
            rows=len(self.crc), tokens=self.starts[-1], counted=self.counted, attended=self.attended,
            dtype=dtype.str, row_length=None if "starts" in arrays else self.longest, longest=self.longest,
            longest_line=self.longest_line, mask="bits" if self.bits else "prefix" if "valid" in arrays else "none",
            tok_bytes=tok_bytes, digest=digest_of(arrays, labelled=self.labelled), source=shard.name, size=shard.size,
            modified=version_of(shard), vocab_size=vocab_size, skipped=self.skipped, first_bad=self.first_bad,
            labelled=self.labelled, latest=self.latest,
            arrays={name: (values.dtype.str, values.size) for name, values in arrays.items()},
        )  # fmt: skip
        return header, b"".join(values.tobytes() for values in arrays.values())


class Writer:
    """Writes shards one after the other into one pair of files; made by `writing`."""

    def __init__(self, tok: IO[bytes] | None) -> None:
        self._tok = tok
        self.headers: list[Header] = []
        self.arrays: list[bytes] = []

    def convert(
        self,
        shard: Shard,
        vocab_size: int,
        tick: Callable[[int], None] = lambda done: None,
        *,
        read_from: str | None = None,
        skip_bad: bool = False,
    ) -> Header:
        """Add a shard of JSON lines. Raises DataError ``PATH:LINE: reason; what to do``.

        ``read_from`` is a local copy of a shard that is elsewhere; ``skip_bad`` leaves out, and counts, malformed
        lines. A damaged gzip stream is an error all the same: what is missing behind the damage is not known.
        """
        parse, rows = RowParser(vocab_size), _Rows()

        def parsed() -> Iterator[tuple[int, Row]]:
            for number, line in read_lines(read_from or shard.path, tick, shown=shard.path):
                try:
                    yield number, parse(line)
                except ValueError as error:
                    if not skip_bad:
                        raise DataError(f"{shard.path}:{number}: {error}") from None
                    rows.skipped += 1
                    rows.first_bad = rows.first_bad or f"{number}: {error}"

        header = self._add(shard, vocab_size, rows, parsed())
        if read_from is None:
            _refuse_changed(shard)
        return header

    def add_block(self, name: str, vocab_size: int, block: np.ndarray) -> None:
        """Add rows [rows, tokens], all counted, as a shard called ``name``."""
        size = block.size * dtype_for(vocab_size).itemsize
        self._add(Shard("", name, size, 0), vocab_size, _Rows(), enumerate(map(Row, block), 1))

    def _add(self, shard: Shard, vocab_size: int, rows: _Rows, found: Iterable[tuple[int, Row]]) -> Header:
        dtype, tok_bytes = dtype_for(vocab_size), 0
        for number, row in found:
            tok_bytes += self._write(rows.add(number, row, dtype))
        if not rows.crc:
            why = f"none of its lines is a row ({rows.first_bad})" if rows.skipped else "no row in it"
            raise DataError(f"{shard.path}: empty shard ({why}); write it again or remove it")
        tok_bytes += self._write(rows.bitmap())
        header, arrays = rows.header(shard, vocab_size, dtype, tok_bytes)
        self.headers.append(header)
        self.arrays.append(arrays)
        return header

    def _write(self, data: bytes) -> int:
        if self._tok is not None:
            self._tok.write(data)
        return len(data)


@contextlib.contextmanager
def writing(base: str, *, index_alone: bool = False) -> Iterator[Writer]:
    """Write a pair of files that appear under their names complete and on disk; on an error nothing is left.

    ``index_alone`` drops the tokens, for counting rows.
    """
    with temporary_file(base + ".tok") as (tok, scratch):
        writer = Writer(None if index_alone else tok)
        yield writer
        tok.close()
        if not index_alone:
            settle(scratch, base + ".tok", sync_folder=False)
    body = b"".join(writer.arrays)
    header = {"version": VERSION, "crc": crc32(body), "shards": [asdict(header) for header in writer.headers]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + PREFIX.size) % 8)
    with atomic_file(base + ".idx") as idx:
        idx.write(PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text + body)


def _refuse_changed(shard: Shard) -> None:
    try:
        status = os.stat(shard.path)
    except OSError as error:
        raise DataError(
            f"{shard.path}: vanished while it was being read ({error.strerror}); put it back and start again"
        ) from None
    if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
        raise DataError(f"{shard.path}: changed while it was being read; start again when it is complete")


def write_rows(name: str, base: str, vocab_size: int, block: np.ndarray) -> None:
    """Write rows that need no parsing, [rows, tokens], all counted, as the token file of a shard called ``name``."""
    with writing(base) as writer:
        writer.add_block(name, vocab_size, block)


def digests_of_block(block: np.ndarray, vocab_size: int) -> dict[str, str]:
    """Return, by type of id, the digest of rows [rows, tokens], all counted, on lines 1, 2, ..."""
    found = {}
    for dtype in dict.fromkeys((dtype_for(vocab_size), np.dtype("<u4"))):
        rows = _Rows()
        for number, ids in enumerate(block, 1):
            rows.add(number, Row(ids), dtype)
        found[dtype.str] = digest_of(rows.arrays())
    return found


def digest_of(arrays: dict[str, np.ndarray], *, labelled: bool = False) -> str:
    """Return the identity of the rows that the arrays of an index are of."""
    digest = hashlib.blake2b(b"labels" if labelled else b"", digest_size=16)
    for name, values in arrays.items():
        # Gaps follow from what the checksums of the rows are of.
        if name != "lines" and name not in GAPS:
            digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()
