"""Token files: the rows of one or more shards as ``<base>.tok`` (tokens) and ``<base>.idx`` (where each row is).

``.tok`` holds the shards one after the other. A shard is the ids of its rows, uint16 or uint32, little-endian, without
gaps; where rows have labels, the labels of a row (int32) follow its ids. ``.idx`` is an `arrays_file` with a `Header`
and the arrays of `ARRAYS` for each shard. Every row has a CRC-32 that is checked whenever the row is read. Both files
appear complete and synced, the ``.idx`` last; a ``.tok`` without ``.idx`` is ignored.

The index is mapped, so that the ranks of a node share it. Tokens are read with pread and not mapped: random rows that
are not in the page cache take three times as long through a mapping.
"""

from __future__ import annotations

import bisect
import hashlib
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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

VERSION = 7
REMEDY = "remove it and start again: it is made anew"
ARRAYS = {"starts": "<u8", "numbers": "<u8", "crc": "<u4", "first_targets": "<u4"}
"""Arrays of a shard: the first token of each row, and the end; the number of its record, from 1; its checksum; the
index of its first token that carries loss."""
LABELS = np.dtype("<i4")
"""Type of stored labels: any id, and -100."""


@dataclass(frozen=True)
class Header:
    """Summary of one shard in the index of a token file."""

    source: str
    """Name of the shard's file, as `DataFile.name`; its size and version follow."""
    size: int
    version: str
    rows: int
    tokens: int
    counted: int
    """Tokens that carry loss."""
    dtype: str
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
    first_bad: str = ""
    """Problem of the first bad record: ``reason; what to do``."""

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token and its label."""
        return np.dtype(self.dtype).itemsize + self.labelled * LABELS.itemsize


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the type that stores ids below ``vocab_size``."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def row_checksum(data: np.ndarray | bytes, tokens: int) -> int:
    """Return the CRC-32 of a row: of its stored bytes and its length."""
    return int(crc32(tokens.to_bytes(8, "little"), crc32(data)))


class OpenFile:
    """The descriptor of a ``.tok``, and the mapped arrays of each shard in its ``.idx``."""

    def __init__(self, file: TokenFile) -> None:
        arrays = file.index.map()
        self.shards = [arrays[first : first + len(ARRAYS)] for first in range(0, len(arrays), len(ARRAYS))]
        self.descriptor = os.open(file.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor).atexit = False


class TokenFile:
    """A pair of token files at ``base``, the path without suffix."""

    def __init__(self, base: str, index: ArraysFile, headers: list[Header]) -> None:
        self.base, self.path, self.index, self.headers = base, base + ".tok", index, headers
        self.begins = list(accumulate((header.tokens * header.token_bytes for header in headers), initial=0))
        """Offset of each shard in the ``.tok``, and the file's size."""

    @cached_property
    def opened(self) -> OpenFile:
        """The open files, which are read to their end though they may be removed. Raises OSError."""
        return OpenFile(self)


def read_index(base: str) -> TokenFile | None:
    """Return the pair of token files at ``base``; None where there is no complete one of this version."""
    index = read_header(base + ".idx", VERSION)
    try:
        if index is None:
            return None
        headers = [Header(**header) for header in index.header]
        if not headers or not all(map(_is_consistent, headers)) or index.shapes != _shapes(headers):
            return None
        file = TokenFile(base, index, headers)
        return file if os.stat(file.path).st_size == file.begins[-1] else None
    except (OSError, TypeError, ValueError, AttributeError, IndexError):
        return None


def _is_consistent(header: Header) -> bool:
    """Return whether the values of a header are possible; with its arrays' shapes, they bound what is allocated."""
    h = header
    numbers = (h.rows, h.tokens, h.longest, h.size, h.vocab_size, h.latest_target, h.skipped)
    possible = all(type(number) is int and number >= 0 for number in numbers) and h.longest <= h.tokens
    return possible and h.dtype in ("<u2", "<u4") and type(h.labelled) is bool


def _shapes(headers: Sequence[Header]) -> list[list[Any]]:
    """Return the type and the number of elements of each array."""
    return [[dtype, h.rows + (name == "starts")] for h in headers for name, dtype in ARRAYS.items()]


