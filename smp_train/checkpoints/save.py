"""Save checkpoints: choose the folders that are due, write an attempt in each, commit it, delete old checkpoints."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from smp_train.checkpoints.background import Background, BackgroundWriter
from smp_train.checkpoints.checkpoint import TORCHS
from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.folder import RunFolder, folder_of_run
from smp_train.checkpoints.format import META, NODE_LOCAL, TOKENIZER, Marker, folder_name, parse_folder_name
from smp_train.checkpoints.node_local import copy_part, facts_of_part, is_node_local, local_part
from smp_train.checkpoints.owner import Ownership
from smp_train.checkpoints.saver import HUGGING_FACE, Saver
from smp_train.distributed import heartbeat
from smp_train.distributed.agree import ALL_RANKS, alone, rank, replays, unless, with_rank
from smp_train.distributed.job import Job
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.hub_state import present
from smp_train.storage import wait_for
from smp_train.storage.checksum import FileRecord
from smp_train.storage.probe import check_probe, check_writable, put_probe

logger = logging.getLogger(__name__)

ABANDON_SECONDS = 10.0


@dataclass(frozen=True)
class Policy:
    """Save below the folder ``parent`` every ``every`` steps and keep the newest ``keep`` checkpoints (0: all)."""

    parent: str
    every: int
    keep: int

    def due(self, step: int) -> bool:
        """Return whether to save after ``step``. If ``every`` is 0 or less, only forced saves are made."""
        return step > 0 and self.every > 0 and step % self.every == 0


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint, and the seconds from request to commit. A node-local one is not ``durable``."""

    step: int
    path: str
    seconds: float
    durable: bool = True


@dataclass
class Target:
    """A folder that a run saves to."""

    policy: Policy
    folder: RunFolder
    swept: bool = False
    """Whether unfinished attempts of earlier starts have been deleted."""

    @property
    def node_local(self) -> bool:
        """Whether each rank saves its part to its node's own disk."""
        return is_node_local(self.policy.parent)


@dataclass(frozen=True)
class Request:
    """A save that was requested at ``time``, on the monotonic clock."""

    step: int
    state: dict[str, Any]
    meta: dict[str, Any]
    saver: Saver
    best: int | None
    time: float


