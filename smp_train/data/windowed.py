"""A set of shards of which `--shuffle window:K` keeps two windows on disk; of the others it knows the indexes alone."""

from __future__ import annotations

import copy
import hashlib
import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Generator
from pathlib import Path

from smp_train import distributed
from smp_train.data import s3
from smp_train.data.folder_lock import FolderLock
from smp_train.data.rounds import in_rounds
from smp_train.data.shard import Shard
from smp_train.data.staging import Slot, Stager, claim_slot, digest_of
from smp_train.data.token_cache import TokenCache, share
from smp_train.data.token_dataset import LEFT_OUT, TokenShards, in_order, judge, open_converted
from smp_train.data.token_file import ShardRows, TokenFile
from smp_train.data.window_index import WindowIndex
from smp_train.distributed import Runtime
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

STAGED_AGAIN = "start again, and it is staged again; is something clearing the --data_cache_dir?"


class Windowed(TokenShards):
    """Rows of shards that are staged while those before them are read.

    Args:
        shards: the files.
        found: header of each, with the file of its index where there is one, and its number there.
        slot: where they are staged.
        units: the unit of the slot that each shard is in, and its number there.
        stager: of the process that stages for its node; None on others.
    """

    staged = True

    def __init__(
        self, shards: list[Shard], found: list[tuple[TokenFile, int]], slot: Slot, units: list[tuple[int, int]],
        stager: Stager | None,
    ) -> None:
        super().__init__(shards, found, STAGED_AGAIN)
        self.slot, self.stager, self._units = slot, stager, units
        self._wanted: tuple[list[int], list[int]] | None = None
        self._last = TokenFile("", [], 0, 0)
        self._changed = threading.Condition()
        self._reading: dict[int, ShardRows] = {}
        """The shards that are being read."""

    def _index(self, shard: int) -> ShardRows:
        """Return the rows of a shard for its index alone; of one file it is kept: all may be more than memory."""
        file, number = self.found[shard]
        if self._last.base != file.base:
            self._last = copy.copy(file)
        return ShardRows(self._last, number)

    def _rows(self, shard: int) -> ShardRows:
        """Return the rows of a shard; wait until the training loop has it staged. Raises DataError."""
        with self._changed:
            self._changed.wait_for(lambda: shard in self._reading or self._wanted is None)
            if shard not in self._reading:
                raise DataError(
                    f"{self.files[shard].path}: is not staged, as no training is going on; rows under --shuffle "
                    "window:K are read in their order alone"
                )
            return self._reading[shard]

    def want(self, needed: list[int], following: list[int]) -> None:
        """Have shards ``needed`` staged, then ``following``, and no others; collective when these change.

        Called when every rank has read all rows before those that are needed. Raises DataError.
        """
        if (needed, following) == self._wanted:
            return
        units = [list(dict.fromkeys(self._units[shard][0] for shard in group)) for group in (needed, following)]
        in_rounds("staging the next window", self._advance(*units))
        # Collective too: where one rank cannot open its files, no other may come to the next source of a blend alone.
        in_rounds("opening the next window", self._enter(needed, following))

    def _advance(self, needed: list[int], following: list[int]) -> Generator[None, None, None]:
        if self.stager is not None:
            yield from self.stager.advance(needed, following)

    def _enter(self, needed: list[int], following: list[int]) -> Generator[None, None, None]:
        with self._changed:
            # Opened now, so that whatever removes them in the middle of the window does no harm.
            self._reading = {shard: self._reading.get(shard) or self._staged_rows(shard) for shard in needed}
            self._wanted = needed, following
            self._changed.notify_all()
        yield

    def _staged_rows(self, shard: int) -> ShardRows:
        unit, number = self._units[shard]
        file = self.slot.staged(unit)
        if file is None:
            raise DataError(f"{self.slot.unit_base(unit)}.tok: was removed; {self.cure}")
        try:
            file.open()
        except OSError as error:
            raise DataError(f"{file.path}: cannot be read ({error.strerror}); {self.cure}") from None
        return ShardRows(file, number, self.cure)

    def rest(self) -> None:
        """Give up what is being staged: no more is read for now."""
        with self._changed:
            self._wanted = None
            self._reading = {}
            self._changed.notify_all()
        if self.stager is not None:
            self.stager.stop()


def assemble(
    place: WindowIndex, folder: str, stager_of: Callable[[Slot], Stager | None], max_bad: float | None = None
) -> Windowed:
    """Return the rows of a place of which the indexes are known. Raises DataError.

    Args:
        place: the place.
        folder: the slot.
        stager_of: makes the stager of the slot, in the process that stages for its node.
        max_bad: fraction of malformed lines that may have been left out; None tolerates none.
    """
    for unit in place.unknown(place.units):
        raise DataError(f"{unit.path}: its index vanished; is something clearing the --data_cache_dir?")
    known = [place.known(unit) for unit in place.units]
    found = [one for of_unit in known for one in of_unit]
    units = [(unit, number) for unit, of_unit in enumerate(known) for number in range(len(of_unit))]
    to, indexes = place.destination, []
    if place.prepared:
        unit_of = {(file.base, number): unit for (file, number), unit in zip(found, units, strict=True)}
        found = in_order(found, to.vocab_size)
        units = [unit_of[file.base, number] for file, number in found]
        indexes = [to.base(unit) + ".idx" for unit in place.units]
    digests = [digest_of([file.headers[number] for file, number in of_unit]) for of_unit in known]
    slot = Slot(
        folder, "", to.vocab_size, to.skip_bad, units=tuple(place.units), digests=tuple(digests), indexes=tuple(indexes)
    )
    stager = stager_of(slot)
    source = Windowed([place.units[unit] for unit, _ in units], found, slot, units, stager)
    judge(source, max_bad, LEFT_OUT if place.prepared else "")
    if stager is not None and stager.node == 0:
        _say_room(place, source)
    return source


