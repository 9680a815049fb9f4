"""The folder of `--shuffle window:K`: the index of every shard, and the ids of those alone that are read now.

Who stages what is agreed without a word: every rank is told the same wishes in the same order (`Stager.want`), deals
them out alike, and does its own part in a thread; the others wait for the file. A shard is removed when the trainer
asks for a step behind the last row of it: by then each rank has read all steps before, as it has voted on them. Rank 0
removes all, and each rank what it has staged: it may have put it there after rank 0 looked.

The indexes are common to all jobs; the ids are in a slot of this job's own (`locked.claim`), for one job knows nothing
of what another still reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from smp_train.data import conversion, token_cache
from smp_train.data.index import Caches, share
from smp_train.data.locked import Held, Scratch
from smp_train.data.token_cache import Header, settle
from smp_train.data.utils import Shard
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

POLL_SECONDS = 0.05
"""Between looks for a shard that a peer stages."""
CHECK_SECONDS = 5.0
"""Between looks whether something else has removed what was staged."""
SAY_SECONDS = 60.0
"""Between lines about a shard that is waited for."""


class Stage(Caches):
    """Caches of which the index stays, and the ids come and go.

    Args:
        location, vocab_size, cache_dir, skip_bad: as of `Caches`, below whose folder this one is.
        counting: keep no ids at all.
    """

    parses = True

    def __init__(
        self, location: str, vocab_size: int, cache_dir: str | None, skip_bad: bool = False, *, counting: bool = False
    ) -> None:
        super().__init__(location, vocab_size, cache_dir, skip_bad)
        self.counting = counting
        self.whole = Caches(location, vocab_size, cache_dir, skip_bad)
        """What an unbounded run may have left: read as it is, and never removed."""
        where = dict(self.whole.places)[self.whole.folder]
        name = hashlib.blake2b(where.encode(), digest_size=8).hexdigest()
        self.places = [(os.path.join(self.whole.folder, f"window-{name}"), where)]
        self.headers: dict[str, Header] = {}
        """What is known of each shard, by its name, once all are counted."""
        self.work = ""
        """Where files are made: the path of a `Scratch` in the slot, given by the process that makes them."""
        self.slot = ""
        """This job's folder of ids, once it has one."""

    @property
    def words(self) -> str:
        """The folder in which word is left of shards that cannot be converted: for the ranks of this job."""
        return self.slot

    def tok(self, shard: Shard) -> str:
        """Return where the ids of a shard are, when they are here."""
        return os.path.join(self.slot, os.path.basename(self.base(shard)) + ".tok")

    @property
    def copies(self) -> str:
        """The folder that objects of S3 are fetched into."""
        return self.work

    def counted(self, shard: Shard) -> tuple[str, Header] | None:
        """Return (base name, header) of a shard whose rows are known, whether its ids are here or not."""
        base = self.base(shard)
        opened = token_cache.read_header(base, index_alone=True)
        if opened is not None and (opened[0].source, opened[0].size) == (shard.name, shard.size):
            return base, opened[0]
        return self.whole.find(shard)

    def find(self, shard: Shard) -> tuple[str, Header] | None:
        """Return (base name, header) of a shard that is here with its ids; when counting, that is counted."""
        if self.counting:
            return self.counted(shard)
        base, header = self.base(shard), self.headers[shard.name]
        with contextlib.suppress(OSError):
            if os.path.exists(base + ".idx") and os.path.getsize(self.tok(shard)) == header.tok_bytes:
                return base, header
        return None

    def _convert(self, shard: Shard, base: str, tick: Callable[[int], None], read_from: str | None) -> None:
        made = os.path.join(self.work, os.path.basename(base))
        try:
            super()._convert(shard, made, tick, read_from)
            opened = token_cache.read_header(made)
            if opened is None:
                raise DataError(f"{made}: vanished as it was made; is something clearing the --data_cache_dir?")
            known = self.headers.get(shard.name)
            if known is not None and opened[0].digest != known.digest:
                raise other_rows(shard)
            if not self.counting:
                os.replace(made + ".tok", self.tok(shard))
            os.replace(made + ".idx", base + ".idx")
        finally:
            for suffix in (".tok", ".idx"):
                with contextlib.suppress(OSError):
                    os.unlink(made + suffix)

    def keep_only(self, shards: Sequence[Shard]) -> None:
        """Remove the ids of all shards but these."""
        kept = {os.path.basename(self.tok(shard)) for shard in shards}
        with os.scandir(self.slot) as entries:
            for entry in entries:
                if entry.name.endswith(".tok") and entry.name not in kept:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)

    def remove(self, shard: Shard) -> None:
        """Remove the ids of a shard; who has them open reads on."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.tok(shard))


class PreparedStage(Stage):
    """A stage of ``.tok`` objects that only have to be fetched; their indexes were put here before."""

    parses = False

    def find_index(self, shard: Shard) -> Header | None:
        """Return the header of an object whose index is here."""
        opened = token_cache.read_header(self.base(shard), index_alone=True)
        return None if opened is None else opened[0]

    def _convert(self, shard: Shard, base: str, tick: Callable[[int], None], read_from: str | None) -> None:
        assert read_from is not None, "prepared tokens are staged from S3 alone"
        settle(read_from, self.tok(shard))
        tick(shard.size)


def other_rows(shard: Shard) -> DataError:
    """Return the error about a shard that is not what the order was made of."""
    return DataError(
        f"{shard.path}: its rows are not those that the order was made from (_manifest.json beside the "
        "data, or the index of an earlier start); prepare the data again, or start a new run"
    )


class Stager:
    """Has the shards that are wanted at hand, sharing the work with the other ranks of a folder.

    Args:
        stage: the folder.
        files: the shards, in their order.
        here: numbers of those that need no staging.
        rank: this one among those that share the folder.
        world: how many do.
        at_once: objects of S3 that this rank fetches at a time.
        slot: the stage's slot, held for as long as this object is there.
    """

    def __init__(
        self, stage: Stage, files: list[Shard], here: set[int], *, rank: int, world: int, at_once: int, slot: Held
    ) -> None:
        self.stage, self.files, self.here, self.slot = stage, files, here, slot
        self.rank, self.world, self.at_once = rank, world, at_once
        self._changed = threading.Condition()
        self._owner: dict[int, int] = {}
        """Who stages each of the shards that are wanted, in the order in which they are."""
        self._seen: set[int] = set()
        self._missed: dict[int, float | None] = {}
        """Of this rank's part, what was here at some time, and since when it is not."""
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._scratch: Scratch | None = None

    def prepare(self) -> None:
        """Make the folder that shards are made in. Raises OSError.

        To be called where a failure stops all ranks: once peers wait for this rank's part, a full disk may leave no
        room for word of it.
        """
        self._scratch = Scratch(self.stage.slot)

    def want(self, needed: list[int], following: list[int]) -> list[int]:
        """Take it that ``needed`` are read next, and ``following`` after those; return what is not wanted any more.

        Every rank must be told the same wishes in the same order, and only when every rank has read all rows of what
        is not wanted any more. Raises DataError, also when a shard that was wanted before could not be had.
        """
        wanted = dict.fromkeys(number for number in (*needed, *following) if number not in self.here)
        if self._thread is not None and wanted.keys() == self._owner.keys():
            return []
        gone = [number for number in self._owner if number not in wanted]
        # Ours too, where we have staged it again, or at last, behind rank 0's back.
        removed = [number for number in gone if self.rank in (0, self._owner[number])]
        with self._changed:
            for number in gone:
                del self._owner[number]
                self._seen.discard(number)
                self._missed.pop(number, None)
            for group in (needed, following):
                self._deal([number for number in group if number in wanted and number not in self._owner])
            self._owner = {number: self._owner[number] for number in wanted}
        try:
            if self.rank == 0 and self._thread is None:
                self.stage.keep_only([self.files[number] for number in wanted])
            for number in removed:
                self.stage.remove(self.files[number])
        except OSError as error:
            raise DataError(f"{self.stage.slot}: old shards cannot be removed ({error.strerror})") from None
        with self._changed:
            if self._thread is None:
                self._stopped, self._error = False, None
                self._thread = threading.Thread(target=self._run, name="smp-train-stage", daemon=True)
                self._thread.start()
            elif self._error is not None:
                # With it the thread has ended: what is wanted now, nobody here would stage.
                raise self._error
            self._changed.notify_all()
        return gone

    def _deal(self, numbers: list[int]) -> None:
        by_file = {self.files[number]: number for number in numbers}
        for rank in range(self.world):
            for shard in share(list(by_file), rank, self.world):
                self._owner[by_file[shard]] = rank

    def wait(self, number: int) -> None:
        """Return when a shard is at hand. Raises DataError when it cannot be had, on any rank."""
        if number in self._seen or number in self.here:
            return
        asked = time.monotonic()
        look, say = asked + conversion.LOOK_SECONDS, asked + SAY_SECONDS
        with self._changed:
            while self.stage.find(self.files[number]) is None:
                if self._error is not None:
                    raise self._error
                if self._stopped or self._thread is None:
                    raise DataError(
                        f"{self.files[number].path}: is not staged, as no training is going on; rows under --shuffle "
                        "window:K are read in their order alone"
                    )
                self._changed.wait(POLL_SECONDS)
                now = time.monotonic()
                if now >= look:
                    look = now + conversion.LOOK_SECONDS
                    self._raise_failure(number)
                if now >= say:
                    say = now + SAY_SECONDS
                    self._say_waiting(number, now - asked)
            self._seen.add(number)

    def _raise_failure(self, number: int) -> None:
        try:
            self.stage.raise_failure([self.files[number]], 0.0)
        except OSError as error:
            raise DataError(
                f"{self.stage.slot}: cannot be read ({error.strerror}); is something clearing the --data_cache_dir?"
            ) from None

    def _say_waiting(self, number: int, seconds: float) -> None:
        owner = self._owner.get(number)
        # Read-ahead may be further than what is wanted; then it waits for the trainer.
        who = "not wanted yet" if owner is None else f"staged by rank {owner} of the {self.world} that share it"
        logger.warning(
            "%s: not in %s after %.0f s of waiting; %s", self.files[number].path, self.stage.slot, seconds, who
        )

    def look_again(self, number: int) -> None:
        """Take it that a shard is not at hand any more; `wait` then waits until it is again."""
        with self._changed:
            self._seen.discard(number)

    def stop(self) -> None:
        """Give up what is being staged, and wait for nothing any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
            if self._scratch is not None:
                self._scratch.remove()
                self._scratch = None
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _todo(self) -> list[int]:
        """Return what of this rank's part is missing.

        What was here before must be missing for a while: rank 0 removes a shard a moment before this rank is told that
        it is not wanted any more.
        """
        found = []
        for number, owner in self._owner.items():
            if owner != self.rank:
                continue
            if self.stage.find(self.files[number]) is not None:
                self._missed[number] = None
            elif number not in self._missed:
                found.append(number)
            else:
                since = self._missed[number] = self._missed[number] or time.monotonic()
                if time.monotonic() - since >= CHECK_SECONDS:
                    found.append(number)
        return found

    def _run(self) -> None:
        with self._changed:
            scratch, self._scratch = self._scratch, None
        try:
            scratch = scratch or Scratch(self.stage.slot)
            self.stage.work = scratch.path
            while True:
                with self._changed:
                    if self._stopped:
                        return
                    todo = self._todo()
                    peers = [self.files[number] for number in self._owner]
                    if not todo:
                        self._changed.wait(CHECK_SECONDS)
                        scratch.touch()
                        self.slot.touch()
                        continue
                conversion.run(
                    self.stage, [self.files[number] for number in todo], peers=peers, at_once=self.at_once,
                    apart=self.stage.parses, stop=lambda: self._stopped,
                )  # fmt: skip
                with self._changed:
                    self._changed.notify_all()
                    for number in todo:
                        if number in self._owner:
                            # It was here, though rank 0 may have removed it by now.
                            self._missed.setdefault(number, None)
                        else:
                            # Nobody looks for it any more, and rank 0 has.
                            self.stage.remove(self.files[number])
        except InterruptedError:
            return
        except Exception as error:
            # Where the process is ending, executors take no work any more: that is no failure to report.
            if threading.main_thread().is_alive():
                self._fail(error, scratch)
        finally:
            if scratch is not None:
                scratch.remove()

    def _fail(self, error: Exception, scratch: Scratch | None) -> None:
        """Let every rank know that this rank's part, as far as it is not here, cannot be had."""
        if isinstance(error, OSError):
            error = DataError(f"{self.stage.slot}: shards cannot be staged here ({error.strerror or error})")
        if scratch is not None:
            # First of all: the disk may be full, and word could not be left.
            scratch.remove()
        with self._changed:
            for number, owner in self._owner.items():
                if owner == self.rank and self.stage.find(self.files[number]) is None:
                    self.stage.leave_word(self.files[number], error)
            self._error = error
            self._changed.notify_all()
        logger.warning("%s; the run stops when it comes to these rows", error)


def needs_bytes(headers: list[Header], shards: int) -> int:
    """Return how many bytes the ids of so many shards take at most."""
    return sum(sorted((header.tok_bytes for header in headers), reverse=True)[:shards])


def free_bytes(folder: str) -> int:
    """Return how much room a folder has, what is in it already counted as room."""
    there = 0
    for path in Path(folder).glob("*.tok"):
        # One that was there a moment ago may be gone.
        with contextlib.suppress(OSError):
            there += path.stat().st_size
    return shutil.disk_usage(folder).free + there
