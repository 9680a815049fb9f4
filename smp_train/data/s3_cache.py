"""Prefixes of S3 that are read as they are, copied to this machine: one folder for each version of their objects.

A copy is locked by every process that reads it. One of an earlier version is removed by the next run of that prefix,
when no process reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from pathlib import Path

from smp_train.data import s3
from smp_train.data.atomic_file import settle
from smp_train.data.folder_lock import FolderLock, take
from smp_train.data.shard import Shard
from smp_train.data.token_cache import own_folder, share, sweep
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

PREFIX = "s3-"
_locks: dict[str, tuple[str, FolderLock | None]] = {}
"""By prefix: the lock on the copy that this process reads, until it ends or takes another version."""


def bring(location: str, cache_dir: str | None, rank: int = 0, world: int = 1) -> tuple[str, list[str]]:
    """Copy this rank's share of a folder in S3 that is read as it is; return (local folder, what was fetched).

    The local folder is named by the prefix and the versions of all objects, so versions never mix. Raises DataError.
    """
    objects = s3.list_folder(location)[0]
    versions = "".join(f"{shard.path} {shard.size} {shard.etag}\n" for shard in objects)
    where = hashlib.blake2b(location.rstrip("/").encode(), digest_size=4).hexdigest()
    place = os.path.join(cache_dir or own_folder(), PREFIX + where)
    folder = f"{place}-{hashlib.blake2b(versions.encode(), digest_size=8).hexdigest()}"
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        if _locks.get(place, ("",))[0] != folder:
            _locks.pop(place, None)
            lock = None
            with contextlib.suppress(NotImplementedError):
                lock = take(folder, shared=True)
            _locks[place] = folder, lock
        os.makedirs(folder, exist_ok=True)
        _remove_earlier(place, folder, location)
        sweep(folder)
        # Partitioned before looking: files appear while ranks look, and all ranks must agree on the partition.
        missing = _missing(share(objects, rank, world), folder)
        size = sum(shard.size for shard in _missing(objects, folder)) if rank == 0 else 0
        free = shutil.disk_usage(folder).free
        if size > free:
            logger.warning(
                "%s: has room for %.2f GB, but %.2f GB of %s are to be copied there; remove copies of other places "
                "that no run reads (%s* beside it), or give another --data_cache_dir",
                folder, free / 1e9, size / 1e9, location, PREFIX,
            )
        for shard, copy in s3.staged(missing, folder) if missing else ():
            settle(copy, os.path.join(folder, shard.name))
    except OSError as error:
        raise DataError(
            f"{folder}: cannot hold a copy of {location} ({error.strerror or error}); "
            "give a --data_cache_dir that can be written"
        ) from None
    return folder, [shard.name for shard in missing]


def _missing(objects: list[Shard], folder: str) -> list[Shard]:
    def is_here(shard: Shard) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.getsize(os.path.join(folder, shard.name)) == shard.size
        return False

    return [shard for shard in objects if shard.size and not is_here(shard)]


def _remove_earlier(place: str, folder: str, location: str) -> None:
    """Remove copies of other versions that no process reads; where files cannot be locked, they stay."""
    for other in Path(place).parent.glob(f"{Path(place).name}-*"):
        if str(other) == folder or not other.is_dir():
            continue
        with contextlib.suppress(NotImplementedError, OSError):
            lock = take(str(other))
            if lock is not None and other.exists():
                logger.warning("%s: removed, as %s has changed since", other, location)
                shutil.rmtree(other, ignore_errors=True)
