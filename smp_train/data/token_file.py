"""Token files: the rows of one or more shards as ``<base>.tok`` (tokens) and ``<base>.idx`` (where each row is).

``.tok`` holds the shards one after the other. A shard is the ids of its rows, uint16 or uint32, little-endian, without
gaps; where rows have labels, the labels of a row (int32) follow its ids. ``.idx`` is an `arrays_file` with a `Header`
for each shard. Every row has a CRC-32 that is checked whenever the row is read. Both files appear complete and synced,
the ``.idx`` last; a ``.tok`` without ``.idx`` is ignored.

The index is mapped, so that the ranks of a node share it. Tokens are read with pread and not mapped: random rows that
are not in the page cache take three times as long through a mapping.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import resource
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from smp_train.data.arrays_file import ArraysFile, read_header
from smp_train.data.files import DataFile
from smp_train.data.source import Row, Source
from smp_train.errors import DataError

if TYPE_CHECKING:
    from smp_train.data.cache import TokenCache

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

VERSION = 6
LABELS = np.dtype("<i4")
"""Type of stored labels: any id, and -100."""
RESERVED = 512
"""File descriptors left to sockets, libraries and checkpoints."""
MOST_OPEN = 1 << 14
"""Token files open at a time: each takes two descriptors, and one of the kernel's 65,530 mappings."""
REMEDY = "remove it and start again: it is made anew"


@dataclass(frozen=True)
class Header:
    """Summary of one shard in the index of a token file."""

    source: str
    """Name of the shard's file: `DataFile.name`."""
    size: int
    """Bytes of that file."""
    version: str
    """Version of that file: `DataFile.version`."""
    rows: int
    tokens: int
    counted: int
    """Tokens that carry loss."""
    dtype: str
    row_length: int | None
    """Tokens of each row; None where rows have different lengths."""
    longest: int
    longest_number: int
    """Number of the longest row's record, from 1."""
    labelled: bool
    latest_target: int
    """Largest index of the first token that carries loss, over all rows."""
    vocab_size: int
    digest: str
    """Identity of the rows."""
    skipped: int = 0
    """Bad records that were left out (--bad_rows skip)."""
    first_bad_number: int = 0
    """Number of the first bad record."""
    first_bad: str = ""
    """Problem of the first bad record: ``reason; what to do``."""
    arrays: dict[str, int] = field(default_factory=dict)
    """Number of each array in the index: ``crc`` (u4, of each row); where rows have different lengths, ``starts`` (u8,
    first token of each row, and the end); where records are not numbered 1, 2, 3, ..., ``numbers`` (u8); where rows
    have labels, ``first_targets`` (u4)."""

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token and its label."""
        return np.dtype(self.dtype).itemsize + self.labelled * LABELS.itemsize

    @property
    def tok_bytes(self) -> int:
        """Return the bytes of the shard in the ``.tok``."""
        return self.tokens * self.token_bytes


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the type that stores ids below ``vocab_size``."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def row_checksum(data: np.ndarray | bytes, tokens: int) -> int:
    """Return the CRC-32 of a row: of its stored bytes and its length."""
    return int(crc32(tokens.to_bytes(8, "little"), crc32(data)))


class OpenFile:
    """An open pair of token files: the descriptor of the ``.tok`` and the mapped arrays of the ``.idx``.

    It is closed with its last reference, so one thread may drop it while another one reads.
    """

    def __init__(self, file: TokenFile) -> None:
        arrays = file.index.map()
        self.shards = [{name: arrays[number] for name, number in header.arrays.items()} for header in file.headers]
        self.descriptor = os.open(file.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor).atexit = False


class TokenFile:
    """A pair of token files, opened at its first use.

    Args:
        base: path without suffix.
        index: the ``.idx``.
        headers: of its shards.
    """

    def __init__(self, base: str, index: ArraysFile, headers: list[Header]) -> None:
        self.base, self.index, self.headers = base, index, headers
        self.path = base + ".tok"
        self.begins = list(accumulate((header.tok_bytes for header in headers), initial=0))
        """Offset of each shard in the ``.tok``, and the file's size."""
        self._opened: OpenFile | None = None

    def open(self) -> OpenFile:
        """Return the open pair; the pair opened first is closed where too many are open. Raises OSError."""
        opened = self._opened
        if opened is None:
            opened = self._opened = OpenFile(self)
            with _opened_lock:
                _opened_files.append(weakref.ref(self))
                while len(_opened_files) > most_open():
                    first = _opened_files.popleft()()
                    if first is not None:
                        first._opened = None
        return opened


