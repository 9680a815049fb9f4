"""The rows of a place under `--shuffle window:K`: their number in every shard must be known before the first step.

Where `smp-train prepare` left its manifest, or the indexes of prepared tokens are in S3, it is; else every shard is
read once, checked and counted, and its index is kept, common to all jobs.
"""

from __future__ import annotations

import io
import logging
import os
import shutil
import tarfile
from collections.abc import Generator
from dataclasses import replace
from functools import cached_property

from smp_train.data import conversion, manifest, s3
from smp_train.data.atomic_file import atomic_file, settle
from smp_train.data.shard import Shard
from smp_train.data.token_cache import Destination, Index, TokenCache, share
from smp_train.data.token_file import Header, TokenFile, header_of_block, read_index
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")


class WindowIndex:
    """A place under `--shuffle window:K` before it is opened: its units, and what is known of their rows.

    A unit is what is staged at a time: a shard of JSON lines, or a ``.tok`` object. No method is collective.

    Args:
        location: the place.
        window: shards of a window.
        cache: of the place.
        shards: what it holds; none: prepared tokens in S3.
    """

    def __init__(self, location: str, window: int, cache: TokenCache, shards: list[Shard]) -> None:
        self.location, self.window, self.cache, self.prepared = location, window, cache, not shards
        self._index_objects = paired(s3.list_folder(location)[0]) if self.prepared else {}
        self.units = shards or list(self._index_objects)
        self.is_large = len(self.units) > 2 * window
        """False where two windows hold all of it."""
        self._listed: dict[str, Header] = {}
        """What the manifest says of each shard."""
        if self.is_large and not self.prepared:
            self._listed = listed_headers(location, self.units, cache.vocab_size)
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
        if unit.name in self._listed:
            return [(TokenFile("", [self._listed[unit.name]], 0, 0), 0)]
        found = self._index.find(unit)
        return [] if found is None else [found]

    def unknown(self, units: list[Shard]) -> list[Shard]:
        """Return the units of which the rows are not known on this node."""
        if not self.prepared:
            self._index.scan(self.destination, index_alone=True)
            for place in self.cache.places:
                self._index.scan(place)
        return [unit for unit in units if not self.known(unit)]

    def count(self, slot: str, rank: int, world: int, at_once: int, processes: int) -> Generator[int, None, None]:
        """Count a rank's share of the units whose rows are not known; objects of S3 go through ``slot``."""
        missing = self.unknown(share(self.units, rank, world))
        if self.prepared:
            yield from self._fetch_indexes({self._index_objects[unit]: unit for unit in missing}, slot)
        elif missing:
            size = 0 if s3.is_s3(self.location) else conversion.FILE_BYTES
            yield from conversion.convert(
                self.destination, missing, what="counting rows", shown=rank == 0, copies=slot, file_bytes=size,
                at_once=at_once, processes=min(processes, at_once),
            )

    def _fetch_indexes(self, unit_of: dict[Shard, Shard], slot: str) -> Generator[int, None, None]:
        for index, copy in s3.staged(unit_of, slot) if unit_of else ():
            unit, base = unit_of[index], self.destination.base(unit_of[index])
            try:
                settle(copy, base + ".idx")
            except OSError as error:
                raise self.destination.unwritable(error) from None
            file = read_index(base, index_alone=True)
            if file is None or file.begins[-1] != unit.size:
                os.unlink(base + ".idx")  # else the next start takes it for this unit's
                raise DataError(
                    f"{index.path}: is damaged, of another version, or of another .tok; make both or copy them again"
                )
            yield 1

    def index_files(self, units: list[Shard]) -> bytes:
        """Return the index files of some units in a tar, for nodes that have not counted them."""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            for base in dict.fromkeys(file.base for unit in units for file, _ in self.known(unit) if file.base):
                tar.add(base + ".idx", os.path.basename(base) + ".idx")
        return content.getvalue()

    def take_index_files(self, files: bytes) -> None:
        """Keep index files of another node that are not here. Raises DataError."""
        with tarfile.open(fileobj=io.BytesIO(files)) as tar:
            for member in tar:
                path, content = os.path.join(self.destination.folder, member.name), tar.extractfile(member)
                if content is None or read_index(path[: -len(".idx")], index_alone=True) is not None:
                    continue
                try:
                    with atomic_file(path) as file:
                        shutil.copyfileobj(content, file)
                except OSError as error:
                    raise self.destination.unwritable(error) from None


def paired(objects: list[Shard]) -> dict[Shard, Shard]:
    """Return the ``.idx`` object of each ``.tok`` object. Raises DataError for one without the other."""
    toks = {shard.name[:-4]: shard for shard in objects if shard.name.endswith(".tok") and shard.name[0] not in "._"}
    indexes = {shard.name[:-4]: shard for shard in objects if shard.name.endswith(".idx")}
    for of, others, suffix in ((toks, indexes, ".idx"), (indexes, toks, ".tok")):
        for name in sorted(of.keys() - others.keys()):
            raise DataError(f"{of[name].path}: its {suffix} is not beside it; make both or copy them again")
    return {shard: indexes[name] for name, shard in toks.items()}


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
