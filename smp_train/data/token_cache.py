"""One shard as files from which any row is read at once: ``<key>.tok`` (ids), ``<key>.idx`` (where they are).

``.tok``: ids of all rows, uint16 or uint32, little-endian, nothing between rows; in shards with labels behind the ids
of each row its labels, int32; then, only in shards whose
masks are not simply right-padding, a bitmap of the masks (row i of n tokens from token ``start`` on takes
ceil(n/8) bytes from byte ``start // 8 + i`` of it). ``.idx``: magic, header length, header checksum, a JSON
header, and the arrays it lists. Every row carries a CRC-32, checked on every read. Files appear under their
names complete or not at all, the ``.idx`` last, so a ``.tok`` without ``.idx`` counts for nothing. Read
with pread: a mapped file that another node truncates ends the process with no message.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import IO

import numpy as np

from smp_train.data import targets
from smp_train.data.lines import read_lines
from smp_train.data.rows import RowParser
from smp_train.data.source import Row
from smp_train.data.utils import Shard
from smp_train.errors import DataError

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

VERSION = 4
"""4 knows labels: what earlier versions wrote of shards with labels lacks them."""
LABELS = np.dtype("<i4")
"""What labels are stored as: any id, and -100."""
GAPS = ("gap_row", "gap_begin", "gap_end")
MAGIC = b"SMPTRIDX"
_PREFIX = struct.Struct("<8sII")
_FIRST_READ = 4096
# To be asked for it must be set, for all threads: so once, before there are any.
_UMASK = os.umask(0o077)
os.umask(_UMASK)


@dataclass(frozen=True)
class Header:
    """What an ``.idx`` says of its shard without its arrays being read."""

    rows: int
    tokens: int
    counted: int
    """Tokens that carry loss: attention_mask is 1, and the label not -100."""
    attended: int
    """Tokens whose attention_mask is 1."""
    dtype: str
    row_length: int | None
    """Tokens per row when all rows are as long as each other."""
    longest: int
    longest_line: int
    mask: str
    """``none`` (all ones), ``prefix`` (rows padded on the right) or ``bits`` (any other)."""
    tok_bytes: int
    digest: str
    """Identity of the rows: of their checksums, lengths and masks."""
    source: str
    size: int
    vocab_size: int
    skipped: int = 0
    """Lines that were no rows and were left out (--bad_rows skip)."""
    first_bad: str = ""
    """The first of them: ``LINE: reason; what to do``."""
    labelled: bool = False
    latest: int = 1
    """The largest index that the first target of a row has, padding in front left out."""
    gaps_crc: int = 0
    """CRC-32 of the arrays of gaps."""
    version: int = VERSION
    arrays: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name -> (dtype, elements), in stored order: ``crc``; when needed ``starts``, ``valid``,
    ``extent`` (tokens from the first attended one to the last, where masks are not simply padding), ``lines``, and
    the columns of `targets.row_gaps`."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token and its label."""
        return np.dtype(self.dtype).itemsize + self.labelled * LABELS.itemsize


def cache_key(shard: Shard, vocab_size: int, where: str = "") -> str:
    """Return the base name of a shard's cache: a changed shard, vocabulary or format has another one.

    ``where`` tells folders apart when several keep their caches in one place. The inode's ctime is left out: it changes
    when a shard is copied with its times, restored, or given another owner, and every cache would be made again.
    """
    identity = json.dumps([VERSION, where, shard.name, shard.size, shard.etag or shard.mtime_ns, vocab_size])
    # A key of S3 may go through folders; longer file names than 255 bytes there are none.
    name = shard.name.replace("/", "_").encode()[-200:].decode(errors="ignore")
    return f"{name}-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}"


@contextmanager
def atomic_file(path: str) -> Iterator[IO[bytes]]:
    """Write a file that appears under ``path`` when complete and on disk; on an error nothing is left."""
    folder, name = os.path.split(path)
    handle, scratch = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder or ".")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        settle(scratch, path)
    except BaseException:
        if os.path.exists(scratch):
            os.unlink(scratch)
        raise