_opened_files: deque[weakref.ref[TokenFile]] = deque()
"""Open files in the order in which they were opened."""
_opened_lock = threading.Lock()


@cache
def most_open() -> int:
    """Return the number of token files that may be open, after raising the soft limit of descriptors."""
    soft, hard = (1 << 20 if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    enough = min(hard, 2 * MOST_OPEN + RESERVED)
    if soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(1, (max(soft, enough) - RESERVED) // 2) if enough > RESERVED else max(1, enough // 8)


def read_index(base: str) -> TokenFile | None:
    """Return the pair of token files at ``base``; None where there is no complete one of this version."""
    index = read_header(base + ".idx", VERSION)
    try:
        if index is None:
            return None
        headers = [Header(**header) for header in index.header]
        if not headers or not all(_is_consistent(header, index.shapes) for header in headers):
            return None
        file = TokenFile(base, index, headers)
        return file if os.stat(file.path).st_size == file.begins[-1] else None
    except (OSError, TypeError, ValueError, AttributeError, IndexError):
        return None


def _is_consistent(header: Header, shapes: Sequence[tuple[str, int]]) -> bool:
    """Return whether a header fits its arrays: reading by it then allocates no more than the files' sizes."""
    rows, tokens = header.rows, header.tokens
    numbers = (rows, tokens, header.longest, header.size, header.vocab_size, header.latest_target, header.skipped)
    expected = {"crc": ("<u4", rows), "starts": ("<u8", rows + 1), "numbers": ("<u8", rows)}
    expected["first_targets"] = ("<u4", rows)
    needed = {"crc"} | ({"starts"} if header.row_length is None else set())
    return (
        all(type(number) is int and number >= 0 for number in numbers)
        and header.row_length in (None, tokens / max(1, rows))
        and header.longest <= tokens
        and header.dtype in ("<u2", "<u4")
        and type(header.labelled) is bool
        and needed <= header.arrays.keys() <= expected.keys()
        and all(n >= 0 and tuple(shapes[n]) == expected[name] for name, n in header.arrays.items())
    )


class TokenRows(Source):
    """The rows of shards in token files, numbered through the shards in the order of their names.

    Args:
        files: the shards' files, for messages.
        stored: token file of each shard, and the shard's number in it.
        remedy: what to do about a damaged token file.
    """

    def __init__(
        self, files: Sequence[DataFile], stored: Sequence[tuple[TokenFile, int]], remedy: str = REMEDY
    ) -> None:
        self.files, self._stored, self.remedy = list(files), list(stored), remedy
        self.cache: TokenCache | None = None
        self.headers = [file.headers[number] for file, number in stored]
        _refuse_mixed(self.files, self.headers)
        self._starts = [0, *accumulate(header.rows for header in self.headers)]
        self._first_tokens = [0, *accumulate(header.tokens for header in self.headers)]
        self.shards = [range(first, end) for first, end in pairwise(self._starts)]
        digest = hashlib.blake2b(digest_size=16)
        for header in self.headers:
            digest.update(f"{header.digest} {header.rows} {header.tokens} {header.dtype}\n".encode())
        self.fingerprint = digest.hexdigest()
        """Digest of all rows in order; independent of the shards' location and compression."""

    def __len__(self) -> int:
        return self._starts[-1]

    def _open(self, shard: int) -> OpenFile:
        file = self._stored[shard][0]
        try:
            return file._opened or file.open()
        except FileNotFoundError as error:
            raise DataError(f"{error.filename}: was removed; start again, and it is made anew") from None
        except OSError as error:
            raise DataError(
                f"{file.path}: cannot be read ({error.strerror}); is the file system of --data_cache_dir still there?"
            ) from None

    def _arrays(self, shard: int) -> dict[str, np.ndarray]:
        return self._open(shard).shards[self._stored[shard][1]]

    def _locate(self, index: int) -> tuple[int, int]:
        """Return (shard, row in the shard)."""
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"row {index} of {len(self)}")
        shard = bisect.bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    def row(self, index: int) -> Row:
        """Read a row. Raises DataError where its bytes cannot be read or do not match their checksum."""
        shard, row = self._locate(index)
        header, (file, number) = self.headers[shard], self._stored[shard]
        opened = self._open(shard)
        arrays = opened.shards[number]
        tokens = header.row_length
        if tokens is None:
            start, end = arrays["starts"][row : row + 2].tolist()
            if not start <= end <= header.tokens:
                raise self._damaged(shard, row)
            tokens = end - start
        else:
            start = row * tokens
        data = np.empty(tokens * header.token_bytes, dtype=np.uint8)
        try:
            size = os.preadv(opened.descriptor, [data.data], file.begins[number] + start * header.token_bytes)
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read ({error.strerror}); {self.remedy}") from None
        if size != data.size or row_checksum(data, tokens) != arrays["crc"][row]:
            raise self._damaged(shard, row)
        if not header.labelled:
            return Row(data.view(header.dtype))
        ids = tokens * (header.token_bytes - LABELS.itemsize)
        return Row(data[:ids].view(header.dtype), data[ids:].view(LABELS))

    def _damaged(self, shard: int, row: int) -> DataError:
        file = self._stored[shard][0]
        return DataError(
            f"{file.path}: row {row} ({self.name(self._starts[shard] + row)}) does not match its checksum; "
            f"the file is damaged: {self.remedy}"
        )

    def name(self, index: int) -> str:
        """Return ``file:number`` of the row's record."""
        shard, row = self._locate(index)
        header = self.headers[shard]
        number = int(self._arrays(shard)["numbers"][row]) if "numbers" in header.arrays else row + 1
        return f"{header.source}:{number}"

    def lengths(self, rows: range) -> np.ndarray:
        """Return the number of tokens of each of some consecutive rows, int64."""
        return self._per_row(rows, self._lengths_in_shard)

    def first_targets(self, rows: range) -> np.ndarray:
        """Return the index of the first token that carries loss in each of some consecutive rows, int64."""
        return self._per_row(rows, self._first_targets_in_shard)

    def _per_row(self, rows: range, in_shard: Any) -> np.ndarray:
        """Return the values of ``in_shard(shard, first, end)`` for consecutive rows that may span shards."""
        parts = [np.empty(0, dtype=np.int64)]
        shard = bisect.bisect_right(self._starts, rows.start) - 1
        while shard < len(self.headers) and self._starts[shard] < rows.stop:
            first, end = self._starts[shard], self._starts[shard + 1]
            parts.append(in_shard(shard, max(rows.start, first) - first, min(rows.stop, end) - first))
            shard += 1
        return np.concatenate(parts)

    def _lengths_in_shard(self, shard: int, first: int, end: int) -> np.ndarray:
        length = self.headers[shard].row_length
        if length is not None:
            return np.full(end - first, length, dtype=np.int64)
        return np.diff(self._arrays(shard)["starts"][first : end + 1].astype(np.int64))

    def _first_targets_in_shard(self, shard: int, first: int, end: int) -> np.ndarray:
        if "first_targets" not in self.headers[shard].arrays:
            return np.ones(end - first, dtype=np.int64)
        return self._arrays(shard)["first_targets"][first:end].astype(np.int64)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all rows."""
        return self._first_tokens[-1]

    def find_token(self, token: int) -> tuple[int, int]:
        """Return (row that holds a token of all rows end to end, first token of that row)."""
        shard = bisect.bisect_right(self._first_tokens, token) - 1
        first, length = self._first_tokens[shard], self.headers[shard].row_length
        if length is not None:
            row = (token - first) // length
            return self._starts[shard] + row, first + row * length
        starts = self._arrays(shard)["starts"]
        row = int(np.searchsorted(starts, np.uint64(token - first), side="right")) - 1
        return self._starts[shard] + row, first + int(starts[row])

    def report(self) -> dict[str, Any]:
        """Return the totals of all shards, and the longest row with its name."""
        headers = self.headers
        longest = max(range(len(headers)), key=lambda shard: headers[shard].longest)
        return {
            "shards": len(headers),
            "rows": len(self),
            "tokens": self.tokens,
            "counted_tokens": sum(header.counted for header in headers),
            "labelled": any(header.labelled for header in headers),
            "left_out": sum(header.skipped for header in headers),
            "longest": headers[longest].longest,
            "longest_at": self.files[longest].at(headers[longest].longest_number),
            "latest_target": max(header.latest_target for header in headers),
        }


def _refuse_mixed(files: Sequence[DataFile], headers: Sequence[Header]) -> None:
    """Raise DataError where some shards have labels and others have none."""
    labelled = [header.labelled for header in headers]
    if any(labelled) and not all(labelled):
        raise DataError(
            f"{files[labelled.index(False)].shown}: has no labels, but {files[labelled.index(True)].shown} has; put "
            "them into two folders and give both to --training_dir, or write the labels of all"
        )
