"""Memory-mapped files of arrays with a JSON header, used for indexes of token files and for tables of samples.

A file has these parts in sequence: the magic bytes, the length of the header, the header's CRC-32, the header, and the
arrays. Each array begins at a multiple of 8 bytes. Processes that map the same file share its pages.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np

from smp_train.storage.folder import FolderStorage

MAGIC = b"SMPARRAY"
PREFIX = struct.Struct("<8sII")
FIRST_READ = 4096


def atomic_file(path: str) -> AbstractContextManager[BinaryIO]:
    """Return a context manager with a file to write; the file appears at ``path`` once it is complete and synced."""
    folder, name = os.path.split(path)
    return FolderStorage(folder or ".").writer(name)


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def write_arrays(path: str, version: int, header: Any, arrays: Sequence[np.ndarray]) -> None:
    """Write a header and uint32 or uint64 arrays to a file, which appears once it is complete and synced."""
    shapes = [(array.dtype.str, array.size, zlib.crc32(array.tobytes())) for array in arrays]
    text = json.dumps({"version": version, "arrays": shapes, "header": header}).encode()
    text += b" " * (_padded(len(text) + PREFIX.size) - len(text) - PREFIX.size)
    with atomic_file(path) as file:
        file.write(PREFIX.pack(MAGIC, len(text), zlib.crc32(text)) + text)
        for array in arrays:
            file.write(array.tobytes())
            file.write(bytes(_padded(array.nbytes) - array.nbytes))


class ArraysFile:
    """A file of arrays whose header has been read; ``shapes`` has (dtype, number of elements, CRC-32) of each array."""

    def __init__(self, path: str, header: Any, shapes: Sequence[tuple[str, int, int]], begin: int) -> None:
        self.path, self.header, self.shapes = path, header, shapes
        sizes = (_padded(int(dtype[2:]) * count) for dtype, count, _ in shapes)
        self.begins = list(accumulate(sizes, initial=begin))
        """Offset of each array in bytes; the last entry is the size of the file."""

    @cached_property
    def mapped(self) -> mmap.mmap:
        """The mapped file. Raises OSError."""
        with open(self.path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def arrays(self, part: slice = slice(None)) -> list[np.ndarray]:
        """Return some of the arrays, as views of the mapped file. Raises OSError."""
        shapes = zip(self.shapes[part], self.begins[part], strict=False)
        return [np.frombuffer(self.mapped, dtype, count, begin) for (dtype, count, _), begin in shapes]

    def intact(self) -> bool:
        """Return whether every array matches its checksum; reads the whole file. Raises OSError."""
        sums = (zlib.crc32(array.data) for array in self.arrays())
        return all(found == expected for found, (_, _, expected) in zip(sums, self.shapes, strict=True))


def read_header(path: str, version: int) -> ArraysFile | None:
    """Return the file at ``path``; None if it is missing, damaged, or has a different version."""
    try:
        with open(path, "rb", buffering=0) as file:
            data, size = file.read(FIRST_READ), os.fstat(file.fileno()).st_size
            magic, length, crc = PREFIX.unpack_from(data)
            if magic != MAGIC or PREFIX.size + length > size:
                return None
            data += file.read(max(0, PREFIX.size + length - len(data)))
        text = data[PREFIX.size : PREFIX.size + length]
        if zlib.crc32(text) != crc:
            return None
        content = json.loads(text)
        if content["version"] != version:
            return None
        arrays = ArraysFile(path, content["header"], content["arrays"], PREFIX.size + length)
        return arrays if arrays.begins[-1] == size else None
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return None
