"""Folders of S3 that are read as they are, copied to this machine: one folder for each version of a place.

A copy is locked by every process that reads it. One of an earlier version of a place is removed by the next run of that
place when no process reads it.
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
"""Of each place the copy that this process reads, until it ends or takes another version."""


def bring(location: str, cache_dir: str | None, rank: int = 0, world: int = 1) -> tuple[str, list[str]]:
    """Copy this rank's share of a folder in S3 that is read as it is; return (local folder, what was fetched).

    The local folder is named by the place and the versions of all objects, so versions never mix. Raises DataError.
    """
    objects = s3.list_folder(location)[0]
    versions = hashlib.blake2b(digest_size=8)
    for shard in objects:
        versions.update(f"{shard.path} {shard.size} {shard.etag}\n".encode())
    where = hashlib.blake2b(location.rstrip("/").encode(), digest_size=4).hexdigest()
    place = os.path.join(cache_dir or own_folder(), PREFIX + where)
    folder = f"{place}-{versions.hexdigest()}"
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        if _locks.get(place, ("",))[0] != folder:
            _locks.pop(place, None)
            _locks[place] = folder, _shared_lock(folder)
        os.makedirs(folder, exist_ok=True)
        _remove_earlier(place, folder, location)
        sweep(folder)
        # Dealt before looking: what is there changes while ranks look, and they must agree on the deal.
        missing = _missing(share(objects, rank, world), folder)
        if rank == 0:
            _warn_of_room(location, folder, sum(shard.size for shard in _missing(objects, folder)))
        for shard, copy in s3.staged(missing, folder) if missing else ():
            settle(copy, os.path.join(folder, shard.name))
    except OSError as error:
        raise DataError(
            f"{folder}: cannot hold a copy of {location} ({error.strerror or error}); "
            "give a --data_cache_dir that can be written"
        ) from None
    return folder, [shard.name for shard in missing]


def _shared_lock(folder: str) -> FolderLock | None:
    with contextlib.suppress(NotImplementedError):
        return take(folder, shared=True)
    return None


def _missing(objects: list[Shard], folder: str) -> list[Shard]:
    def is_here(shard: Shard) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.getsize(os.path.join(folder, shard.name)) == shard.size
        return False

    return [shard for shard in objects if shard.size and not is_here(shard)]


def _remove_earlier(place: str, folder: str, location: str) -> None:
    """Remove copies of other versions of a place that no process reads; where files cannot be locked, they stay."""
    for other in Path(place).parent.glob(f"{Path(place).name}-*"):
        if str(other) == folder or not other.is_dir():
            continue
        with contextlib.suppress(NotImplementedError, OSError):
            lock = take(str(other))
            if lock is not None and other.exists():
                # The rank that comes first says so; a console shows warnings only for most ranks.
                logger.warning("%s: removed, %s is not what it was (%.2f GB)", other, location, _bytes(other) / 1e9)
                shutil.rmtree(other, ignore_errors=True)


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _warn_of_room(location: str, folder: str, size: int) -> None:
    """Warn when there is no room for what is to be copied, with the copies that could make some."""
    free = shutil.disk_usage(folder).free
    if size > free:
        others = [path for path in Path(folder).parent.glob(f"{PREFIX}*") if path.is_dir() and str(path) != folder]
        logger.warning(
            "%s: has room for %.2f GB, but %.2f GB of %s are to be copied there; copies of other places "
            "(%s* beside it) take %.2f GB: remove what no run reads, or give another --data_cache_dir",
            folder, free / 1e9, size / 1e9, location, PREFIX, sum(map(_bytes, others)) / 1e9,
        )  # fmt: skip
