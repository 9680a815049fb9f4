"""Where shards live, and how they are listed."""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from smp_train.data.lines import is_gzip
from smp_train.data.s3 import is_s3, list_folder
from smp_train.data.shard import Shard
from smp_train.distributed import ALL_RANKS
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

SUFFIXES = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")
"""Of shards, in small letters or capitals."""


def stem(name: str) -> str:
    """Return a shard's name without the suffixes that say how it is stored."""
    suffixes = [suffix for suffix in SUFFIXES if name.lower().endswith(suffix)]
    return name[: -max(map(len, suffixes))] if suffixes else name


def list_shards(location: str, zipped: bool | None = None) -> list[Shard]:
    """List the shards of a folder (or the one file given), by name.

    Hidden files and names that start with ``_`` are no shards; of others a warning says so. ``zipped`` only checks:
    True or False raises when a shard is stored the other way; None asks nothing. Raises DataError when there is no
    shard or one is unusable.
    """
    found, others, folders = _in_s3(location) if is_s3(location) else _in_folder(location)
    if not found:
        hint = f"; its subfolders are {', '.join(folders[:5])}: give one of those" if folders else ""
        raise DataError(f"{location}: no shard in this folder ({', '.join('*' + s for s in SUFFIXES)}){hint}")
    say_left_out(location, others, folders)
    by_stem: dict[str, Shard] = {}
    by_file: dict[tuple[int, int], Shard] = {}
    for shard, file in found:
        if shard.size == 0:
            raise DataError(f"{shard.path}: empty shard (0 bytes); write it again or remove it")
        twin = by_stem.setdefault(stem(shard.name), shard)
        how = f"{twin.name} is beside it"
        if twin is shard:
            twin = by_file.setdefault(file, shard)
            how = f"is the same file as {twin.name}"
        if twin is not shard:
            raise DataError(f"{shard.path}: {how}, so its rows would count twice; remove one of the two")
        # Of an object in S3 the name is all that can be looked at before it is fetched.
        if zipped is not None and zipped != (shard.name.lower().endswith(".gz") if shard.etag else is_gzip(shard.path)):
            kind = "plain" if zipped else "gzipped"
            raise DataError(f"{shard.path}: is {kind}, but --zipped_data is {int(zipped)}; leave the flag out")
    return [shard for shard, _ in found]


def is_shard_name(name: str) -> bool:
    """True when a file of this name is taken for a shard."""
    return name.lower().endswith(SUFFIXES) and name[0] not in "._"


def say_left_out(location: str, names: Iterable[str], folders: Iterable[str] = ()) -> None:
    """Warn, once in a process, of what is in a folder and not read, by kinds of names."""
    kinds = Counter(f"*{os.path.splitext(name)[1]}" for name in names if name[0] not in "._")
    said = [f"{number} {kind}" for kind, number in kinds.most_common(5)] + [f"{name}/" for name in sorted(folders)[:5]]
    if said:
        more = len(kinds) > 5 or len(list(folders)) > 5
        _warn_once(f"{location}: left out, as it is not read: {', '.join(said)}{' and more' if more else ''}")


@cache
def _warn_once(text: str) -> None:
    logger.warning(text, extra=ALL_RANKS)


Listing = tuple[list[tuple[Shard, tuple[int, int]]], list[str], list[str]]
"""Shards, each with what tells its file from all others; names of other files; names of folders."""


def _in_folder(location: str) -> Listing:
    """List a folder, or the one file given."""
    folder = Path(location)
    if folder.is_file():
        return [_shard(folder)], [], []
    if not folder.is_dir():
        raise DataError(f"{location}: no such data folder; check --training_dir and --test_dir")
    try:
        with os.scandir(folder) as entries:
            # Path.is_dir is False for a link to nothing or in a circle, DirEntry.is_dir raises for the latter.
            is_folder = {e.name: (folder / e.name).is_dir() if e.is_symlink() else e.is_dir() for e in entries}
    except OSError as error:
        raise DataError(f"{location}: cannot be listed ({error.strerror})") from None
    files = sorted(name for name, is_dir in is_folder.items() if not is_dir)
    shards = [_shard(folder / name) for name in files if is_shard_name(name)]
    folders = sorted(name for name, is_dir in is_folder.items() if is_dir and name[0] not in "._")
    return shards, [name for name in files if not is_shard_name(name)], folders


def _shard(path: Path) -> tuple[Shard, tuple[int, int]]:
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); remove it or mend the link") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is not a regular file; move it out of the data folder")
    return Shard(str(path), path.name, status.st_size, status.st_mtime_ns), (status.st_dev, status.st_ino)


def _in_s3(location: str) -> Listing:
    objects, folders = list_folder(location)
    shards = [(shard, (-1, n)) for n, shard in enumerate(objects) if is_shard_name(shard.name)]
    return shards, [shard.name for shard in objects if not is_shard_name(shard.name)], folders