class TokenRows(Source):
    """The rows of shards, numbered in their order; ``stored`` is each shard's token file, and its number in that."""

    def __init__(self, files: Sequence[DataFile], stored: Sequence[tuple[TokenFile, int]]) -> None:
        self.files, self._stored = list(files), list(stored)
        self.cache: TokenCache | None = None
        self.headers = headers = [file.headers[number] for file, number in stored]
        if not any(header.rows for header in headers):
            raise DataError(f"{files[0].shown}: no row in it, and none in {len(files) - 1} other files")
        labelled = {header.labelled: file for file, header in zip(files, headers, strict=True) if header.rows}
        if len(labelled) > 1:
            raise DataError(
                f"{labelled[False].shown}: has no labels, but {labelled[True].shown} has; put them into two folders "
                "and give both to --training_dir, or write the labels of all"
            )
        self._starts = [0, *accumulate(header.rows for header in headers)]
        self._first_tokens = [0, *accumulate(header.tokens for header in headers)]
        # A token and its label take an element; where there are labels, the type is of their common size alone.
        self._dtypes = [np.dtype((np.void, h.token_bytes) if h.labelled else h.dtype) for h in headers]
        self._begins = [file.begins[number] for file, number in stored]
        self.shards = [range(first, end) for first, end in pairwise(self._starts)]
        digest = hashlib.blake2b(digest_size=16)
        for header in headers:
            digest.update(f"{header.digest} {header.rows} {header.tokens} {header.dtype}\n".encode())
        self.fingerprint = digest.hexdigest()
        """Digest of all rows in order; independent of the shards' location and compression."""

    def __len__(self) -> int:
        return self._starts[-1]

    def _open(self, shard: int) -> tuple[OpenFile, list[np.ndarray]]:
        """Return the open token file of a shard, and the shard's arrays."""
        file, number = self._stored[shard]
        try:
            return file.opened, file.opened.shards[number]
        except OSError as error:
            problem = "was removed" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise DataError(f"{file.base}: {problem}; start again; is the --data_cache_dir still there?") from None

    def _locate(self, index: int) -> tuple[int, int]:
        """Return (shard, row in the shard)."""
        if not 0 <= index < self._starts[-1]:
            raise IndexError(f"row {index} of {len(self)}")
        shard = bisect.bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]

    def row(self, index: int) -> Row:
        """Read a row. Raises DataError where its bytes cannot be read or do not match their checksum."""
        shard, row = self._locate(index)
        header, dtype = self.headers[shard], self._dtypes[shard]
        opened, (starts, _, crc, _) = self._open(shard)
        start, end = starts[row : row + 2].tolist()
        if not start <= end <= header.tokens:
            raise self._damaged(shard, row)
        tokens = end - start
        data = np.empty(tokens, dtype)
        try:
            size = os.preadv(opened.descriptor, [data.data], self._begins[shard] + start * dtype.itemsize)
        except OSError as error:
            path = self._stored[shard][0].path
            raise DataError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
        if size != data.nbytes or row_checksum(data, tokens) != crc[row]:
            raise self._damaged(shard, row)
        if not header.labelled:
            return Row(data)
        # The ids of a row come first, then its labels.
        stored = data.view(np.uint8)
        ids = tokens * (dtype.itemsize - LABELS.itemsize)
        return Row(stored[:ids].view(header.dtype), stored[ids:].view(LABELS))

    def _damaged(self, shard: int, row: int) -> DataError:
        file, name = self._stored[shard][0], self.name(self._starts[shard] + row)
        return DataError(f"{file.path}: row {row} ({name}) does not match its checksum; {REMEDY}")

    def name(self, index: int) -> str:
        """Return ``file:number`` of the row's record."""
        shard, row = self._locate(index)
        return f"{self.headers[shard].source}:{self._open(shard)[1][1][row]}"

    def lengths(self, rows: range) -> np.ndarray:
        """Return the number of tokens of each of some consecutive rows, int64."""
        return self._column(rows, lambda arrays, first, end: np.diff(arrays[0][first : end + 1]))

    def first_targets(self, rows: range) -> np.ndarray:
        """Return the index of the first token that carries loss in each of some consecutive rows, int64."""
        return self._column(rows, lambda arrays, first, end: arrays[3][first:end])

    def _column(self, rows: range, read: Callable[[list[np.ndarray], int, int], np.ndarray]) -> np.ndarray:
        """Return ``read(arrays, first, end)`` of each shard that consecutive rows are in."""
        parts = []
        for shard in range(bisect.bisect_right(self._starts, rows.start) - 1, len(self.headers)):
            begin = self._starts[shard]
            if begin >= rows.stop:
                break
            first, end = max(rows.start - begin, 0), min(rows.stop - begin, self.headers[shard].rows)
            parts.append(read(self._open(shard)[1], first, end).astype(np.int64))
        return np.concatenate(parts)

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all rows."""
        return self._first_tokens[-1]

    def find_token(self, token: int) -> tuple[int, int]:
        """Return (row that holds a token of all rows end to end, first token of that row)."""
        shard = bisect.bisect_right(self._first_tokens, token) - 1
        first, starts = self._first_tokens[shard], self._open(shard)[1][0]
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
