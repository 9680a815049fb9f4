"""CRC-32, and sizes and checksums of files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

try:  # the same CRC-32, several times faster
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["FileRecord", "checksum_of", "crc32"]


class FileRecord(NamedTuple):
    """A file's size in bytes, and its CRC-32 as eight hexadecimal digits."""

    size: int = 0
    crc32: str = "00000000"

    def extended(self, chunk: bytes | bytearray | memoryview) -> FileRecord:
        """Return the record of the file with ``chunk`` appended."""
        return FileRecord(self.size + len(chunk), f"{crc32(chunk, int(self.crc32, 16)):08x}")


def checksum_of(chunks: Iterable[bytes]) -> FileRecord:
    """Return the record of a file whose content is these chunks, in order."""
    record = FileRecord()
    for chunk in chunks:
        record = record.extended(chunk)
    return record
