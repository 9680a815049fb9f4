"""Objects in S3, or in anything with its protocol: listed, opened, and fetched several at a time."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import posixpath
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from smp_train.errors import DataError
from smp_train.storage.base import Range
from smp_train.storage.client import AT_ONCE, SCHEME, split
from smp_train.storage.prefetch import prefetched
from smp_train.storage.ranges import RangeFile
from smp_train.storage.s3 import PART_BYTES, UNREADABLE, S3Storage

if TYPE_CHECKING:
    from smp_train.data.files import DataFile

COPY_PREFIX, COPY_SUFFIX = ".fetch-", ".tmp"
"""Names of copies, complete or not; a later fetch of the same version continues an incomplete copy."""
READ_AHEAD = 1 << 20
"""Bytes of one request for an object that is read as a file."""


def _object(path: str) -> tuple[S3Storage, str]:
    """Return the bucket and the key of ``s3://bucket/key``."""
    bucket, key = split(path, DataError)
    return S3Storage(SCHEME + bucket, DataError), key


def list_objects(location: str) -> dict[str, tuple[str, int, str]]:
    """Return (path, size, ETag) of the objects below a prefix, or of the one object, by their relative names.

    Raises DataError when the listing is refused.
    """
    storage = S3Storage(location, DataError)
    objects = storage.files()
    if not objects and not location.endswith("/"):
        bucket, key = _object(location)
        entry = bucket.entry(key) if key else None
        objects = {} if entry is None else {posixpath.basename(key): entry}
        storage = S3Storage(posixpath.dirname(location), DataError)
    if not objects:
        raise DataError(f"{location}: no object below this prefix; check the name")
    return {name: (f"{storage.location}/{name}", size, etag.strip('"')) for name, (size, _, etag) in objects.items()}


def read_object(path: str) -> bytes | None:
    """Return the content of a small object; None if it does not exist or this role may not read it.

    Raises DataError when S3 does not answer.
    """
    storage, key = _object(path)
    return storage.read_unless(key, UNREADABLE)


def open_object(path: str, size: int, etag: str) -> io.BufferedReader:
    """Return an object as a file; reading requests only the bytes that are read, and raises DataError."""
    storage, key = _object(path)
    file = RangeFile(size, lambda start, length: storage.read_range(key, start, length, f'"{etag}"'))
    return io.BufferedReader(file, READ_AHEAD)


@contextmanager
def fetch(
    files: Iterable[DataFile], folder: str, *, at_once: int = AT_ONCE, stop: Callable[[], bool] = lambda: False,
    tick: Callable[[int], None] = lambda done: None,
) -> Iterator[Iterator[tuple[DataFile, str]]]:  # fmt: skip
    """Yield an iterator of (file, path of its local copy), in order; several objects are fetched ahead.

    A copy that an earlier process began is continued if the object still has the same version. The caller deletes the
    copies that it takes; other copies stay for the next fetch. ``tick`` is called with the bytes fetched since its
    last call, from any thread; where ``stop`` returns True, the fetch ends with InterruptedError. Raises DataError.
    """
    closing = threading.Event()
    files = list(files)
    connections = max(1, AT_ONCE // max(1, min(at_once, len(files))))

    def check() -> None:
        if closing.is_set() or stop():
            raise InterruptedError("the fetch was stopped")

    def copy(file: DataFile) -> tuple[DataFile, IO[bytes]]:
        return file, _fetch_object(file, folder, connections, check, tick)

    def take(copies: Iterable[tuple[DataFile, IO[bytes]]]) -> Iterator[tuple[DataFile, str]]:
        for file, target in copies:
            # Under its new name no other process continues, or deletes, the copy.
            name = _new_file(folder)
            with target:
                os.replace(target.name, name)
            yield file, name

    try:
        with contextlib.closing(prefetched(copy, files, at_once, lambda result: result[1].close())) as copies:
            yield take(copies)
    finally:
        closing.set()


def _fetch_object(
    file: DataFile, folder: str, connections: int, check: Callable[[], None], tick: Callable[[int], None]
) -> IO[bytes]:
    """Return the complete copy of an object, open and locked. Raises DataError."""
    storage, key = _object(file.path)
    with contextlib.ExitStack() as on_error:
        try:
            target = on_error.enter_context(_open_copy(file, folder))
            done = target.seek(0, os.SEEK_END)
            if done > file.size:
                done = target.truncate(0)
            tick(done)
            etag = f'"{file.version}"'
            parts = (
                Range(key, start, min(PART_BYTES, file.size - start), etag)
                for start in range(done, file.size, PART_BYTES)
            )

            def read(part: Range) -> bytes:
                check()
                return storage.read_range(*part)

            # Parts are written in order, so an incomplete copy is a correct beginning.
            with contextlib.closing(prefetched(read, parts, connections)) as contents:
                for content in contents:
                    target.write(content)
                    tick(len(content))
            target.flush()
        except InterruptedError:
            raise
        except OSError as error:
            raise DataError(
                f"{folder}: cannot hold a copy of {file.path} ({error.strerror or error}); "
                "free some space or give another --data_cache_dir"
            ) from None
        on_error.pop_all()
    return target


def _open_copy(file: DataFile, folder: str) -> IO[bytes]:
    """Open the copy of this version that an earlier process began, or a new one, to append to it; it is locked.

    While another process writes that copy, or where files cannot be locked, a separate copy is opened.
    """
    version = hashlib.blake2b(f"{file.path} {file.size} {file.version}".encode(), digest_size=16).hexdigest()
    path = os.path.join(folder, f"{COPY_PREFIX}{version}{COPY_SUFFIX}")
    target: IO[bytes] = open(path, "ab+")  # noqa: SIM115
    try:
        fcntl.flock(target, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(target.fileno()), os.stat(path)):  # else another process has just taken it
            return target
    except OSError:
        pass
    target.close()
    return open(_new_file(folder), "ab+")


def _new_file(folder: str) -> str:
    handle, path = tempfile.mkstemp(prefix=COPY_PREFIX, suffix=COPY_SUFFIX, dir=folder)
    os.close(handle)
    return path
