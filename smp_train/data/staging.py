"""The folder of `--shuffle window:K`: token files of the shards that are read now, and of the next window.

One process of each node stages (local rank 0), where nodes share the folder each its part. It is asked at the edges of
windows only (`windowed.Windowed.want`), by when every rank has read all rows behind the edge.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from pathlib import Path

from smp_train.data import conversion
from smp_train.data.atomic_file import settle
from smp_train.data.folder_lock import FolderLock, take
from smp_train.data.shard import Shard
from smp_train.data.token_cache import Destination
from smp_train.data.token_file import Header, TokenFile, read_index
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

SLOT = "slot"
"""Name of a job's folder; a number follows."""
SUFFIXES = (".tok", ".idx")
WAIT_SECONDS = 1.0
REPORT_SECONDS = 60.0
"""Seconds between log lines while a window is waited for."""


def claim_slot(folder: str) -> tuple[str, FolderLock | None]:
    """Take the first slot that no other job holds; return it with the lock that holds it. Raises OSError.

    Slots of ended jobs are removed, and temporary files that a killed one left in this one. Where files cannot
    be locked every job has a new slot.
    """
    os.makedirs(folder, exist_ok=True)
    try:
        numbered = (os.path.join(folder, f"{SLOT}-{number}") for number in itertools.count())
        slot, lock = next((slot, lock) for slot in numbered if (lock := take(slot)) is not None)
    except NotImplementedError as problem:
        slot = os.path.join(folder, f"{SLOT}-{uuid.uuid4().hex[:8]}")
        logger.warning("%s; remove %s-* of ended runs yourself", problem, SLOT)
        os.makedirs(slot)
        return slot, None
    os.makedirs(slot, exist_ok=True)
    for path in Path(slot).glob(".*.tmp"):
        path.unlink(missing_ok=True)
    for other in Path(folder).glob(f"{SLOT}-*"):
        if str(other) != slot and other.is_dir():
            ended = take(str(other))
            if ended is not None:
                shutil.rmtree(other, ignore_errors=True)
                ended.release()
    return slot, lock


@dataclass(frozen=True)
class Slot(Destination):
    """The folder of one job: a pair of token files for each unit that is staged.

    Args:
        units: what is staged at a time: shards of JSON lines, or ``.tok`` objects.
        digests: of the rows of each unit, as the order was made from them.
        indexes: ``.idx`` of each unit, where units are ``.tok`` objects.
    """

    units: tuple[Shard, ...] = ()
    digests: tuple[str, ...] = ()
    indexes: tuple[str, ...] = ()

    def base(self, *shards: Shard) -> str:
        """Return the path, without suffix, of a unit's files."""
        return self.unit_base(self.units.index(shards[0]))

    def unit_base(self, unit: int) -> str:
        """Return the path, without suffix, of a unit's files."""
        return os.path.join(self.folder, f"{unit:06}")

    def staged(self, unit: int) -> TokenFile | None:
        """Return a unit's files if they are here, and of the rows that the order was made from."""
        file = read_index(self.unit_base(unit))
        return file if file is not None and digest_of(file.headers) == self.digests[unit] else None

    def write(self, group: list[tuple[Shard, str | None]], tick: Callable[[int], None]) -> None:
        """Stage a unit. Raises DataError."""
        (shard, copy), unit = group[0], self.units.index(group[0][0])
        if copy is None or not self.indexes:
            super().write(group, tick)
        else:
            try:
                settle(copy, self.unit_base(unit) + ".tok")
                shutil.copyfile(self.indexes[unit], self.unit_base(unit) + ".idx")
            except OSError as error:
                raise self.unwritable(error) from None
            tick(shard.size)
        if self.staged(unit) is None:
            self.remove(unit)
            raise DataError(
                f"{shard.path}: its rows are not those that the order was made from (_manifest.json beside the "
                "data, or the index of an earlier start); prepare the data again, or start a new run"
            )

    def remove(self, unit: int) -> None:
        """Remove a unit's files; who has them open reads on."""
        for suffix in reversed(SUFFIXES):
            Path(self.unit_base(unit) + suffix).unlink(missing_ok=True)

    def here(self) -> set[int]:
        """Return the units of which there is any file."""
        paths = [path for path in Path(self.folder).iterdir() if path.suffix in SUFFIXES]
        return {int(path.stem) for path in paths if path.stem.isdigit()}


