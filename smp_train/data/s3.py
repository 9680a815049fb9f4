"""Lists and reads objects in S3, or in any store with its protocol."""

from __future__ import annotations

import contextlib
import io
import posixpath
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from smp_train.errors import DataError
from smp_train.storage.base import SCHEME, Entry, Range, split
from smp_train.storage.s3 import UNREADABLE, S3Storage

if TYPE_CHECKING:
    from smp_train.data.files import DataFile

READ_AHEAD = 1 << 20
"""Least bytes of one request of `open_object`."""
CHUNK_BYTES = 4 << 20
"""Bytes of one request of `open_in_sequence`; eight requests are in flight."""


def _object(path: str) -> tuple[S3Storage, str]:
    """Return the bucket and the key of ``s3://bucket/key``."""
    bucket, key = split(path, DataError)
    return S3Storage(SCHEME + bucket, DataError), key


def list_objects(location: str) -> dict[str, tuple[str, int, str]]:
    """Return (path, size, ETag) of the objects below a prefix, or of the one object, by their relative names."""
    storage = S3Storage(location, DataError)
    objects = storage.files()
    if not objects and not location.endswith("/"):
        bucket, key = _object(location)
        entry = bucket.entry(key) if key else None
        objects = {} if entry is None else {posixpath.basename(key): entry}
        storage = S3Storage(posixpath.dirname(location), DataError)
    if not objects:
        raise DataError(f"{location}: no object below this prefix; check the name")
    return {name: (f"{storage.location}/{name}", size, etag) for name, (size, _, etag) in objects.items()}


def read_object(path: str) -> bytes | None:
    """Return the content of a small object; None if it does not exist or this role may not read it."""
    storage, key = _object(path)
    return storage.read_if_there(key, UNREADABLE)


def open_object(file: DataFile) -> io.BufferedReader:
    """Return an object as a file that requests only the bytes that are read; reading raises DataError."""
    storage, key = _object(file.path)
    return storage.open_ranges(key, Entry(file.size, 0.0, file.version), READ_AHEAD)


class _Chunks(io.RawIOBase):
    """Chunks as a file that is read once, from its beginning to its end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._rest, self._position = chunks, memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._rest = self._rest or memoryview(next(self._chunks, b""))
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        self._position += size
        return size


def open_in_sequence(files: Sequence[DataFile]) -> Iterator[io.BufferedReader]:
    """Yield each object as a file to read before the next one; chunks are fetched ahead, also of the next objects.

    Only small objects, lines and texts are fetched ahead, not large tables, of which only some columns are read.
    """

    def chunks_of(file: DataFile) -> range:
        ahead = file.size <= CHUNK_BYTES or file.kind in ("lines", "text")
        return range(0, file.size if ahead else 0, CHUNK_BYTES)

    storage, _ = _object(files[0].path)
    spans = (
        Range(_object(file.path)[1], start, min(CHUNK_BYTES, file.size - start), file.version)
        for file in files
        for start in chunks_of(file)
    )
    with contextlib.closing(storage.ranges(spans)) as chunks:
        for file in files:
            chunks_of_file = islice(chunks, len(chunks_of(file)))
            if file.size <= CHUNK_BYTES:
                yield io.BufferedReader(io.BytesIO(b"".join(chunks_of_file)))
            elif chunks_of(file):
                yield io.BufferedReader(_Chunks(chunks_of_file), 1 << 17)
            else:
                yield open_object(file)
            deque(chunks_of_file, maxlen=0)  # the next file begins after the chunks that were not read
