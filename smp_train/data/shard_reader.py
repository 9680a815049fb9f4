"""Rows of one converted shard, read with `pread`: a mapped file that another node cuts ends the process."""

from __future__ import annotations

import os

import numpy as np

from smp_train.data.source import Row
from smp_train.data.targets import NO_GAPS
from smp_train.data.token_cache import GAPS, LABELS, crc32, crc_of_gaps, digest_of, read_header
from smp_train.errors import DataError

REBUILT = "start again, and it is rebuilt"
"""What to do about a damaged file that is made of a shard."""


class MissingTokens(DataError):
    """The file of ids is not there."""


class ShardReader:
    """Rows of one converted shard.

    The index is read once and kept. The file of ids is opened when a row is read, and stays open until `close`, after
    which the next row opens it again.

    Args:
        base: name of the cache without suffix.
        tok: the file of ids, where it lies elsewhere; it need not be there yet.
        cure: what to do about a damaged file, once it is removed.
    """

    def __init__(self, base: str, *, tok: str | None = None, cure: str = REBUILT) -> None:
        self.base, self._path, self._cure = base, tok or base + ".tok", cure
        opened = read_header(base, index_alone=tok is not None)
        if opened is None:
            raise DataError(f"{base}.idx: it or its .tok is missing or damaged; {cure}")
        self.header, offset = opened
        self._tok = -1
        with open(base + ".idx", "rb") as file:
            file.seek(offset)
            self._arrays = {
                name: np.fromfile(file, dtype=kind, count=count)
                for name, (kind, count) in self.header.arrays.items()
            }
        same = digest_of(self._arrays, labelled=self.header.labelled) == self.header.digest
        same &= crc_of_gaps(self._arrays) == self.header.gaps_crc
        if not same or self.gaps()[:, 0].max(initial=0) >= self.header.rows:
            raise DataError(f"{base}.idx: does not match its checksum; remove this file, {cure}")
        self.dtype = np.dtype(self.header.dtype)
        self._crc = self._arrays["crc"]
        # Most shards have rows of one length, all counted: those are read with nothing to look up.
        plain = self.header.mask == "none" and self.header.row_length is not None and not self.header.labelled
        self._plain_bytes = (self.header.row_length or 0) * self.dtype.itemsize if plain else 0
        self._plain_tail = (self.header.row_length or 0).to_bytes(8, "little")

    def open(self) -> None:
        """Open the file of ids. Raises DataError."""
        if self._tok < 0:
            try:
                self._tok = os.open(self._path, os.O_RDONLY)
            except FileNotFoundError:
                raise MissingTokens(f"{self._path}: was removed; {self._cure}") from None
            except OSError as error:
                raise self._unreadable(error) from None

    def __del__(self) -> None:
        if getattr(self, "_tok", -1) >= 0:
            os.close(self._tok)

    def _unreadable(self, error: OSError) -> DataError:
        return DataError(
            f"{self._path}: cannot be read ({error.strerror}); is the file system of --data_cache_dir still there?"
        )

    def close(self) -> None:
        """Close the file of ids."""
        if self._tok >= 0:
            os.close(self._tok)
            self._tok = -1

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

    def _span(self, row: int) -> tuple[int, int]:
        length = self.header.row_length
        if length is not None:
            return row * length, length
        starts = self._arrays["starts"]
        return int(starts[row]), int(starts[row + 1]) - int(starts[row])

    def _bytes(self, size: int, offset: int) -> bytes:
        self.open()
        try:
            return os.pread(self._tok, size, offset)
        except OSError as error:
            raise self._unreadable(error) from None

    def fill(self, row: int, into: np.ndarray, scratch: np.ndarray) -> bool:
        """Read row ``row`` into int64 [tokens] of its own length; False, with nothing read, when it is no such row.

        ``scratch`` is [tokens] of `dtype`, to read into first. Raises DataError as `row`.
        """
        size = self._plain_bytes
        if scratch.nbytes != size:
            return False
        self.open()
        try:
            read = os.preadv(self._tok, [scratch.data], row * size)
        except OSError:
            read = 0
        if read != size or crc32(self._plain_tail, crc32(scratch)) != self._crc[row]:
            # Again, for the message.
            self.row(row)
            return False
        into[:] = scratch
        return True

    def row(self, row: int) -> Row:
        """Read row ``row``. Raises DataError when the bytes cannot be read or are not those that were written."""
        size = self._plain_bytes
        if size:
            data = self._bytes(size, row * size)
            if crc32(self._plain_tail, crc32(data)) == self._crc[row]:
                return Row(np.frombuffer(data, dtype=self.dtype))
        start, n = self._span(row)
        size = self.header.token_bytes
        data = self._bytes(n * size, start * size)
        valid, bits = n, b""
        if self.header.mask != "none":
            valid = int(self._arrays["valid"][row])
        if self.header.mask == "bits":
            bits = self._bytes((n + 7) // 8, self.header.tokens * size + start // 8 + row)
            mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=n).view(bool)
            if mask[:valid].all():
                bits = b""
        if crc32(bits or valid.to_bytes(8, "little"), crc32(data)) != self._crc[row]:
            raise DataError(
                f"{self._path}: row {row} ({self.header.source}:{self.line(row)}) does not match its checksum; "
                f"remove this file, {self._cure}"
            )
        ids = np.frombuffer(data, self.dtype, count=n)
        labels = np.frombuffer(data, LABELS, offset=ids.nbytes) if self.header.labelled else None
        if valid == n:
            return Row(ids, labels=labels)
        return Row(ids, mask if bits else np.arange(n) < valid, labels=labels)