def digest_of(headers: list[Header]) -> str:
    """Return the identity of the rows of a unit."""
    return " ".join(header.digest for header in headers)


class Stager:
    """Keeps this node's part of the wanted units in the slot; the next ones are staged in a thread.

    Args:
        slot: the folder.
        node: this one among those that share the slot.
        nodes: how many do.
        at_once: objects of S3 to fetch at a time.
        processes: to parse in.
        lock: holds the slot.
    """

    def __init__(
        self, slot: Slot, node: int = 0, nodes: int = 1, at_once: int = 1, processes: int = 1,
        lock: FolderLock | None = None,
    ) -> None:
        self.slot, self.node, self.nodes, self.lock = slot, node, nodes, lock
        self._at_once, self._processes = at_once, processes
        self._node_of: dict[int, int] = {}
        """The node that stages each wanted unit, in order of need."""
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._stopped = False

    def advance(self, needed: list[int], following: list[int]) -> Generator[None, None, None]:
        """Have units ``needed`` staged, and ``following`` soon; others are removed. Yields while it waits.

        Every stager of a slot is asked the same in the same order. Raises DataError when a unit cannot be staged.
        """
        before, wanted = self._node_of, list(dict.fromkeys([*needed, *following]))
        new = [unit for unit in wanted if unit not in before]
        node_of = before | {unit: number % self.nodes for number, unit in enumerate(new)}
        self._node_of = {unit: node_of[unit] for unit in wanted}  # at once: a thread that stages reads it
        try:
            old = {unit for unit, node in before.items() if node == self.node}
            if not before and self.node == 0:
                old = self.slot.here()  # what an earlier run left is of no node: the first removes it
            for unit in old - self._node_of.keys():
                self.slot.remove(unit)
        except OSError as error:
            raise DataError(f"{self.slot.folder}: old shards cannot be removed ({error.strerror})") from None
        self._stopped = False
        self._start()
        asked = reported = time.monotonic()
        while missing := self._missing(needed):
            assert self._thread is not None, "it was started"
            if not self._thread.is_alive():
                if self._error is not None:
                    raise self._error
                self._start()
            self._thread.join(WAIT_SECONDS)
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                path = self.slot.units[missing[0]].path
                logger.warning("%s: not in %s after %.0f s of waiting", path, self.slot.folder, reported - asked)
            yield

    def _missing(self, units: Iterable[int]) -> list[int]:
        """Return this node's units that are not staged yet."""
        mine = [unit for unit in units if self._node_of.get(unit) == self.node]
        return [unit for unit in mine if self.slot.staged(unit) is None]

    def _start(self) -> None:
        # A daemon: the end of the process does not wait for it.
        self._thread = threading.Thread(target=self._run, args=(self._thread,), name="smp-train-stage", daemon=True)
        self._thread.start()

    def _run(self, before: threading.Thread | None) -> None:
        """Stage this node's part of what is wanted, in order of need."""
        if before is not None:
            before.join()
        self._error = None
        try:
            missing = self._missing(list(self._node_of))
            # `advance` may have removed a unit since: it looks missing, and is not wanted any more.
            units = [unit for unit in missing if unit in self._node_of]
            for _ in conversion.convert(
                self.slot, [self.slot.units[unit] for unit in units], processes=self._processes, file_bytes=0,
                at_once=self._at_once, apart=not self.slot.indexes, stop=lambda: self._stopped,
            ):
                pass
            for unit in units:
                if unit not in self._node_of:  # `advance` has come to removing it before it was here
                    self.slot.remove(unit)
        except InterruptedError:
            return
        except Exception as error:
            # Where the process is ending, executors take no work any more: that is no failure to report.
            if threading.main_thread().is_alive():
                self._error = error
                logger.warning("%s; the run stops when it comes to these rows", error)

    def stop(self) -> None:
        """Give up what is being staged."""
        self._stopped = True
        # The collector may run this in a thread that stages.
        if self._thread is not None and threading.current_thread().name != self._thread.name:
            self._thread.join()
        self._thread = None
        self._node_of = {}