class CheckpointManager:
    """Writes a run's checkpoints by its policies. Every rank makes a manager with the same arguments.

    With ``asynchronous`` a save returns at once. A thread copies the state to host memory and writes the copy. Call
    `staged`, which waits for the copy, before anything changes the state. The save is committed when `finish` has
    returned. Only one save is under way at a time. Where the host lacks memory for a copy, saves are synchronous.

    Each node-local part is copied to the rank ``buddy`` higher, which is on another node; not if ``buddy`` is 0.
    With ``keeps_scheduled`` each policy keeps its newest checkpoint of a step that is due, for a rollback.
    ``owner`` is rank 0's ownership of the run's folders. It is None on other ranks, and where no other job can write.
    ``on_stage`` is called with the name of each stage of a save that this rank enters: ``write``, ``checksum``, and on
    rank 0 ``commit``, ``publish``, ``retain``.
    """

    def __init__(
        self, policies: Sequence[Policy], *, run_name: str, model_type: str, owner: Ownership | None = None,
        generation: int = 1, asynchronous: bool = False, buddy: int = 0, keeps_scheduled: bool = False,
        on_stage: Callable[[str], None] = lambda stage: None,
    ) -> None:  # fmt: skip
        if parse_folder_name(folder_name(model_type, 0)) is None or "/" in model_type:
            raise ConfigError(f"model type {model_type!r} cannot be part of a folder's name")
        self.model_type, self.owner, self.generation = model_type, owner, generation
        self.asynchronous, self.buddy, self.on_stage = asynchronous, buddy, on_stage
        self._keeps_scheduled = keeps_scheduled
        self.tokenizer: dict[str, bytes] = {}
        """The tokenizer's files by name. Those that rank 0 has are stored in every durable checkpoint."""
        self._writer = BackgroundWriter()
        self._copying: Any = None
        """The process group for copies to other nodes; None before the first one, and once a transfer has stalled."""
        self._pending: Background | None = None
        """The save under way."""
        self._saved: list[Saved] = []
        self._sent: set[str] = set()
        """Attempts whose COMMITTED may have been written. They are not deleted, even if a rank fails later."""
        self._targets = [Target(policy, folder_of_run(policy.parent, run_name)) for policy in policies]

    # --- before the first save

    def check_folders(self) -> None:
        """Prove that every rank can write to each folder and sees what rank 0 writes there. Collective.

        Raises `CheckpointError` on every rank.
        """
        for target in self._targets:
            folder = target.folder  # a node-local one has another path on each rank
            action = f"cannot use checkpoint folder {target.policy.parent if target.node_local else folder.location}"
            gather(action, partial(check_writable, folder.storage, "checkpoint_dir"))
            if not target.node_local:
                probe = on_main(action, partial(put_probe, folder.storage))
                try:
                    gather(action, (lambda: None) if replays() else partial(check_probe, folder.storage, probe))
                finally:
                    if rank() == 0:
                        with contextlib.suppress(OSError, CheckpointError):
                            folder.storage.delete(probe)

    def next_generation(self) -> None:
        """Begin another generation, after the run went back to an older checkpoint. Collective."""
        claim = (lambda: self.generation + 1) if self.owner is None else self.owner.advance
        self.generation = on_main("cannot go back", claim)

    def due(self, step: int) -> bool:
        """Return whether any policy wants a checkpoint after ``step``."""
        return any(target.policy.due(step) for target in self._targets)

    def next_due(self, step: int) -> int | None:
        """Return the first step after ``step`` at which a policy wants a checkpoint, None if no policy ever does."""
        every = [target.policy.every for target in self._targets if target.policy.every > 0]
        return min((step - step % steps + steps for steps in every), default=None)

    def scheduled_before(self, step: int) -> str | None:
        """Return the path of the newest durable checkpoint of a scheduled step before ``step``; collective."""

        def newest() -> str | None:
            scheduled = [
                (each.generation, each.step, f"{target.folder.location}/{each.name}")
                for target in self._targets if not target.node_local
                for each in target.folder.committed() if each.step < step and target.policy.due(each.step)
                if not target.folder.is_marked_damaged(each.name)
            ]  # fmt: skip
            return max(scheduled)[-1] if scheduled else None

        return on_main("cannot go back", newest)

    @property
    def folders(self) -> list[RunFolder]:
        """The run's durable folders."""
        return [target.folder for target in self._targets if not target.node_local]

    def own(self, job: Job) -> int:
        """Claim the run's folders for ``job`` if this manager does not own them, and return the generation."""
        if self.owner is None:
            self.owner = Ownership(self.folders, job)
            self.owner.acquire(above=self.generation)
        self.generation = self.owner.generation
        return self.generation

    # --- a save

    def save(
        self, step: int, state: dict[str, Any], meta: dict[str, Any], *, force: bool = False, saver: Saver = TORCHS,
        best: int | None = None,
    ) -> list[str]:  # fmt: skip
        """Write and commit ``state`` into each folder that is due, or into all with ``force``. Collective.

        ``meta`` must be plain JSON; rank 0's ``meta`` is stored. ``saver`` writes the tree. No policy deletes the
        checkpoint of step ``best``. Returns the paths of the committed checkpoints, or an empty list if the save is
        asynchronous (see `finish`). Raises `CheckpointError` on every rank when any rank failed; the attempt then does
        not count, and earlier checkpoints are untouched.
        """
        self._end_pending()
        due = [target for target in self._targets if force or target.policy.due(step)]
        if not due:
            return []
        began = time.monotonic()
        # Copy the metadata now. Metadata that cannot be stored must fail before the large files are written.
        meta = {**json.loads(on_main("cannot save", lambda: json.dumps(meta))), "step": step}
        if saver.names != HUGGING_FACE:
            meta["names"] = saver.names
        request = Request(step, present(state), meta, saver, best, began)
        if self.buddy and self._copying is None and any(target.node_local for target in due):
            self._copying = dist.new_group(backend="gloo")

        def write(state: dict[str, Any]) -> list[Saved]:
            return [self._save_to(target, replace(request, state=state)) for target in due]

        if self.asynchronous:
            self._pending = self._writer.begin(request.state, write)
            if self._pending is not None:
                return []
            self.asynchronous = False
        saved = write(request.state)
        self._saved += saved
        return [checkpoint.path for checkpoint in saved]

    def _save_to(self, target: Target, request: Request) -> Saved:
        """Write and commit into one folder, then apply the policy's retention; collective."""
        if not target.node_local:
            saved = self._write(target, request)
            self._retain(target.policy, target.folder, os.path.basename(saved.path), request.best)
            return saved
        parents = [durable.policy.parent for durable in self._targets if not durable.node_local]
        meta = {**request.meta, NODE_LOCAL: facts_of_part(parents, request.meta.get("mesh"))}

        def save_part() -> Saved:
            with alone():
                return self._write(target, replace(request, state=local_part(request.state), meta=meta))

        # Every rank commits its part before any rank deletes an older one, so all ranks always have a step in common.
        saved = gather("cannot save", save_part)[rank()]
        committed = [(target.folder, os.path.basename(saved.path))]
        try:
            committed += [copy_part(*committed[0], self.buddy, self._copying)] if self.buddy else []
        except CheckpointError as failure:
            stalled, self._copying = self._copying, None
            with contextlib.suppress(Exception):
                if stalled is not None:
                    dist.destroy_process_group(stalled)
            logger.warning("Step %d is saved without copies on other nodes: %s", saved.step, failure, extra=ALL_RANKS)
        with alone():
            for folder, name in committed:
                self._retain(target.policy, folder, name, request.best)
        return saved

    def _write(self, target: Target, request: Request) -> Saved:
        """Write the tree into a new attempt and commit it; collective."""
        attempt = self._begin(target, request)
        with self._deleted_on_failure(target, attempt):
            records: dict[str, FileRecord] = {}
            failure: Exception | None = None
            try:
                records = request.saver.write(request.state, target.folder, attempt, self.on_stage)
            except Exception as error:
                failure = error  # `_commit` raises the failure on all ranks
            return self._commit(target, attempt, request, lambda: unless(failure, records))

    def _begin(self, target: Target, request: Request) -> str:
        """Sweep earlier starts' attempts, once per target, then reserve a folder; return its name. Collective."""

        def reserve() -> str:
            self._check_owner()  # before sweeping: a job that has taken over may own the unfinished attempts
            if not target.swept:
                try:
                    for line in target.folder.sweep(self.generation):
                        logger.info("checkpoint folder %s: %s", target.folder.location, line)
                except (OSError, CheckpointError) as error:
                    logger.warning("checkpoint folder %s cannot be tidied: %s", target.folder.location, error)
                target.swept = True
            name = target.folder.begin(self.model_type, request.step, self.generation)
            self._check_owner()
            return name

        return on_main(f"cannot save {target.folder.location}/{folder_name(self.model_type, request.step)}", reserve)

    def _check_owner(self) -> None:
        if self.owner is not None:
            self.owner.check()

    def _commit(
        self, target: Target, attempt: str, request: Request, records: Callable[[], dict[str, FileRecord]]
    ) -> Saved:
        """Turn the files of all ranks into a checkpoint; collective.

        ``records`` returns this rank's file records, or raises this rank's failure, and then nothing is committed.
        """
        folder, path = target.folder, f"{target.folder.location}/{attempt}"
        shares = gather(f"cannot save {path}", lambda: (with_rank(""), records()))

        def commit() -> None:
            self._check_owner()  # a job that has taken over may have deleted the attempt's files
            files = _all_files(folder, attempt, shares)
            for file, content in self.tokenizer.items() if not target.node_local else ():
                files[TOKENIZER + file] = folder.put(attempt, TOKENIZER + file, content)
            files[META] = folder.put(attempt, META, json.dumps(request.meta, indent=1).encode())
            self.on_stage("commit")
            self._check_owner()
            self.on_stage("publish")
            self._sent.add(attempt)  # before the commit: a commit that fails may still have written COMMITTED
            folder.commit(attempt, Marker(request.step, self.model_type, self.generation, files, time.time()))
            if swept := folder.is_swept(attempt):
                folder.withdraw(attempt)
            self._check_owner()  # if another job owns the run, this commit stays: it is harmless and never the newest
            if swept:
                raise CheckpointError("another job of this run has deleted this attempt; the step is not committed")

        on_main(f"cannot save {path}", commit)
        self._sent.discard(attempt)
        return Saved(request.step, path, time.monotonic() - request.time, not target.node_local)

    @contextlib.contextmanager
    def _deleted_on_failure(self, target: Target, attempt: str) -> Iterator[None]:
        """Delete the attempt when the body raises, unless it may have been committed."""
        try:
            yield
        except BaseException:
            if rank() == 0 and attempt not in self._sent:
                with contextlib.suppress(OSError, CheckpointError):
                    target.folder.delete(attempt)
            raise

    def _retain(self, policy: Policy, folder: RunFolder, newest: str, best: int | None) -> None:
        """Delete, on rank 0, the run's checkpoints that the policy does not keep, after ``newest`` is committed.

        Checkpoints of later generations stay: a job that took over wrote them. Damaged ones stay and do not count.
        A failure to delete costs disk space, but does not stop the run.
        """
        if rank() != 0 or policy.keep <= 0:
            return
        try:
            self.on_stage("retain")
            ours = [old for old in folder.committed() if old.marker and old.generation <= self.generation]
            intact = [old for old in ours if not folder.is_marked_damaged(old.name)]
            scheduled = [old.name for old in intact if self._keeps_scheduled and policy.due(old.step)]
            kept = {newest, *scheduled[:1]}
            for old in reversed(intact[policy.keep :]):
                if old.step != best and old.name not in kept:
                    self._check_owner()  # a job that has taken over may resume from this old checkpoint
                    folder.delete(old.name)
        except Exception as error:  # the failure is on rank 0 alone
            logger.warning("%s: an old checkpoint cannot be deleted: %s", folder.location, error)

    # --- a save under way

    def staged(self) -> None:
        """Wait until the save under way has copied the state. Call this before each update of the state."""
        if self._pending is not None:
            heartbeat.enter(heartbeat.SAVE)
            self._pending.staged()
            heartbeat.enter(heartbeat.UPDATE)

    def busy(self) -> bool:
        """Return whether this rank is still writing a save; other ranks may already be done."""
        return self._pending is not None and self._pending.running()

    def poll(self) -> bool:
        """Return whether the save under way has ended on every rank, so that `finish` will not wait; collective."""
        return self._pending is not None and self._pending.ended_everywhere()

    def finish(self) -> list[Saved]:
        """Wait for the save under way, and return the checkpoints committed since the last call. Collective.

        Raises the save's failure on every rank.
        """
        self._end_pending()
        saved, self._saved = self._saved, []
        return saved

    def abandon(self) -> bool:
        """Give up the save under way, whose collectives fail; return whether there was one. Not collective.

        If a disk does not answer, the save's thread goes on later, and fails in its first collective.
        """
        pending, self._pending, self._saved = self._pending, None, []
        if pending is not None:
            pending.abandon(ABANDON_SECONDS)
        self._writer, self._copying = BackgroundWriter(), None  # with process groups of their own again
        return pending is not None

    def close(self) -> None:
        """Release the run. If a save is still under way after a failure, wait a few seconds for it. Not collective."""
        if self._pending is not None:
            self._pending.abandon(ABANDON_SECONDS)
        if self.owner is not None:
            self.owner.release()

    def _end_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._saved += pending.result()


def _all_files(
    folder: RunFolder, attempt: str, shares: Sequence[tuple[str, dict[str, FileRecord]]]
) -> dict[str, FileRecord]:
    """Join the ranks' records. Raises `CheckpointError` if rank 0 does not see a file that another rank wrote."""
    files = {file: record for _, records in shares for file, record in records.items()}

    def missing() -> list[str]:
        sizes = folder.sizes(attempt)
        return [file for file, record in files.items() if sizes.get(file) != record.size]

    if not wait_for(lambda: not missing()) and (unseen := missing()):
        writer = next(rank_name for rank_name, records in shares if unseen[0] in records)
        raise CheckpointError(
            f"{writer}wrote {unseen[0]}, which rank 0 does not see: the nodes do not share {folder.location}; "
            "give a --checkpoint_dir that they do"
        )
    return files
