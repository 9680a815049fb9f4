"""The token cache of a folder of shards: where its files are, and which shards have none yet.

There are no locks: a token file depends on its shards alone and appears by renaming, so two jobs may convert the same
shards at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from smp_train.data.s3 import is_s3
from smp_train.data.shard import Shard
from smp_train.data.token_file import VERSION, TokenFile, read_index, version_of
from smp_train.data.token_writer import writing
from smp_train.errors import DataError
from smp_train.storage.paths import private_folder

logger = logging.getLogger("smp_train.data")

BESIDE = ".smp_train_cache"
STALE_SECONDS = 3600


@dataclass(frozen=True)
class Destination:
    """A folder that shards are converted into."""

    folder: str
    prefix: str
    """What the names of its files begin with."""
    vocab_size: int
    skip_bad: bool = False
    """Leave malformed lines out."""
    index_alone: bool = False
    """Keep no tokens."""

    def base(self, *shards: Shard) -> str:
        """Return the path, without suffix, of what is kept about some shards: other versions of them have another."""
        return os.path.join(self.folder, f"{self.prefix}-{_digest([[s.name, s.size, version_of(s)] for s in shards])}")

    def write(self, group: list[tuple[Shard, str | None]], tick: Callable[[int], None]) -> None:
        """Convert shards, each from a local copy where there is one, into one token file. Raises DataError."""
        try:
            with writing(self.base(*(shard for shard, _ in group)), index_alone=self.index_alone) as writer:
                for shard, copy in group:
                    writer.convert(shard, self.vocab_size, tick, read_from=copy, skip_bad=self.skip_bad)
        except InterruptedError:
            raise
        except OSError as error:
            raise self.unwritable(error) from None

    def unwritable(self, error: OSError) -> DataError:
        """Return the message about what could not be written here."""
        hint = "free some space or give" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "give"
        return DataError(
            f"{self.folder}: cannot write the token cache ({error.strerror}); "
            f"{hint} a --data_cache_dir that can be written"
        )


class Index:
    """The token files of some folders, by shard."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._found: dict[tuple[str, int, str], tuple[TokenFile, int]] = {}

    def scan(self, to: Destination, *, index_alone: bool = False) -> None:
        """Read the indexes of a folder that were not read before; ``index_alone``: also those without their tokens."""
        with contextlib.suppress(OSError):
            for name in os.listdir(to.folder):
                if name.startswith(to.prefix) and name.endswith(".idx") and name not in self._read:
                    file = read_index(os.path.join(to.folder, name[: -len(".idx")]), index_alone=index_alone)
                    if file is not None:
                        self._read.add(name)
                        for number, header in enumerate(file.headers):
                            self._found[header.source, header.size, header.modified] = file, number

    def find(self, shard: Shard) -> tuple[TokenFile, int] | None:
        """Return the token file that had a shard when it was scanned, and its number in it."""
        return self._found.get((shard.name, shard.size, version_of(shard)))


class TokenCache:
    """The token files of one data folder: read from any of its places, written to the first that allows it.

    Args:
        location: folder, file or ``s3://`` prefix.
        vocab_size: ids must be below it.
        cache_dir: --data_cache_dir.
        skip_bad: leave malformed lines out.
    """

    def __init__(self, location: str, vocab_size: int, cache_dir: str | None, skip_bad: bool = False) -> None:
        self.vocab_size, self.skip_bad = vocab_size, skip_bad
        if is_s3(location):
            # Named by the bucket and prefix alone: on every machine the same.
            places = [(cache_dir or own_folder(), location.rstrip("/"))]
        else:
            folder = os.path.realpath(location if os.path.isdir(location) else os.path.dirname(location) or ".")
            # Beside the data the folder is no part of the key: the cache stays good when the data is mounted elsewhere.
            beside = [(os.path.join(folder, BESIDE), ""), (own_folder(), folder)]
            places = [(cache_dir, folder)] if cache_dir else beside
        self.places = [
            Destination(where, _digest([VERSION, key, vocab_size]), vocab_size, skip_bad) for where, key in places
        ]
        self._index = Index()
        self.find = self._index.find

    def bases(self, shard: Shard) -> list[str]:
        """Return the paths, without suffix, under which something kept about a shard may be."""
        return [place.base(shard) for place in self.places]

    @cached_property
    def destination(self) -> Destination:
        """Where token files are written; its folder is made when this is first asked for. Raises DataError."""
        reasons = []
        for place in self.places:
            try:
                os.makedirs(place.folder, mode=0o775 if place is self.places[0] else 0o700, exist_ok=True)
                sweep(place.folder)
                ignore = Path(place.folder, ".gitignore")
                if os.path.basename(place.folder) == BESIDE and not ignore.exists():
                    ignore.write_text("*\n")
            except OSError as error:
                reasons.append(f"{place.folder}: cannot hold the token cache ({error.strerror})")
                continue
            if reasons:
                logger.info("%s; using %s instead (--data_cache_dir chooses)", reasons[0], place.folder)
            return place
        raise DataError(f"{reasons[-1]}; give a --data_cache_dir that can be written")

    def scan(self) -> None:
        """Look which token files there are; those that are known already are not read again."""
        for place in self.places:
            self._index.scan(place)

    def missing(self, shards: list[Shard]) -> list[Shard]:
        """Return the shards that have no token file yet."""
        self.scan()
        return [shard for shard in shards if self.find(shard) is None]


def _digest(identity: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(identity).encode(), digest_size=8).hexdigest()


def own_folder() -> str:
    """Return where this user's caches go when they cannot be beside the data. Raises `ConfigError`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.access(base if os.path.isdir(base) else os.path.dirname(base), os.W_OK):
        return os.path.join(base, "smp_train", "tokens")
    return os.path.join(private_folder("smp_train"), "tokens")


def sweep(folder: str) -> None:
    """Remove what a killed conversion left, an hour after its last write by the clock of the file server.

    Raises OSError when the folder cannot be written.
    """
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe.", suffix=".tmp") as probe:
        now = os.fstat(probe.fileno()).st_mtime
    for entry in os.scandir(folder):
        # Gone by now, or another user's: not ours to remove.
        with contextlib.suppress(OSError):
            ours = entry.name.startswith(".") and entry.name.endswith(".tmp")
            if ours and entry.stat().st_mtime < now - STALE_SECONDS:
                os.unlink(entry.path)


def share(shards: list[Shard], rank: int, world: int) -> list[Shard]:
    """Return a rank's share: the largest shards first, each to the rank with least so far; the same on every rank."""
    loads = [(0, one) for one in range(world)]
    mine = []
    for shard in sorted(shards, key=lambda s: (-s.size, s.name)):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + shard.size, least))
        if least == rank:
            mine.append(shard)
    return mine
