"""Saving: when, where to, in which order, and what is kept."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from smp_train.checkpoints.attempt import Attempt, Elsewhere, Saved
from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.commit import PROBE, UNKNOWN, CheckpointFolder, open_folder
from smp_train.checkpoints.discovery import TORCHS, Checkpoint
from smp_train.checkpoints.manifest import FileRecord, RunId, folder_name, parse_folder_name
from smp_train.checkpoints.node_local import META_KEY, is_node_local, layout, local_part, storage_of
from smp_train.checkpoints.owner import ADVICE, Owner
from smp_train.checkpoints.retention import Policy, retain, set_later_aside, sweep
from smp_train.checkpoints.runs import committed
from smp_train.checkpoints.saver import HUGGING_FACE, LibrarySaver, Saver
from smp_train.checkpoints.state import present
from smp_train.distributed import ALL_RANKS
from smp_train.distributed.agree import alone, on_group, rank, unless
from smp_train.errors import CheckpointError, ConfigError
from smp_train.storage import is_s3, wait_for

if TYPE_CHECKING:
    from smp_train.checkpoints.async_save import Background, Stager

logger = logging.getLogger(__name__)

GROUP_TIMEOUT = timedelta(hours=2)
"""Ranks of a background save wait for the slowest disk among them."""
ABANDON_SECONDS = 10.0


class CheckpointManager:
    """Writes checkpoints by its policies. Every rank makes one, alike.

    With ``asynchronous`` a save returns at once: its state is copied to host memory until `staged` returns, which
    must be asked before anything changes it, and written in a thread. It is committed when `finish` has returned.
    One save is under way at a time. Where the host has no memory for a copy, saves are synchronous.

    ``run`` is whose checkpoints they are. Those of other runs in the folders are left alone.

    ``on_stage`` is called with the name of each stage of a save as this rank is about to enter it: ``write``,
    ``checksum``, and on rank 0 only ``commit``, ``publish``, ``retain``.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        *,
        model_type: str,
        run: RunId = UNKNOWN,
        asynchronous: bool = False,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:
        if parse_folder_name(folder_name(model_type, 0)) is None or "/" in model_type:
            raise ConfigError(f"model type {model_type!r} cannot be part of a folder's name")
        self.model_type = model_type
        self.run = run
        self.on_stage = on_stage
        self.asynchronous = asynchronous
        self._stager: Stager | None = None
        self._group: Any = None
        self._pending: Background | Elsewhere | None = None
        self._saved: list[Saved] = []
        self._started = time.monotonic()
        self._swept: set[str] = set()
        self._newest_commit: dict[str, float] = {}
        self._back_to: int | None = None
        self._rules: dict[str, list[Policy]] = {}
        self._storages: dict[str, CheckpointFolder] = {}
        self._owners: dict[str, Owner] = {}
        self._durable = [policy.folder for policy in policies if not is_node_local(policy.folder)]
        self._node_local: set[str] = set()
        for policy in policies:
            if is_node_local(policy.folder):
                storage = storage_of(policy.folder, run)
                self._node_local.add(storage.location)
            else:
                storage = open_folder(policy.folder, run)
            self._storages[storage.location] = storage
            self._rules.setdefault(storage.location, []).append(policy)

    def due(self, step: int) -> bool:
        """Return whether any policy wants a checkpoint after ``step``."""
        return any(rule.due(step) for rules in self._rules.values() for rule in rules)

    def check_writable(self) -> None:
        """Create each folder and prove that this rank can write there (`CheckpointError`). Not collective."""
        for storage in self._storages.values():
            storage.check_writable()

    def check_shared(self) -> None:
        """Prove that every rank sees what rank 0 writes; else `CheckpointError` on every rank. Collective."""
        for place, storage in self._storages.items():
            if place in self._node_local:
                continue
            what = f"cannot use checkpoint folder {storage.location}"
            probe = on_main(what, partial(_put_probe, storage))
            try:
                gather(what, partial(_see_probe, storage, probe))
            finally:
                if rank() == 0:
                    with contextlib.suppress(OSError, CheckpointError):
                        storage.delete(probe)

    def lock(self, *, force: bool = False, advice: str = ADVICE) -> None:
        """Keep other jobs of the run from writing to the folders until `close`; collective.

        Raises `CheckpointError` on every rank where another job holds one, with ``advice``, unless ``force`` takes it
        away; that job then commits nothing any more.
        """

        def acquire() -> None:
            for place, storage in self._storages.items():
                if rank() == 0 or place in self._node_local:
                    owner = Owner(storage, advice)
                    owner.acquire(force=force)
                    self._owners[place] = owner
                    storage.rescue()

        gather("cannot start", acquire)

    def go_back(self, to: Checkpoint) -> None:
        """Let the run's checkpoints of later steps no longer count from the first save on, if ``to`` is the run's own.

        Otherwise the next start would go on from what this one has left. They are renamed to ``*.abandoned``.
        """
        if to.committed.run == self.run:
            self._back_to = to.step

    def save(
        self,
        step: int,
        state: dict[str, Any],
        meta: dict[str, Any],
        *,
        force: bool = False,
        saver: Saver = TORCHS,
    ) -> list[str]:
        """Write and commit ``state`` into each folder that is due, or into all with ``force``. Collective.

        ``meta`` must be plain JSON; rank 0's is the one stored. ``saver`` writes the tree. Returns the paths of the
        checkpoints, complete and durable; when asynchronous none, see `finish`, which is called first. Raises
        `CheckpointError` on every rank when any rank failed; no trace of that attempt then counts, and what was
        committed before is untouched.
        """
        self._end_pending()
        due = [place for place, rules in self._rules.items() if force or any(rule.due(step) for rule in rules)]
        if not due:
            return []
        began = time.monotonic()
        state = present(state)
        # A snapshot; and what cannot be stored is to fail before the large files are written.
        text = on_main("cannot save", lambda: json.dumps(meta))

        meta = {**json.loads(text), "step": step, **({"run": self.run.to_json()} if self.run.id else {})}
        if saver.names != HUGGING_FACE:
            meta["names"] = saver.names
        in_folders = not any(map(is_s3, due))
        if self.asynchronous and in_folders and isinstance(saver, LibrarySaver) and saver.library.asynchronous:
            for place in due:
                self._end_pending()
                self._pending = self._begin_with(saver, place, state, meta, began)
            return []

        def write(state: dict[str, Any]) -> list[Saved]:
            return [self._save_to(place, state, meta, began, saver) for place in due]

        in_background = self.asynchronous and not isinstance(saver, LibrarySaver)
        if in_background and self._has_room(state) and self._begin(state, write):
            return []
        saved = write(state)
        self._saved += saved
        return [each.path for each in saved]

    def staged(self) -> None:
        """Wait until the state of the save under way is copied: to be asked before each update of it."""
        if self._pending is not None:
            self._pending.staged()

    def busy(self) -> bool:
        """Return whether a save of this rank's is still being written; peers may be further or less far."""
        return self._pending is not None and self._pending.running()

    def poll(self) -> bool:
        """Return whether a save that another library writes has ended, so that `finish` will not wait; collective."""
        return isinstance(self._pending, Elsewhere) and self._pending.ended_everywhere()

    def finish(self) -> list[Saved]:
        """Wait for the save under way, and return what was committed since this was last asked. Collective.

        Raises what the save raised, on every rank.
        """
        self._end_pending()
        saved, self._saved = self._saved, []
        return saved

    def close(self) -> None:
        """Let the folders go; a save that is under way, as the run failed, is given a few seconds. Not collective."""
        if self._pending is not None:
            self._pending.abandon(ABANDON_SECONDS)
        for owner in self._owners.values():
            owner.release()

    def _end_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._saved += pending.result()

    def _has_room(self, state: dict[str, Any]) -> bool:
        """Return whether every host can hold a copy of what its ranks hold. Collective, the first time."""
        from smp_train.checkpoints.async_save import MEMORY_SHARE, Stager, local_bytes
        from smp_train.checkpoints.host_memory import free_host_bytes

        if self._stager is not None:
            return True
        name = socket.gethostname()
        told = gather("cannot save", lambda: (name, local_bytes(state), free_host_bytes()))
        for host in sorted({host for host, _, _ in told}):
            needed = sum(need for where, need, _ in told if where == host)
            free = min((free for where, _, free in told if where == host and free is not None), default=None)
            if free is not None and needed > MEMORY_SHARE * free:
                logger.warning(
                    "%s has %.1f GiB of memory free, a copy of the state takes %.1f: saves are synchronous",
                    host, free / 2**30, needed / 2**30, extra=ALL_RANKS,
                )  # fmt: skip
                self.asynchronous = False
                return False
        self._stager = Stager()
        return True

    def _begin(self, state: dict[str, Any], write: Callable[[dict[str, Any]], list[Saved]]) -> bool:
        """Copy the state and begin to write it; return False, on all ranks, where any has no memory for it."""
        import torch.distributed as dist

        from smp_train.checkpoints.async_save import Background

        assert self._stager is not None
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
        begun: list[tuple[dict[str, Any], Callable[[], None]]] = []
        try:
            gather("cannot copy the state to host memory", lambda: begun.append(self._begun(state)))
        except CheckpointError as failure:
            logger.warning("%s: saves are synchronous", failure, extra=ALL_RANKS)
            self.asynchronous, self._stager = False, None
            return False
        copy, complete = begun[0]

        def in_background(failure: Exception | None) -> list[Saved]:
            with on_group(self._group):
                gather("cannot copy the state to host memory", lambda: unless(failure, None))
                return write(copy)

        self._pending = Background(complete, in_background)
        return True

    def _begun(self, state: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        assert self._stager is not None
        return self._stager.begin(state)

    def _save_to(
        self, place: str, state: dict[str, Any], meta: dict[str, Any], began: float, saver: Saver
    ) -> Saved:
        """Write and commit into one place, then delete what that replaces; collective."""
        if place not in self._node_local:
            durable = self._save_alike(place, state, meta, began, saver)
            self._retain(place, durable.step)
            return durable
        mine = {**meta, META_KEY: layout(self._durable, meta.get("mesh"))}

        def save_mine() -> Saved:
            with alone():
                return self._save_alike(place, local_part(state), mine, began, saver)

        # Every rank has committed its part before any deletes an older one: there is always a step that all have.
        saved = gather("cannot save", save_mine)[rank()]
        with alone():
            self._retain(place, saved.step)
        return saved

    def _save_alike(
        self, place: str, state: dict[str, Any], meta: dict[str, Any], began: float, saver: Saver
    ) -> Saved:
        attempt = self._attempt(place, meta)
        storage, staged = attempt.storage, attempt.staged
        with attempt.cleared_on_failure():
            if isinstance(saver, LibrarySaver) and saver.part:
                gather(attempt.what, lambda: saver.prepare(storage, staged))
            records: dict[str, FileRecord] = {}
            failure: Exception | None = None
            try:
                records = saver.write(state, storage, staged, self.on_stage)
            except CheckpointError as error:
                if not isinstance(saver, LibrarySaver):  # every rank wrote, and every rank has this
                    raise CheckpointError(f"{attempt.what}: {error}") from error
                failure = error
            except Exception as error:  # this rank's alone: the others learn of it as they commit
                failure = error
            return self._commit(attempt, lambda: unless(failure, records), meta, began)

    def _begin_with(
        self, saver: LibrarySaver, place: str, state: dict[str, Any], meta: dict[str, Any], began: float
    ) -> Elsewhere:
        """Let the library that brought ``saver`` copy the state and write it; collective."""
        attempt = self._attempt(place, meta)
        storage, staged = attempt.storage, attempt.staged

        def end(failure: Exception | None) -> list[Saved]:
            with attempt.cleared_on_failure():
                listed = gather(attempt.what, lambda: unless(failure, saver.listed(storage, staged)))
                files = dict(each for each in listed if each is not None).get(saver.part, {})
                saved = self._commit(attempt, lambda: saver.written(storage, staged, files), meta, began)
            self._retain(place, saved.step)
            return [saved]

        with attempt.cleared_on_failure():
            gather(attempt.what, lambda: saver.prepare(storage, staged))
            failure: Exception | None = None
            try:
                saver.begin(state, storage, staged)
            except Exception as error:
                failure = error
            gather(attempt.what, lambda: unless(failure, None))
        return Elsewhere(saver, end)

    def _attempt(self, place: str, meta: dict[str, Any]) -> Attempt:
        storage, name = self._storages[place], folder_name(self.model_type, meta["step"])
        what = f"cannot save {os.path.join(storage.location, name)}"
        staged = on_main(what, lambda: self._stage(storage, name))
        return Attempt(what, storage, staged, self._newest_commit.get(storage.location, 0.0))

    def _commit(
        self, attempt: Attempt, records: Callable[[], dict[str, FileRecord]], meta: dict[str, Any], began: float
    ) -> Saved:
        """Make what the ranks have written a checkpoint; collective."""
        place = attempt.storage.location
        path = attempt.commit(
            records, meta, model_type=self.model_type, owner=self._owners.get(place), on_stage=self.on_stage
        )
        return Saved(meta["step"], path, time.monotonic() - began, place not in self._node_local)

    def _retain(self, place: str, step: int) -> None:
        retain(self._storages[place], self._rules[place], step, self.on_stage)

    def _stage(self, storage: CheckpointFolder, name: str) -> str:
        if storage.location not in self._swept:
            owner = self._owners.get(storage.location)
            if owner is not None:
                owner.check()  # what is unfinished, or of later steps, may be the job's that has taken over
            self._swept.add(storage.location)
            # Under the lock all that is unfinished is a dead job's; without it, what is older than this one.
            sweep(storage, -math.inf if storage.location in self._owners else time.monotonic() - self._started)
            if self._back_to is not None:
                set_later_aside(storage, self._back_to)
            self._newest_commit[storage.location] = max((entry.time for entry in committed(storage)), default=0.0)
        return storage.stage(name)


def _put_probe(storage: CheckpointFolder) -> str:
    probe = storage.stage(PROBE)
    storage.put(probe, "probe", b"smp-train\n")
    return probe


def _see_probe(storage: CheckpointFolder, probe: str) -> None:
    if not wait_for(lambda: storage.has(probe, "probe")):
        raise CheckpointError(
            f"{storage.location} is not the folder that rank 0 sees; "
            "give a --checkpoint_dir that all nodes share"
        )
