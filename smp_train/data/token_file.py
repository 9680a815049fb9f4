"""Token files: the rows of one or more shards as ``<base>.tok`` (tokens) and ``<base>.idx`` (where each row is).

``.tok`` holds the shards one after the other. A shard is the ids of its rows, uint16 or uint32, little-endian, nothing
between rows; where it has labels, those of a row (int32) follow its ids; where masks are not simply right-padding, a
bitmap of all masks follows the rows (row i of n tokens, the first of which is token ``start`` of the shard, takes
ceil(n/8) bytes from byte ``start // 8 + i`` of it). ``.idx`` is magic, length and CRC-32 of the header, the header
(JSON: a `Header` for each shard), and the arrays it lists. Every row has a CRC-32 that is checked whenever it is read.
Files appear under their names complete and synced, the ``.idx`` last; a ``.tok`` without ``.idx`` is ignored.

Files are read with pread and not mapped: a mapped file that another machine truncates ends the process without a
message, and random rows that are not in the page cache take three times as long.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import struct
import weakref
import zlib
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate

import numpy as np

from smp_train.data.shard import Shard
from smp_train.data.source import Row
from smp_train.data.targets import NO_GAPS
from smp_train.errors import DataError

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

VERSION = 5
"""5 holds several shards in a file; files of other versions are made again."""
LABELS = np.dtype("<i4")
"""What labels are stored as: any id, and -100."""
GAPS = ("gap_row", "gap_begin", "gap_end")
MAGIC = b"SMPTRIDX"
PREFIX = struct.Struct("<8sII")
_FIRST_READ = 4096
RESERVED = 512
"""Descriptors left to the rest of the process: sockets, libraries, checkpoints."""
MOST_OPEN = 1 << 16
REBUILT = "start again, and it is rebuilt"
"""What to do about a damaged file that is made of a shard."""
_COUNTS = (
    "rows", "tokens", "counted", "attended", "longest", "longest_line", "skipped", "vocab_size", "size", "latest",
)  # fmt: skip


@dataclass(frozen=True)
class Header:
    """What an ``.idx`` says of one shard without its arrays."""

    rows: int
    tokens: int
    counted: int
    """Tokens that carry loss: attention_mask is 1, and the label not -100."""
    attended: int
    """Tokens whose attention_mask is 1."""
    dtype: str
    row_length: int | None
    """Tokens of a row where all rows are of equal length."""
    longest: int
    longest_line: int
    mask: str
    """``none`` (all ones), ``prefix`` (rows padded on the right) or ``bits`` (any other)."""
    tok_bytes: int
    digest: str
    """Identity of the rows: of their checksums, lengths and masks."""
    source: str
    """Name of the shard."""
    size: int
    modified: str
    """Version of the shard: its ETag in S3, else its modification time in ns."""
    vocab_size: int
    skipped: int = 0
    """Malformed lines that were left out (--bad_rows skip)."""
    first_bad: str = ""
    """The first of them: ``LINE: reason; what to do``."""
    labelled: bool = False
    latest: int = 1
    """The largest index that the first target of a row has, padding in front left out."""
    arrays: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Name -> (dtype, elements), in stored order: ``crc``; when needed ``starts``, ``valid``, ``extent`` (tokens from
    the first attended one to the last, where masks are not simply padding), ``lines``, and the columns of
    `targets.row_gaps`."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token and its label."""
        return np.dtype(self.dtype).itemsize + self.labelled * LABELS.itemsize

    @property
    def array_bytes(self) -> int:
        """Bytes of the arrays in the ``.idx``."""
        return sum(np.dtype(kind).itemsize * count for kind, count in self.arrays.values())


def version_of(shard: Shard) -> str:
    """Return what tells two versions of a shard of equal size apart.

    The inode's ctime does not: it changes when a shard is copied with its times, restored, or given another owner.
    """
    return shard.etag or str(shard.mtime_ns)


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the type that ids below ``vocab_size`` are stored as."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def header_of_block(shard: Shard, rows: int, seq_len: int, vocab_size: int, digests: dict[str, str]) -> Header:
    """Return what the index of a shard says whose rows are all of one length and counted."""
    tokens, dtype = rows * seq_len, dtype_for(vocab_size)
    return Header(
        rows=rows, tokens=tokens, counted=tokens, attended=tokens, dtype=dtype.str, row_length=seq_len,
        longest=seq_len, longest_line=1, mask="none", tok_bytes=tokens * dtype.itemsize, digest=digests[dtype.str],
        source=shard.name, size=shard.size, modified=version_of(shard), vocab_size=vocab_size,
    )  # fmt: skip


