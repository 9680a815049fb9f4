"""Token files: the rows of one or more shards as ``<base>.tok`` (tokens) and ``<base>.idx`` (where each row is).

``.tok`` holds the shards in sequence: the ids of every row, uint16 or uint32, little-endian, without gaps, each row
followed by its labels (int32) if the shard has labels. ``.idx`` is an `arrays_file` with a `Header` of each shard, and
with `ARRAYS`, in which the shards follow each other. Every row has a CRC-32 that is checked whenever the row is read.
Both files appear complete and synced, the ``.idx`` last; a ``.tok`` without ``.idx`` is ignored.

The index is mapped, so that the ranks of a node share it. Tokens are read with pread and not mapped: random rows that
are not in the page cache take three times as long through a mapping.
"""

from __future__ import annotations

import bisect
import errno
import os
import weakref
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from smp_train.data.arrays_file import ArraysFile, read_header
from smp_train.data.files import DataFile
from smp_train.data.source import Row, Source, digest_of
from smp_train.errors import DataError
from smp_train.storage.checksum import crc32

if TYPE_CHECKING:
    from smp_train.data.cache import TokenCache

VERSION = 9
REMEDY = "remove it and start again: it is made anew"
ARRAYS = {"starts": "<i8", "numbers": "<i8", "crc": "<u4", "first_targets": "<u4"}
"""Arrays of a shard: ``starts`` (first token of each row, and the end of the last row); and for each row ``numbers``
(number of its record, from 1), ``crc`` (its checksum), ``first_targets`` (index of its first token that carries
loss)."""
LABELS = np.dtype("<i4")
"""Type of stored labels; it can hold any id, and -100."""


class Header(NamedTuple):
    """Summary of one shard in the index of a token file."""

    source: str  # with the next two fields: name, size and version of the shard's `DataFile`
    size: int
    version: str
    rows: int
    tokens: int
    counted: int  # tokens that carry loss
    dtype: str
    longest: int  # tokens of the longest row
    longest_number: int  # number of the longest row's record, from 1
    labelled: bool
    latest_target: int  # largest index of the first token that carries loss, over all rows
    digest: str  # digest of the rows
    skipped: int  # bad records that were left out (--bad_rows skip)
    first_bad_number: int  # number of the first bad record
    first_bad: str  # problem of the first bad record: "reason; what to do"

    @property
    def token_bytes(self) -> int:
        """Return the bytes of a token and its label."""
        return np.dtype(self.dtype).itemsize + self.labelled * LABELS.itemsize


def dtype_for(vocab_size: int) -> np.dtype:
    """Return the type that stores ids below ``vocab_size``."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def row_checksum(stored: bytes, tokens: int) -> int:
    """Return the CRC-32 of the stored bytes of a row, with the number of its tokens as initial value."""
    return int(crc32(stored, tokens))


class TokenFile:
    """A pair of token files at ``base``, the path without suffix."""

    def __init__(self, base: str, index: ArraysFile) -> None:
        self.base, self.path, self.index = base, base + ".tok", index
        self.headers = [Header(**header) for header in index.header]
        self.begins = list(accumulate((header.tokens * header.token_bytes for header in self.headers), initial=0))
        """Offset of each shard in the ``.tok`` in bytes; the last entry is the file's size."""
        self.first_rows = list(accumulate((header.rows for header in self.headers), initial=0))

    @cached_property
    def descriptor(self) -> int:
        """The descriptor of the ``.tok``. Raises OSError. Both files stay readable after they are removed."""
        assert self.index.arrays
        descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor).atexit = False
        return descriptor

    def open(self, number: int) -> OpenShard:
        """Return a shard for reading. Raises OSError."""
        header, rows = self.headers[number], slice(*self.first_rows[number : number + 2])
        sizes = self.begins[number], header.tokens, header.token_bytes
        starts, *columns = (self.index.arrays[name].view(dtype) for name, dtype in ARRAYS.items())
        starts = starts[rows.start + number : rows.stop + number + 1]  # a shard has one more start than rows
        return OpenShard(
            self.descriptor, *sizes, np.dtype(header.dtype), starts, *(column[rows] for column in columns)
        )  # fmt: skip


def read_index(base: str) -> TokenFile | None:
    """Return the token file at ``base``; None if it is incomplete or has a different version."""
    index = read_header(base + ".idx", VERSION)
    try:
        file = None if index is None else TokenFile(base, index)
        return file if file and os.stat(file.path).st_size == file.begins[-1] else None
    except OSError:
        return None


class OpenShard(NamedTuple):
    """A shard open for reading: the ``.tok``'s descriptor, and the shard's offset in it and `ARRAYS`."""

    descriptor: int
    begin: int
    tokens: int
    token_bytes: int
    dtype: np.dtype
    starts: np.ndarray
    numbers: np.ndarray
    crc: np.ndarray
    first_targets: np.ndarray


