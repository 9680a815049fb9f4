"""Shards in S3, or anything that speaks its protocol: listed, and fetched many at a time."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator

from smp_train.data.shard import Shard
from smp_train.errors import DataError
from smp_train.storage import is_s3, split
from smp_train.storage.client import AT_ONCE, SCHEME
from smp_train.storage.prefetch import prefetched
from smp_train.storage.ranges import RangeFile
from smp_train.storage.s3 import UNREADABLE, S3Storage

__all__ = ["AT_ONCE", "is_s3", "list_folder", "open_ranges", "read_small", "staged"]

READ_AHEAD = 1 << 20
"""Bytes of one request of an object that is read as a file."""


def _object(location: str) -> tuple[S3Storage, str]:
    """Return the bucket of ``s3://bucket/key``, and the key."""
    bucket, key = split(location, DataError)
    return S3Storage(SCHEME + bucket, DataError), key


def list_folder(location: str, *, deep: bool = False) -> tuple[list[Shard], list[str]]:
    """List (objects, names of folders) directly below a prefix, or the one object given; in order of keys.

    ``deep`` lists all objects below the prefix, and no folders. Raises DataError when the listing is refused.
    """
    storage = S3Storage(location, DataError)
    found, folders = (storage.files(), []) if deep else storage.level()
    if not found and not folders and not location.endswith("/"):
        bucket, key = _object(location)
        entry = bucket.entry(key) if key else None
        found = {} if entry is None else {os.path.basename(key): entry}
        storage = S3Storage(os.path.dirname(location), DataError)
    return [
        Shard(f"{storage.location}/{name}", name, size, int(modified) * 10**9, etag.strip('"'))
        for name, (size, modified, etag) in found.items()
    ], folders


def read_small(path: str) -> bytes | None:
    """Return the content of an object; None where it is not there, or this role may not read it.

    Raises DataError when that cannot be found out: ranks must not come to different answers.
    """
    storage, key = _object(path)
    return storage.read_unless(key, UNREADABLE)


def open_ranges(path: str, size: int, etag: str) -> io.BufferedReader:
    """Return an object as a file of which only what is read is fetched. What is read raises DataError."""
    storage, key = _object(path)
    file = RangeFile(size, lambda start, length: storage.read_range(key, start, length, f'"{etag}"'))
    return io.BufferedReader(file, READ_AHEAD)


def staged(
    shards: Iterable[Shard], folder: str, *, at_once: int = AT_ONCE, stop: Callable[[], bool] = lambda: False
) -> Iterator[tuple[Shard, str]]:
    """Yield (object, local copy) in the order given, ``at_once`` being fetched meanwhile; each the version listed.

    Copies are temporary files in ``folder``: whoever takes one removes it. Never more than ``at_once`` lie there
    untaken; those go when the iterator is closed. Raises DataError, also when ``folder`` is full, and InterruptedError
    when ``stop``, asked at every chunk, returns True.
    """
    closing = threading.Event()

    def get(shard: Shard) -> tuple[Shard, str]:
        storage, key = _object(shard.path)
        try:
            handle, path = tempfile.mkstemp(prefix=".stage.", suffix=".tmp", dir=folder)
            try:
                with os.fdopen(handle, "wb") as file:

                    def write(chunk: bytes) -> None:
                        if closing.is_set() or stop():
                            raise InterruptedError
                        file.write(chunk)

                    write(b"")
                    storage.receive(key, write, 0, shard.size, f'"{shard.etag}"')
            except BaseException:
                os.unlink(path)
                raise
            return shard, path
        except InterruptedError:
            raise
        except OSError as error:
            raise DataError(
                f"{folder}: cannot hold a copy of {shard.path} ({error.strerror or error}); "
                "free some space or give a --data_cache_dir that can be written"
            ) from None

    with contextlib.closing(prefetched(get, shards, at_once, lambda found: os.unlink(found[1]))) as copies:
        try:
            yield from copies
        finally:
            closing.set()
