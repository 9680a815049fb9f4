"""Sizes and checksums of files."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

try:  # the same CRC-32, several times faster
    from isal.isal_zlib import crc32 as _crc32
except ImportError:
    _crc32 = zlib.crc32


class FileRecord(NamedTuple):
    """A file's size in bytes, and its CRC-32 as eight hexadecimal digits."""

    size: int
    crc32: str


class Checksum:
    """Size and CRC-32 of the bytes added so far."""

    def __init__(self) -> None:
        self._size = self._crc = 0

    def add(self, chunk: bytes | bytearray | memoryview) -> None:
        """Add the next bytes."""
        self._crc = _crc32(chunk, self._crc)
        self._size += len(chunk)

    def record(self) -> FileRecord:
        """Return size and checksum."""
        return FileRecord(self._size, f"{self._crc:08x}")


def checksum_of(chunks: Iterable[bytes]) -> FileRecord:
    """Return the size and the checksum of a file whose content is these chunks, in order."""
    checksum = Checksum()
    for chunk in chunks:
        checksum.add(chunk)
    return checksum.record()