class TokenRows(Source):
    """The rows of shards, in the order of ``files``; ``stored``: each shard's token file and its number in the file."""

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
        self._labelled = True in labelled
        self._starts = [0, *accumulate(header.rows for header in headers)]
        self._first_tokens = [0, *accumulate(header.tokens for header in headers)]
        self._opened: dict[int, OpenShard] = {}
        self.shards: list[range] = [range(first, end) for first, end in pairwise(self._starts)]
        rows = ((header.digest, header.rows, header.tokens, header.dtype) for header in headers)
        self.fingerprint = digest_of(*rows)
        """Digest of all rows in order; independent of the shards' location and compression."""

    def __len__(self) -> int:
        return self._starts[-1]

    def _open(self, shard: int) -> OpenShard:
        """Return a shard, opened at the first call. Raises IndexError for a number that no shard has."""
        if opened := self._opened.get(shard):
            return opened
        if not 0 <= shard < len(self._stored):
            raise IndexError(f"the index of a row must be in [0, {len(self)})")
        file, number = self._stored[shard]
        try:
            return self._opened.setdefault(shard, file.open(number))
        except OSError as error:
            if error.errno == errno.EMFILE:
                raise DataError(f"{file.base}: too many open files; raise the limit with ulimit -n") from None
            problem = "was removed" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise DataError(f"{file.base}: {problem}; start again; is the --data_cache_dir still there?") from None

    def _shard_of(self, index: int) -> int:
        """Return the shard that holds a row; -1 or the number of shards for an index that no row has."""
        return bisect.bisect_right(self._starts, index) - 1

    def row(self, index: int) -> Row:
        """Read a row. Raises DataError where its bytes cannot be read or do not match their checksum."""
        # For speed, the code of `_shard_of`, and of `_open` for an open shard, is repeated here.
        shard = bisect.bisect_right(self._starts, index) - 1
        opened = self._opened.get(shard) or self._open(shard)
        descriptor, begin, tokens_of_shard, token_bytes, dtype, starts, _, crc, _ = opened
        row = index - self._starts[shard]
        start, end = starts.item(row), starts.item(row + 1)
        if not 0 <= start <= end <= tokens_of_shard:
            raise self._damaged(shard, row)
        tokens = end - start
        try:
            data = os.pread(descriptor, tokens * token_bytes, begin + start * token_bytes)
        except OSError as error:
            path = self._stored[shard][0].path
            raise DataError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
        if len(data) != tokens * token_bytes or crc32(data, tokens) != crc.item(row):
            raise self._damaged(shard, row)
        ids = np.frombuffer(data, dtype, tokens)
        return Row(ids, np.frombuffer(data, LABELS, offset=ids.nbytes)) if self._labelled else Row(ids)

    def _damaged(self, shard: int, row: int) -> DataError:
        file, name = self._stored[shard][0], self.name(self._starts[shard] + row)
        return DataError(f"{file.path}: row {row} ({name}) does not match its checksum; {REMEDY}")

    def name(self, index: int) -> str:
        """Return ``file:number`` of the row's record."""
        shard = self._shard_of(index)
        number = self._open(shard).numbers[index - self._starts[shard]]
        return f"{self.headers[shard].source}:{number}"

    def lengths(self, rows: range) -> np.ndarray:
        """Return the number of tokens of each of some consecutive rows, int64."""
        parts = []
        for shard in range(self._shard_of(rows.start), self._shard_of(rows.stop - 1) + 1):
            begin, starts = self._starts[shard], self._open(shard).starts
            parts.append(np.diff(starts[max(0, rows.start - begin) : rows.stop - begin + 1]))
        return np.concatenate(parts)

    def first_targets(self, shard: int) -> np.ndarray:
        """Return the index of the first token that carries loss in each row of a shard."""
        return self._open(shard).first_targets

    def token_count(self) -> int:
        """See `Source.token_count`; from the headers."""
        return self._first_tokens[-1]

    def find_token(self, token: int) -> tuple[int, int]:
        """See `Source.find_token`; reads one shard's index."""
        shard = bisect.bisect_right(self._first_tokens, token) - 1
        first, starts = self._first_tokens[shard], self._open(shard).starts
        row = int(np.searchsorted(starts, token - first, side="right")) - 1
        return self._starts[shard] + row, first + int(starts[row])

    def report(self) -> dict[str, Any]:
        """Return the totals of all shards, and the longest row with its name."""
        file, longest = max(zip(self.files, self.headers, strict=True), key=lambda shard: shard[1].longest)
        return {
            "rows": len(self),
            "tokens": self.token_count(),
            "counted_tokens": sum(header.counted for header in self.headers),
            "longest": longest.longest,
            "longest_at": file.at(longest.longest_number),
        }
