"""Lists, opens and fetches objects in S3, or in any store with its protocol; fetches several objects at a time."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import posixpath
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from smp_train.data.source import digest_of
from smp_train.errors import DataError
from smp_train.storage.base import SCHEME, split
from smp_train.storage.client import AT_ONCE
from smp_train.storage.s3 import UNREADABLE, S3Storage
from smp_train.storage.streams import RangeFile, prefetched

if TYPE_CHECKING:
    from smp_train.data.files import DataFile

COPY_PREFIX, COPY_SUFFIX = ".fetch-", ".tmp"
"""Prefix and suffix of copies, complete or not; a later fetch of the same version continues an incomplete copy."""
READ_AHEAD = 1 << 20
"""Bytes of one request for an object that is read as a file."""


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
    return {name: (f"{storage.location}/{name}", size, etag.strip('"')) for name, (size, _, etag) in objects.items()}


def read_object(path: str) -> bytes | None:
    """Return the content of a small object; None if it does not exist or this role may not read it."""
    storage, key = _object(path)
    return storage.read_if_there(key, UNREADABLE)


def open_object(path: str, size: int, etag: str) -> io.BufferedReader:
    """Return an object as a file that requests only the bytes that are read; reading raises DataError."""
    storage, key = _object(path)
    file = RangeFile(size, lambda start, length: storage.read_range(key, start, length, f'"{etag}"'))
    return io.BufferedReader(file, READ_AHEAD)


@contextmanager
def fetch(
    files: Iterable[DataFile], folder: str, *, at_once: int = AT_ONCE, tick: Callable[[int], None] = lambda done: None
) -> Iterator[Iterator[tuple[DataFile, str]]]:
    """Yield an iterator of (file, path of its local copy), in order; several objects are fetched ahead.

    The caller may delete a copy after use; on exit, all copies that the caller took are deleted. Copies that the
    caller did not take, complete or not, stay for the next fetch. ``tick`` is called, from any thread, with the bytes
    fetched since its last call. Raises DataError.
    """
    closing, copies_in_use = threading.Event(), list[str]()

    def count(done: int) -> None:
        if closing.is_set():
            raise DataError(f"{folder}: the fetch has ended")
        tick(done)

    def take(copies: Iterable[tuple[DataFile, IO[bytes]]]) -> Iterator[tuple[DataFile, str]]:
        for file, copy in copies:
            # Under a new name, the copy is neither continued nor deleted by another process.
            copies_in_use.append(_new_path(folder))
            with copy:
                os.replace(copy.name, copies_in_use[-1])
            yield file, copies_in_use[-1]

    try:
        work = lambda file: (file, _fetch_object(file, folder, count))  # noqa: E731
        with contextlib.closing(prefetched(work, files, at_once, lambda result: result[1].close())) as copies:
            yield take(copies)
    finally:
        closing.set()
        for path in filter(os.path.exists, copies_in_use):
            os.unlink(path)


def _fetch_object(file: DataFile, folder: str, tick: Callable[[int], None]) -> IO[bytes]:
    """Return the complete copy of an object, open and locked. Raises DataError."""
    storage, key = _object(file.path)
    with contextlib.ExitStack() as on_error:
        try:
            copy = on_error.enter_context(_open_copy(file, folder))
            done = copy.seek(0, os.SEEK_END)

            def write(chunk: bytes) -> None:
                copy.write(chunk)
                tick(len(chunk))

            tick(done)
            storage.receive(key, write, done, file.size, f'"{file.version}"')
            copy.flush()
        except OSError as error:
            raise DataError(
                f"{folder}: cannot hold a copy of {file.path} ({error.strerror or error}); "
                "free some space or give another --data_cache_dir"
            ) from None
        on_error.pop_all()
    return copy


def _open_copy(file: DataFile, folder: str) -> IO[bytes]:
    """Open and lock the copy that an earlier process began; if another process is writing it, open a new one."""
    path = os.path.join(folder, f"{COPY_PREFIX}{digest_of(file.path, file.size, file.version)}{COPY_SUFFIX}")
    copy: IO[bytes] = open(path, "ab+")  # noqa: SIM115
    with contextlib.suppress(OSError):
        fcntl.flock(copy, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(copy.fileno()), os.stat(path)):  # else another process has just taken the copy
            return copy
    copy.close()
    return open(_new_path(folder), "ab+")


def _new_path(folder: str) -> str:
    return os.path.join(folder, f"{COPY_PREFIX}{uuid.uuid4().hex}{COPY_SUFFIX}")
