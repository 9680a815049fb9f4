"""Writing token files (`token_file` has the format): lines of shards are parsed, checked and summed up in an index."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import IO

import numpy as np

from smp_train.data import targets
from smp_train.data.atomic_file import atomic_file, settle, temporary_file
from smp_train.data.lines import read_lines
from smp_train.data.rows import RowParser
from smp_train.data.shard import Shard
from smp_train.data.source import Row
from smp_train.data.token_file import GAPS, LABELS, MAGIC, PREFIX, VERSION, Header, crc32, dtype_for, version_of
from smp_train.errors import DataError


class _Rows:
    """What the index says of the rows of one shard while it is being converted."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.starts, self.valid, self.extent, self.lines = array("Q", [0]), array("Q"), array("Q"), array("Q")
        self.gaps = tuple(array("I") for _ in GAPS)
        self.crc = array("I")
        self.bits: dict[int, bytes] = {}
        """Masks of the rows that are not simply padded on the right."""
        self.counted = self.longest = self.longest_line = self.skipped = 0
        self.latest = 1
        self.first_bad = ""
        self.labelled = False

    def add(self, line: int, row: Row) -> bytes:
        """Take the next row; return what to store of it."""
        n, mask = row.input_ids.size, row.counted
        stored = row.input_ids.astype(self.dtype).tobytes()
        if row.labels is not None:
            self.labelled = True
            stored += row.labels.astype(LABELS).tobytes()
        valid = n if mask is None else int(np.count_nonzero(mask))
        bits, extent = b"", valid
        if mask is not None and not mask[:valid].all():
            attended = np.flatnonzero(mask)
            extent = int(attended[-1] - attended[0]) + 1
            bits = self.bits[len(self.crc)] = np.packbits(mask).tobytes()
        if row.labels is None and extent == valid >= 2:
            self.counted += valid
        else:
            self._add_gaps(row)
        self.crc.append(crc32(bits or valid.to_bytes(8, "little"), crc32(stored)))
        self.starts.append(self.starts[-1] + n)
        self.lines.append(line)
        self.valid.append(valid)
        self.extent.append(extent)
        if n > self.longest:
            self.longest, self.longest_line = n, line
        return stored

    def _add_gaps(self, row: Row) -> None:
        """Note where a row carries no loss."""
        where = row.targets()
        assert where is not None
        found = targets.row_gaps(where, row.counted, np.array([0, where.size]))
        found[:, 0] = len(self.crc)
        for column, values in zip(self.gaps, found.T, strict=True):
            column.extend(values.tolist())
        self.latest = max(self.latest, targets.latest(found))
        self.counted += int(np.count_nonzero(where))

    def bitmap(self) -> bytes:
        """Return the masks of all rows, if any is not simply padding on the right."""
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
        """Return the arrays that the index needs, in stored order."""
        starts, valid, extent, lines = (
            np.array(column, "<u8") for column in (self.starts, self.valid, self.extent, self.lines)
        )
        lengths = np.diff(starts)
        found = {"starts": starts} if (lengths != lengths[0]).any() else {}
        if self.bits or (valid != lengths).any():
            found["valid"] = valid
        if self.bits:
            found["extent"] = extent
        if (lines != np.arange(1, lines.size + 1)).any():
            found["lines"] = lines
        if self.gaps[0]:
            found |= {name: np.array(column, "<u4") for name, column in zip(GAPS, self.gaps, strict=True)}
        return {**found, "crc": np.array(self.crc, "<u4")}

    def digest(self, arrays: dict[str, np.ndarray]) -> str:
        """Return the identity of the rows. Gaps, which follow from what the checksums are of, are no part of it."""
        digest = hashlib.blake2b(b"labels" if self.labelled else b"", digest_size=16)
        for name, values in arrays.items():
            if name != "lines" and name not in GAPS:
                digest.update(name.encode() + values.tobytes())
        return digest.hexdigest()

    def header(self, shard: Shard, vocab_size: int, tok_bytes: int) -> tuple[Header, bytes]:
        """Return what the index says of the shard, and its arrays."""
        arrays = self.arrays()
        header = Header(
            rows=len(self.crc), tokens=self.starts[-1], counted=self.counted, attended=sum(self.valid),
            dtype=self.dtype.str, row_length=None if "starts" in arrays else self.longest, longest=self.longest,
            longest_line=self.longest_line, mask="bits" if self.bits else "prefix" if "valid" in arrays else "none",
            tok_bytes=tok_bytes, digest=self.digest(arrays), source=shard.name, size=shard.size,
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
        self, shard: Shard, vocab_size: int, tick: Callable[[int], None] = lambda done: None, *,
        read_from: str | None = None, skip_bad: bool = False,
    ) -> None:  # fmt: skip
        """Add a shard of JSON lines. Raises DataError ``PATH:LINE: reason; what to do``.

        ``read_from`` is a local copy of a shard that is elsewhere; ``skip_bad`` leaves out, and counts, malformed
        lines. A damaged gzip stream is an error all the same: what is missing behind the damage is not known.
        """
        parse, rows = RowParser(vocab_size), _Rows(dtype_for(vocab_size))

        def parsed() -> Iterator[tuple[int, Row]]:
            for number, line in read_lines(read_from or shard.path, tick, shown=shard.path):
                try:
                    yield number, parse(line)
                except ValueError as error:
                    if not skip_bad:
                        raise DataError(f"{shard.path}:{number}: {error}") from None
                    rows.skipped += 1
                    rows.first_bad = rows.first_bad or f"{number}: {error}"

        self.add(shard, vocab_size, parsed(), rows)
        if read_from is None:
            _refuse_changed(shard)

    def add(self, shard: Shard, vocab_size: int, found: Iterable[tuple[int, Row]], rows: _Rows | None = None) -> None:
        """Add a shard of (line, row). Raises DataError where it has no row."""
        rows = rows or _Rows(dtype_for(vocab_size))
        tok_bytes = sum(self._write(rows.add(number, row)) for number, row in found)
        if not rows.crc:
            why = f"none of its lines is a row ({rows.first_bad})" if rows.skipped else "no row in it"
            raise DataError(f"{shard.path}: empty shard ({why}); write it again or remove it")
        header, arrays = rows.header(shard, vocab_size, tok_bytes + self._write(rows.bitmap()))
        self.headers.append(header)
        self.arrays.append(arrays)

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
            settle(scratch, base + ".tok", and_folder=False)
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


def write_rows(name: str, base: str, vocab_size: int, block: np.ndarray | Sequence[Row]) -> None:
    """Write rows that need no parsing as the token file of a shard called ``name``.

    ``block`` is [rows, tokens], all counted, or rows.
    """
    rows = [Row(ids) for ids in block] if isinstance(block, np.ndarray) else block
    with writing(base) as writer:
        size = sum(row.input_ids.size for row in rows) * dtype_for(vocab_size).itemsize
        writer.add(Shard("", name, size, 0), vocab_size, enumerate(rows, 1))


def digests_of_block(block: np.ndarray, vocab_size: int) -> dict[str, str]:
    """Return, by type of id, the digest of rows [rows, tokens], all counted, on lines 1, 2, ..."""
    found = {}
    for dtype in dict.fromkeys((dtype_for(vocab_size), np.dtype("<u4"))):
        rows = _Rows(dtype)
        for number, ids in enumerate(block, 1):
            rows.add(number, Row(ids))
        found[dtype.str] = rows.digest(rows.arrays())
    return found
