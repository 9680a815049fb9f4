"""Folders of S3 that are read as they lie, copied to this machine: one folder for each version of a place.

A copy is held by every process that reads it (`locked.hold`). One of an earlier version of a place, which nothing can
ask for any more, is removed by the next run of that place when nobody holds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import uuid
from pathlib import Path

from smp_train.data import index, s3
from smp_train.data.index import share
from smp_train.data.locked import Held, alone, hold
from smp_train.data.token_cache import settle
from smp_train.data.utils import Shard
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

PREFIX = "s3-"
GONE = ".gone-"
"""Stands in the name of a copy that is being removed; what a killed run leaves of it, the next removes."""
_held: dict[str, Held] = {}
"""Of each place the copy that this process reads, until it ends or takes another version."""


def bring(location: str, cache_dir: str | None, rank: int = 0, world: int = 1) -> tuple[str, list[str]]:
    """Copy this rank's share of a folder in S3 that is read as it lies; return (local folder, what was fetched).

    The local folder is named by the place and the versions of all objects, so versions never mix. Raises DataError.
    """
    objects = s3.list_folder(location)[0]
    versions = hashlib.blake2b(digest_size=8)
    for shard in objects:
        versions.update(f"{shard.path} {shard.size} {shard.etag}\n".encode())
    parent, where = cache_dir or index.own_folder(), location.rstrip("/")
    place = os.path.join(parent, PREFIX + hashlib.blake2b(where.encode(), digest_size=4).hexdigest())
    folder = f"{place}-{versions.hexdigest()}"
    try:
        if place not in _held or _held[place].path != folder or not os.path.isdir(folder):
            _held[place] = hold(folder)
        _remove_earlier(place, folder, location)
        index.sweep(folder)
        # Dealt before looking: what is there changes while ranks look, and they must agree on the deal.
        missing = _missing(share(objects, rank, world), folder)
        if rank == 0:
            _say(location, folder, sum(shard.size for shard in _missing(objects, folder)))
        for shard, copy in s3.staged(missing, folder) if missing else ():
            settle(copy, os.path.join(folder, shard.name))
    except OSError as error:
        raise DataError(
            f"{folder}: cannot hold a copy of {location} ({error.strerror or error}); "
            "give a --data_cache_dir that can be written"
        ) from None
    return folder, [shard.name for shard in missing]


def _missing(objects: list[Shard], folder: str) -> list[Shard]:
    return [shard for shard in objects if shard.size and not _is_file_of(os.path.join(folder, shard.name), shard.size)]


def _is_file_of(path: str, size: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.isfile(path) and os.path.getsize(path) == size
    return False


def _remove_earlier(place: str, folder: str, location: str) -> None:
    """Remove copies of other versions of a place that nobody reads."""
    for other in Path(place).parent.glob(f"{Path(place).name}-*"):
        if str(other) != folder:
            with alone(str(other)) as free:
                if free:
                    # Whichever rank comes first says so, and of most a console shows warnings alone.
                    logger.warning("%s: removed, %s is not what it was (%.2f GB)", other, location, _bytes(other) / 1e9)
                    # Under another name first: who asks for that version now must not find half of it.
                    gone = other.with_name(f"{other.name.partition(GONE)[0]}{GONE}{uuid.uuid4().hex}")
                    with contextlib.suppress(OSError):
                        os.rename(other, gone)
                        shutil.rmtree(gone, ignore_errors=True)


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total


def _say(location: str, folder: str, size: int) -> None:
    """Warn when there is no room for what is to be copied, with the copies that could make some."""
    free = shutil.disk_usage(folder).free
    if size > free:
        others = [path for path in Path(folder).parent.glob(f"{PREFIX}*") if str(path) != folder]
        logger.warning(
            "%s: has room for %.2f GB, but %.2f GB of %s are to be copied there; copies of other places "
            "(%s* beside it) take %.2f GB: remove what no run reads, or give another --data_cache_dir",
            folder, free / 1e9, size / 1e9, location, PREFIX, sum(map(_bytes, others)) / 1e9,
        )  # fmt: skip