class _Descriptor:
    """An open file. It is closed with its last reference, so that a thread may close what another one is reading."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number).atexit = False


class TokenFile:
    """A pair of token files; the arrays of its index are read when they are first used, and kept.

    Args:
        base: its path without suffix.
        headers: what it says of its shards.
        at: byte of the ``.idx`` where its arrays begin.
        crc: CRC-32 of the arrays.
    """

    def __init__(self, base: str, headers: list[Header], at: int, crc: int) -> None:
        self.base, self.headers = base, headers
        self.path = base + ".tok"
        self.begins = list(accumulate((header.tok_bytes for header in headers), initial=0))
        """Byte of the ``.tok`` where each shard begins, and the last ends."""
        self._array_begins = list(accumulate((header.array_bytes for header in headers), initial=at))
        self.index_bytes = self._array_begins[-1]
        """Size of the ``.idx``."""
        self._crc = crc
        self._body: np.ndarray | None = None
        self._opened: _Descriptor | None = None

    def arrays(self, number: int, cure: str = REBUILT) -> dict[str, np.ndarray]:
        """Return the arrays of a shard. Raises DataError when the index is damaged."""
        begin = self._array_begins[0]
        if self._body is None:
            try:
                body = np.fromfile(self.base + ".idx", np.uint8, offset=begin)
            except OSError as error:
                raise DataError(f"{self.base}.idx: cannot be read ({error.strerror}); {cure}") from None
            if crc32(body) != self._crc:
                raise DataError(f"{self.base}.idx: does not match its checksum; remove this file, {cure}")
            self._body = body
        found, at = {}, self._array_begins[number] - begin
        for name, (kind, count) in self.headers[number].arrays.items():
            found[name] = np.frombuffer(self._body, kind, count, at)
            at += found[name].nbytes
        return found

    def open(self) -> _Descriptor:
        """Open the ``.tok``, which can then be read to its end though it is removed. Raises OSError.

        Where too many are open in this process, the one opened first is closed.
        """
        opened = self._opened
        if opened is None:
            opened = self._opened = _Descriptor(self.path)
            _opened.append(weakref.ref(self))
            while len(_opened) > most_open():
                first = _opened.popleft()()
                if first is not None:
                    first.close()
        return opened

    def close(self) -> None:
        """Close the ``.tok``; it opens again when it is read."""
        self._opened = None

    def read(self, into: np.ndarray, offset: int) -> int:
        """Read bytes of the ``.tok`` into ``into``; return how many there were. Raises OSError."""
        opened = self._opened or self.open()
        return os.preadv(opened.number, [into.data], offset)


_opened: deque[weakref.ref[TokenFile]] = deque()
"""The files that were opened, first to last."""


def read_index(base: str, *, index_alone: bool = False) -> TokenFile | None:
    """Return a pair of token files, or None when there is no whole one at ``base``.

    ``index_alone`` asks for the ``.idx`` only, with or without its ``.tok``.
    """
    try:
        with open(base + ".idx", "rb", buffering=0) as file:
            data, size = file.read(_FIRST_READ), os.fstat(file.fileno()).st_size
            magic, length, crc = PREFIX.unpack_from(data)
            if magic != MAGIC or PREFIX.size + length > size:
                return None
            data += file.read(max(0, PREFIX.size + length - len(data)))
        text = data[PREFIX.size : PREFIX.size + length]
        if zlib.crc32(text) != crc:
            return None
        found = json.loads(text)
        headers = [Header(**header) for header in found["shards"]] if found["version"] == VERSION else []
        if not headers or not all(map(_fits, headers)):
            return None
        pair = TokenFile(base, headers, PREFIX.size + length, int(found["crc"]))
        whole = size == pair.index_bytes and (index_alone or os.stat(pair.path).st_size == pair.begins[-1])
        return pair if whole else None
    except (OSError, struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _fits(header: Header) -> bool:
    """Return whether what a header says is consistent: then nothing that is read by it is larger than its files."""
    rows, tokens, arrays = header.rows, header.tokens, header.arrays
    masks: set[str] = {"none": set(), "prefix": {"valid"}, "bits": {"valid", "extent"}}[header.mask]
    gaps = arrays.keys() & set(GAPS)
    shapes = {"crc": ("<u4", rows), "starts": ("<u8", rows + 1)}
    shapes |= dict.fromkeys(("valid", "extent", "lines"), ("<u8", rows))
    if gaps:
        shapes |= dict.fromkeys(GAPS, ("<u4", int(arrays[GAPS[0]][1])))
    needed = {"crc", *masks, *(GAPS if gaps else ()), *(("starts",) if header.row_length is None else ())}
    bitmap = tokens // 8 + rows if header.mask == "bits" else 0
    return (
        all(type(number) is int and number >= 0 for number in map(vars(header).get, _COUNTS))
        and rows > 0
        and header.row_length in (None, tokens / rows)
        and header.longest <= tokens
        and header.dtype in ("<u2", "<u4")
        and type(header.labelled) is bool
        and header.tok_bytes == tokens * header.token_bytes + bitmap
        and needed <= arrays.keys()
        and all(shapes.get(name) == (kind, n) and type(n) is int and n > 0 for name, (kind, n) in arrays.items())
    )


@cache
def most_open() -> int:
    """Return how many files may be open, the soft limit of descriptors raised as far as the hard one allows."""
    soft, hard = (MOST_OPEN if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft < min(hard, MOST_OPEN):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, MOST_OPEN), hard))
            soft = min(hard, MOST_OPEN)
    return max(1, soft - RESERVED, soft // 2)


class ShardRows:
    """The rows of one shard in a token file.

    Args:
        file: the pair of files.
        number: of the shard in it.
        cure: what to do about a damaged file, once it is removed.
    """

    def __init__(self, file: TokenFile, number: int, cure: str = REBUILT) -> None:
        self.file, self.header, self._cure = file, file.headers[number], cure
        self._begin, self._arrays = file.begins[number], file.arrays(number, cure)
        if self.gaps()[:, 0].max(initial=0) >= self.header.rows:
            raise DataError(f"{file.base}.idx: does not match its checksum; remove this file, {cure}")
        self.dtype = np.dtype(self.header.dtype)
        self._crc = self._arrays["crc"]
        # Most shards have rows of one length, all counted: those are read with nothing to look up.
        plain = self.header.mask == "none" and self.header.row_length is not None and not self.header.labelled
        self._plain_bytes = (self.header.row_length or 0) * self.dtype.itemsize if plain else 0
        self._plain_tail = (self.header.row_length or 0).to_bytes(8, "little")

    def line(self, row: int) -> int:
        """Return the line of the shard that row ``row`` was on."""
        lines = self._arrays.get("lines")
        return row + 1 if lines is None else int(lines[row])

    def lengths(self) -> np.ndarray:
        """Return the tokens of every row without padding at its ends, int64 [rows]."""
        for name in ("extent", "valid"):
            if name in self._arrays:
                return self._arrays[name].astype(np.int64)
        if "starts" in self._arrays:
            return np.diff(self._arrays["starts"].astype(np.int64))
        return np.full(self.header.rows, self.header.row_length, dtype=np.int64)

    def gaps(self) -> np.ndarray:
        """Return the gaps of all rows, as `targets.row_gaps`."""
        if GAPS[0] not in self._arrays:
            return NO_GAPS
        return np.stack([self._arrays[name].astype(np.int64) for name in GAPS], axis=1)

    def _read(self, into: np.ndarray, offset: int) -> int:
        try:
            return self.file.read(into, self._begin + offset)
        except FileNotFoundError:
            raise DataError(f"{self.file.path}: was removed; {self._cure}") from None
        except OSError as error:
            raise DataError(
                f"{self.file.path}: cannot be read ({error.strerror}); is the file system of --data_cache_dir still "
                "there?"
            ) from None

    def _damaged(self, row: int) -> DataError:
        return DataError(
            f"{self.file.path}: row {row} ({self.header.source}:{self.line(row)}) does not match its checksum; "
            f"remove this file, {self._cure}"
        )

    def fill(self, row: int, into: np.ndarray, scratch: np.ndarray) -> bool:
        """Read row ``row`` into int64 [tokens] of its own length; False, with nothing read, when it is no such row.

        ``scratch`` is [tokens] of `dtype`, to read into first. Raises DataError as `row`.
        """
        size = self._plain_bytes
        if scratch.nbytes != size:
            return False
        if self._read(scratch, row * size) != size or crc32(self._plain_tail, crc32(scratch)) != self._crc[row]:
            raise self._damaged(row)
        into[:] = scratch
        return True

    def row(self, row: int) -> Row:
        """Read row ``row``. Raises DataError when the bytes cannot be read or are not those that were written."""
        start, n = row * (self.header.row_length or 0), self.header.row_length
        if n is None:
            start, end = map(int, self._arrays["starts"][row : row + 2])
            n = end - start
        size = self.header.token_bytes
        data = np.empty(n * size, dtype=np.uint8)
        data = data[: self._read(data, start * size)]
        valid = n if self.header.mask == "none" else int(self._arrays["valid"][row])
        mask = np.arange(n) < valid if valid < n else None
        tail = valid.to_bytes(8, "little")
        if self.header.mask == "bits":
            bits = np.zeros((n + 7) // 8, dtype=np.uint8)
            self._read(bits, self.header.tokens * size + start // 8 + row)
            attended = np.unpackbits(bits, count=n).view(bool)
            if not attended[:valid].all():
                tail, mask = bits.tobytes(), attended
        if crc32(tail, crc32(data)) != self._crc[row]:
            raise self._damaged(row)
        ids = data[: n * self.dtype.itemsize].view(self.dtype)
        labels = data[ids.nbytes :].view(LABELS) if self.header.labelled else None
        return Row(ids, mask, labels=labels)
