"""The rows of a place under `--shuffle window:K`: their number in every shard must be known before the first step.

Where `smp-train prepare` left its manifest, or the indexes of prepared tokens are in S3, it is; else every shard is
read once, checked and counted, and its index is kept, common to all jobs.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Generator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from smp_train.data import conversion, manifest, s3
from smp_train.data.atomic_file import atomic_file, settle
from smp_train.data.shard import Shard
from smp_train.data.token_cache import Destination, Index, TokenCache, share
from smp_train.data.token_file import Header, TokenFile, header_of_block, read_index
from smp_train.data.utils import list_shards
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

_LENGTHS = struct.Struct("<QQ")


class WindowIndex:
    """A place under `--shuffle window:K` before it is opened: its units, and what is known of their rows.

    A unit is what is staged at a time: a shard of JSON lines, or a ``.tok`` object. No method is collective.

    Args:
        location, vocab_size, cache_dir, zipped, max_bad: as of `open_data`'s flags.
        prepared: the place holds prepared tokens in S3, not shards.
        window: shards of a window.
    """

    def __init__(
        self, location: str, *, prepared: bool, window: int, vocab_size: int, cache_dir: str | None = None,
        zipped: bool | None = None, max_bad: float | None = None,
    ) -> None:  # fmt: skip
        self.location, self.prepared = location, prepared
        self.cache = TokenCache(location, vocab_size, cache_dir, max_bad is not None)
        self.index_objects: list[Shard] = []
        if prepared:
            objects = s3.list_folder(location)[0]
            self.units = [shard for shard in objects if shard.name.endswith(".tok") and shard.name[0] not in "._"]
            self.index_objects = paired(self.units, objects)
        else:
            self.units = list_shards(location, zipped)
        self.is_large = len(self.units) > 2 * window
        """False where two windows hold all of it."""
        self.listed: dict[str, Header] = {}
        """What the manifest says of each shard."""
        if self.is_large and not prepared:
            self.listed = listed_headers(location, self.units, vocab_size)
        self._index = Index()

    @cached_property
    def destination(self) -> Destination:
        """Where the indexes of counted units are; the folder is made. Raises DataError."""
        whole = self.cache.destination
        folder = os.path.join(whole.folder, f"window-{whole.prefix}")
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise whole.unwritable(error) from None
        return replace(whole, folder=folder, index_alone=True)

    def known(self, unit: Shard) -> list[tuple[TokenFile, int]]:
        """Return the index of each shard in a unit, and its number there; nothing if it is not known on this node."""
        if self.prepared:
            file = read_index(self.destination.base(unit), index_alone=True)
            return [] if file is None else [(file, number) for number in range(len(file.headers))]
        if unit.name in self.listed:
            return [(TokenFile("", [self.listed[unit.name]], 0, 0), 0)]
        found = self._index.find(unit) or self.cache.find(unit)
        return [] if found is None else [found]

    def unknown(self, units: list[Shard]) -> list[Shard]:
        """Return the units of which the rows are not known on this node."""
        if not self.prepared:
            self.cache.scan()
            self._index.scan(self.destination, index_alone=True)
        return [unit for unit in units if not self.known(unit)]

    def lacking(self) -> list[int]:
        """Return 0 of each unit that this rank sees converted by an unbounded run, of others 1."""
        if self.prepared:
            return [1] * len(self.units)
        self.cache.scan()
        return [int(self.cache.find(unit) is None) for unit in self.units]

    def count(self, slot: str, rank: int, world: int, at_once: int, processes: int) -> Generator[int, None, None]:
        """Count a rank's share of the units whose rows are not known; objects of S3 go through ``slot``."""
        missing = self.unknown(share(self.units, rank, world))
        if self.prepared:
            yield from self._fetch_indexes(missing, slot)
        elif missing:
            size = 0 if s3.is_s3(self.location) else conversion.FILE_BYTES
            yield from conversion.convert(
                self.destination, missing, what="counting rows", shown=rank == 0, copies=slot, file_bytes=size,
                at_once=at_once, processes=min(processes, at_once),
            )  # fmt: skip

    def _fetch_indexes(self, missing: list[Shard], slot: str) -> Generator[int, None, None]:
        unit_of = {self.index_objects[self.units.index(unit)]: unit for unit in missing}
        to = self.destination
        for index, copy in s3.staged(list(unit_of), slot) if missing else ():
            unit = unit_of[index]
            try:
                settle(copy, to.base(unit) + ".idx")
            except OSError as error:
                raise to.unwritable(error) from None
            file = read_index(to.base(unit), index_alone=True)
            if file is None or file.begins[-1] != unit.size:
                os.unlink(to.base(unit) + ".idx")  # else the next start takes it for this unit's
                raise DataError(
                    f"{index.path}: is damaged, of another version, or of another .tok; make both or copy them again"
                )
            yield 1

    def index_files(self, units: list[Shard]) -> bytes:
        """Return the index files of some units, for nodes that have not counted them."""
        parts = []
        for base in dict.fromkeys(file.base for unit in units for file, _ in self.known(unit) if file.base):
            name, content = os.path.basename(base).encode(), Path(base + ".idx").read_bytes()
            parts += [_LENGTHS.pack(len(name), len(content)), name, content]
        return b"".join(parts)

    def take_index_files(self, files: bytes) -> None:
        """Keep index files of another node that are not here. Raises DataError."""
        to, at = self.destination, 0
        while at < len(files):
            name, content = _LENGTHS.unpack_from(files, at)
            at += _LENGTHS.size
            base = os.path.join(to.folder, files[at : at + name].decode())
            if read_index(base, index_alone=True) is None:
                try:
                    with atomic_file(base + ".idx") as file:
                        file.write(files[at + name : at + name + content])
                except OSError as error:
                    raise to.unwritable(error) from None
            at += name + content


def paired(units: list[Shard], objects: list[Shard]) -> list[Shard]:
    """Return the ``.idx`` object of each ``.tok`` object. Raises DataError for one without the other."""
    indexes = {shard.name: shard for shard in objects if shard.name.endswith(".idx")}
    wanted = {shard.name[: -len(".tok")] + ".idx": shard for shard in units}
    for name, shard in wanted.items():
        if name not in indexes:
            raise DataError(f"{shard.path}: its .idx is not beside it; make both or copy them again")
    for name, index in indexes.items():
        if name not in wanted:
            raise DataError(f"{index.path}: its .tok is not beside it; make both or copy them again")
    return [indexes[name] for name in wanted]


def listed_headers(location: str, shards: list[Shard], vocab_size: int) -> dict[str, Header]:
    """Return headers of all shards out of the manifest of `smp-train prepare` beside them; none unless it names all."""
    split = manifest.find(location)
    if split is None or any(split.size(shard.name) != shard.size for shard in shards):
        return {}
    try:
        entries = [(shard, split.shards[shard.name]) for shard in shards]
        found = {
            shard.name: header_of_block(shard, entry["rows"], split.seq_len, vocab_size, entry["digests"])
            for shard, entry in entries
        }
    except (KeyError, TypeError):
        return {}  # of an earlier version
    logger.info("%s: the rows of %d shards are those of its %s", location, len(found), manifest.MANIFEST)
    return found