def _say_room(place: WindowIndex, source: Windowed) -> None:
    slot, window = source.slot.folder, place.window
    needed = sum(sorted((header.tok_bytes for header in source.headers), reverse=True)[: 2 * window])
    free = shutil.disk_usage(slot).free + sum(path.stat().st_size for path in Path(slot).glob("*.tok"))
    logger.info(
        "%s: %d shards, of which two windows of %d are kept in %s: at most %.2f GB, and what is being fetched",
        place.location, len(place.units), window, slot, needed / 1e9,
    )
    if needed > free:
        logger.warning(
            "%s: has room for %.2f GB of them only; lower the %d of --shuffle window:%d, or give another "
            "--data_cache_dir", slot, free / 1e9, window, window,
        )


def open_windowed(
    location: str, window: int, cache: TokenCache, shards: list[Shard], ranks: Runtime, *, max_bad: float | None,
    processes: int,
) -> TokenShards | None:
    """Open a place, as of `WindowIndex`, of which two windows are kept on disk; None where they hold all of it.

    Collective.
    """
    with distributed.together(f"reading {location}"):
        place = WindowIndex(location, window, cache, shards)
        # Made by the first look: a node that cannot write there stops all.
        folder = place.destination.folder if place.is_large else ""
    refuse_different(location, [(unit.name, unit.size, unit.etag) for unit in place.units])
    if not place.is_large:
        return None
    shared = ranks.num_nodes > 1 and _is_shared(folder)
    node, nodes = (ranks.node_rank, ranks.num_nodes) if shared else (0, 1)
    lock: FolderLock | None = None

    def claim() -> tuple[int, str]:
        nonlocal lock
        if ranks.local_rank or node:
            return ranks.node_rank, ""
        try:
            path, lock = claim_slot(folder)
        except OSError as error:
            raise place.destination.unwritable(error) from None
        return ranks.node_rank, path

    slots = {of_node: path for of_node, path in distributed.gather("taking a folder to stage in", claim) if path}
    slot = slots[0 if shared else ranks.node_rank]
    # Raw copies of all ranks of a node together take no more room than a window.
    at_once = max(1, min(s3.AT_ONCE, window // ranks.local_world_size))
    counting = f"counting the rows of {location}"
    in_rounds(counting, place.count(slot, ranks.rank, ranks.world_size, at_once, processes))
    if any(distributed.gather(counting, lambda: bool(place.unknown(place.units)))):
        _exchange_indexes(place, ranks, counting)
    # Copies of a file on two nodes may have different times, by which an index names its shard.
    in_rounds(counting, place.count(slot, ranks.local_rank, ranks.local_world_size, at_once, processes))
    with distributed.together(counting):
        converted = not place.prepared and not cache.missing(place.units)
    # Nodes may keep caches of their own: an unbounded run has converted all of it only where every rank sees that.
    if not distributed.any_rank(not converted):
        with distributed.together(f"opening {location}"):
            return open_converted(cache, place.units, max_bad)

    def stager_of(of_job: Slot) -> Stager | None:
        at_once = max(1, min(s3.AT_ONCE, window) // nodes)
        return Stager(of_job, node, nodes, at_once, ranks.local_world_size, lock) if ranks.local_rank == 0 else None

    with distributed.together(f"opening {location}"):
        return assemble(place, slot, stager_of, max_bad)


def refuse_different(place: str, seen: object) -> None:
    """Raise DataError on all ranks where they have not all ``seen`` the same, by its text; collective."""
    digest = hashlib.blake2b(repr(seen).encode(), digest_size=16).digest()
    if len(set(distributed.gather(f"comparing {place}", lambda: digest))) > 1:
        with distributed.together(f"comparing {place}"):
            raise DataError(
                f"{place}: the data changed while ranks listed it, or is not the same on every node; start again, "
                "with the same data on all"
            )


def _exchange_indexes(place: WindowIndex, ranks: Runtime, counting: str) -> None:
    """Give every node the indexes of what the others have counted; collective."""
    with distributed.together(counting):
        mine = place.index_files(share(place.units, ranks.rank, ranks.world_size))
    failure: DataError | None = None
    for files in distributed.exchange(mine):
        if ranks.local_rank == 0 and failure is None:
            try:
                place.take_index_files(files)
            except DataError as error:
                failure = error  # the others are in the exchange: to its end first
    with distributed.together(counting):
        if failure is not None:
            raise failure


def _is_shared(folder: str) -> bool:
    """Return whether all nodes see one folder; collective."""

    def write() -> str:
        name = f".shared-{uuid.uuid4().hex}.tmp"
        Path(folder, name).touch()
        return name

    probe = Path(folder, distributed.on_main(f"writing to {folder}", write))
    shared = all(distributed.gather(f"looking at {folder}", probe.exists))
    distributed.on_main(f"looking at {folder}", lambda: probe.unlink(missing_ok=True))
    return shared