def settle(scratch: str, path: str) -> None:
    """Give a temporary file its name, and the access that the umask leaves (to others never to write), once on disk."""
    file = os.open(scratch, os.O_RDONLY)
    try:
        os.fchmod(file, 0o664 & ~_UMASK)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(scratch, path)
    directory = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _fits(header: Header) -> bool:
    """Return whether what a header says fits together: then nothing that is read by it is larger than its files."""
    rows, tokens, kinds = header.rows, header.tokens, {"none": (), "prefix": ("valid",), "bits": ("valid", "extent")}
    numbers = (
        rows, tokens, header.counted, header.attended, header.longest, header.longest_line, header.skipped,
        header.vocab_size, header.size, header.latest,
    )  # fmt: skip
    if any(type(number) is not int or number < 0 for number in numbers) or rows == 0:
        return False
    needed = {"crc", *kinds[header.mask], *(("starts",) if header.row_length is None else ())}
    bitmap = tokens // 8 + rows if header.mask == "bits" else 0
    gaps = [tuple(header.arrays[name]) for name in GAPS if name in header.arrays]
    return (
        header.row_length in (None, tokens // rows)
        and (header.row_length is None or tokens % rows == 0)
        and header.longest <= tokens
        and header.dtype in ("<u2", "<u4")
        and type(header.labelled) is bool
        and header.tok_bytes == tokens * header.token_bytes + bitmap
        and needed <= set(header.arrays) <= {"crc", "starts", "valid", "extent", "lines", *GAPS}
        and len(gaps) in (0, len(GAPS))
        and len(set(gaps)) <= 1
        and all(kind == "<u4" and type(count) is int and count > 0 for kind, count in gaps)
        and all(
            (kind, count) == ("<u4" if name == "crc" else "<u8", rows + (name == "starts"))
            for name, (kind, count) in header.arrays.items()
            if name not in GAPS
        )
    )


class _Rows:
    """The arrays of a shard while it is being converted."""

    def __init__(self) -> None:
        self.crc, self.starts, self.lines = array("I"), array("Q", [0]), array("Q")
        self.valid, self.extent = array("Q"), array("Q")
        self.odd: dict[int, bytes] = {}
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
            bits = self.odd[len(self.crc)] = np.packbits(mask).tobytes()
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
        rows = len(self.crc)
        bitmap = bytearray(self.starts[rows] // 8 + rows)
        for row in range(rows):
            start, n = self.starts[row], self.starts[row + 1] - self.starts[row]
            bits = self.odd.get(row) or np.packbits(np.arange(n) < self.valid[row]).tobytes()
            bitmap[start // 8 + row : start // 8 + row + len(bits)] = bits
        return bytes(bitmap)

    def arrays(self) -> dict[str, np.ndarray]:
        crc = np.frombuffer(self.crc, dtype="<u4")
        starts = np.frombuffer(self.starts, dtype="<u8")
        valid = np.frombuffer(self.valid, dtype="<u8")
        lines = np.frombuffer(self.lines, dtype="<u8")
        lengths = np.diff(starts)
        found = {"starts": starts} if (lengths != lengths[0]).any() else {}
        if self.odd or (valid != lengths).any():
            found["valid"] = valid
        if self.odd:
            found["extent"] = np.frombuffer(self.extent, dtype="<u8")
        if (lines != np.arange(1, lines.size + 1, dtype=np.uint64)).any():
            found["lines"] = lines
        if self.gaps[0]:
            found |= {name: np.frombuffer(column, dtype="<u4") for name, column in zip(GAPS, self.gaps, strict=True)}
        return {**found, "crc": crc}


def write(
    shard: Shard,
    base: str,
    vocab_size: int,
    tick: Callable[[int], None] = lambda done: None,
    *,
    read_from: str | None = None,
    skip_bad: bool = False,
) -> None:
    """Convert one shard into ``base``.tok and .idx. Raises DataError ``PATH:LINE: reason; what to do``.

    ``read_from`` is a local copy of a shard that is elsewhere; ``skip_bad`` leaves out, and counts, lines that are no
    rows. A damaged gzip stream is an error all the same: where it breaks off, nobody knows what is missing.
    """
    parse = RowParser(vocab_size)
    dtype, rows = dtype_for(vocab_size), _Rows()
    with atomic_file(base + ".tok") as tok:
        for number, line in read_lines(read_from or shard.path, tick, shown=shard.path):
            try:
                row = parse(line)
            except ValueError as error:
                if not skip_bad:
                    raise DataError(f"{shard.path}:{number}: {error}") from None
                rows.skipped += 1
                rows.first_bad = rows.first_bad or f"{number}: {error}"
                continue
            tok.write(rows.add(number, row, dtype))
        if not rows.crc:
            why = f"none of its lines is a row ({rows.first_bad})" if rows.skipped else "no row in it"
            raise DataError(f"{shard.path}: empty shard ({why}); write it again or remove it")
        if rows.odd:
            tok.write(rows.bitmap())
        tok_bytes = tok.tell()
        if read_from is None:
            _refuse_changed(shard)
    _write_index(shard, base, vocab_size, dtype, rows, tok_bytes)


def _refuse_changed(shard: Shard) -> None:
    try:
        status = os.stat(shard.path)
    except OSError as error:
        raise DataError(
            f"{shard.path}: vanished while it was being read ({error.strerror}); put it back and start again"
        ) from None
    if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
        raise DataError(f"{shard.path}: changed while it was being read; start again when it is complete")


def write_rows(source: str, base: str, vocab_size: int, block: np.ndarray) -> None:
    """Write rows that need no parsing, [rows, tokens], all counted, as the cache of a shard called ``source``."""
    dtype, rows = dtype_for(vocab_size), _Rows()
    with atomic_file(base + ".tok") as tok:
        for number, ids in enumerate(block, 1):
            tok.write(rows.add(number, Row(ids), dtype))
        tok_bytes = tok.tell()
    _write_index(Shard(base + ".tok", source, tok_bytes, 0), base, vocab_size, dtype, rows, tok_bytes)


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the type that ids below ``vocab_size`` are stored as."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def digests_of_block(block: np.ndarray, vocab_size: int) -> dict[str, str]:
    """Return, by type of id, the digest of a cache of rows [rows, tokens], all counted, on lines 1, 2, ..."""
    found = {}
    for dtype in dict.fromkeys((dtype_for(vocab_size), np.dtype("<u4"))):
        rows = _Rows()
        for number, ids in enumerate(block, 1):
            rows.add(number, Row(ids), dtype)
        found[dtype.str] = digest_of(rows.arrays())
    return found


def header_of_block(
    rows: int, seq_len: int, dtype: str, digest: str, *, source: str, size: int, vocab_size: int
) -> Header:
    """Return what the index of a shard says whose rows are all of one length and counted."""
    tokens = rows * seq_len
    return Header(
        rows=rows, tokens=tokens, counted=tokens, attended=tokens, dtype=dtype, row_length=seq_len, longest=seq_len,
        longest_line=1, mask="none", tok_bytes=tokens * np.dtype(dtype).itemsize, digest=digest, source=source,
        size=size, vocab_size=vocab_size,
    )  # fmt: skip


def digest_of(arrays: dict[str, np.ndarray], *, labelled: bool = False) -> str:
    """Return the identity of the rows that the arrays of an index are of."""
    digest = hashlib.blake2b(b"labels" if labelled else b"", digest_size=16)
    for name, values in arrays.items():
        # Gaps follow from what the checksums of the rows are of.
        if name != "lines" and name not in GAPS:
            digest.update(name.encode() + values.tobytes())
    return digest.hexdigest()


def crc_of_gaps(arrays: dict[str, np.ndarray]) -> int:
    """Return the checksum of the arrays of gaps; 0 without."""
    return crc32(b"".join(arrays[name].tobytes() for name in GAPS if name in arrays))


def _write_index(
    shard: Shard, base: str, vocab_size: int, dtype: np.dtype, rows: _Rows, tok_bytes: int
) -> None:
    arrays = rows.arrays()
    header = Header(
        rows=len(rows.crc),
        tokens=rows.starts[-1],
        counted=rows.counted,
        attended=rows.attended,
        dtype=dtype.str,
        row_length=None if "starts" in arrays else rows.longest,
        longest=rows.longest,
        longest_line=rows.longest_line,
        mask="bits" if rows.odd else "prefix" if "valid" in arrays else "none",
        tok_bytes=tok_bytes,
        digest=digest_of(arrays, labelled=rows.labelled),
        source=shard.name,
        size=shard.size,
        vocab_size=vocab_size,
        skipped=rows.skipped,
        first_bad=rows.first_bad,
        labelled=rows.labelled,
        latest=rows.latest,
        gaps_crc=crc_of_gaps(arrays),
        arrays={name: (values.dtype.str, values.size) for name, values in arrays.items()},
    )
    text = json.dumps(asdict(header)).encode()
    text += b" " * (-(len(text) + _PREFIX.size) % 8)
    with atomic_file(base + ".idx") as idx:
        idx.write(_PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text)
        for values in arrays.values():
            idx.write(values.tobytes())


def read_header(base: str, *, index_alone: bool = False) -> tuple[Header, int] | None:
    """Return the header and where the arrays start, or None when there is no whole cache at ``base``.

    ``index_alone`` asks for the ``.idx`` only, whatever has become of the ``.tok``.
    """
    try:
        # Thousands of these are read at a start: no more calls than it takes.
        file = os.open(base + ".idx", os.O_RDONLY)
        try:
            data, size = os.read(file, _FIRST_READ), os.fstat(file).st_size
        finally:
            os.close(file)
        magic, length, crc = _PREFIX.unpack(data[: _PREFIX.size])
        text = data[_PREFIX.size : _PREFIX.size + length]
        if magic != MAGIC or zlib.crc32(text) != crc:
            return None
        header = Header(**json.loads(text))
        if header.version != VERSION or not _fits(header):
            return None
        arrays = sum(np.dtype(kind).itemsize * count for kind, count in header.arrays.values())
        whole = (
            size == _PREFIX.size + length + arrays
            and (index_alone or os.stat(base + ".tok").st_size == header.tok_bytes)
        )
        return (header, _PREFIX.size + length) if whole else None
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
