"""Saving: when, where to, and in which order."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from smp_train.checkpoints.async_save import Background, BackgroundWriter
from smp_train.checkpoints.attempt import Attempt, Elsewhere, Saved
from smp_train.checkpoints.collective import gather, on_main
from smp_train.checkpoints.commit import UNKNOWN
from smp_train.checkpoints.discovery import TORCHS, Checkpoint
from smp_train.checkpoints.manifest import NODE_LOCAL, TOKENIZER, RunId, folder_name, parse_folder_name
from smp_train.checkpoints.node_local import compatible_with, local_part
from smp_train.checkpoints.owner import ADVICE, Owner
from smp_train.checkpoints.saver import HUGGING_FACE, LibrarySaver, Saver
from smp_train.checkpoints.state import present
from smp_train.checkpoints.target import Policy, Target
from smp_train.distributed import heartbeat
from smp_train.distributed.agree import alone, rank
from smp_train.errors import CheckpointError, ConfigError
from smp_train.storage import is_s3

ABANDON_SECONDS = 10.0


class CheckpointManager:
    """Writes checkpoints by its policies. Every rank makes one, with the same arguments.

    With ``asynchronous`` a save returns at once: its state is copied to host memory until `staged` returns, which
    must be called before anything changes it, and written in a thread. It is committed when `finish` has returned.
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
        self.tokenizer: dict[str, bytes] = {}
        """Files of the tokenizer, by name, for every durable checkpoint; rank 0's are stored."""
        self._writer = BackgroundWriter()
        self._pending: Background | Elsewhere | None = None
        self._saved: list[Saved] = []
        self._back_to: int | None = None
        self._targets = [Target(policy, run) for policy in policies]
        self._shared = [target for target in self._targets if not target.node_local]
        if len({target.folder.location for target in self._targets}) < len(policies):
            raise ConfigError("--checkpoint_dir names one folder twice; give each policy a folder of its own")

    def due(self, step: int) -> bool:
        """Return whether any policy wants a checkpoint after ``step``."""
        return any(target.policy.due(step) for target in self._targets)

    def next_due(self, step: int) -> int | None:
        """Return the first step after ``step`` at which a policy wants a checkpoint, None where none ever does."""
        every = [target.policy.every for target in self._targets if target.policy.every > 0]
        return min((step - step % each + each for each in every), default=None)

    def check_writable(self) -> None:
        """Create each folder and prove that this rank can write there (`CheckpointError`). Not collective."""
        for target in self._targets:
            target.folder.check_writable()

    def check_shared(self) -> None:
        """Prove that every rank sees what rank 0 writes; else `CheckpointError` on every rank. Collective."""
        for folder in (target.folder for target in self._shared):
            what = f"cannot use checkpoint folder {folder.location}"
            probe = on_main(what, folder.put_probe)
            try:
                gather(what, partial(folder.check_probe, probe))
            finally:
                if rank() == 0:
                    with contextlib.suppress(OSError, CheckpointError):
                        folder.storage.delete(probe)

    def lock(self, *, force: bool = False, advice: str = ADVICE) -> None:
        """Keep other jobs of the run from writing to the folders until `close`; collective.

        Raises `CheckpointError` on every rank where another job holds one, with ``advice``, unless ``force`` takes it
        away; that job then commits nothing any more.
        """

        def acquire() -> None:
            for target in self._targets:
                if rank() == 0 or target.node_local:
                    owner = Owner(target.folder, advice)
                    owner.acquire(force=force)
                    target.owner = owner
                    target.folder.rescue()

        gather("cannot start", acquire)

    def go_back(self, to: Checkpoint) -> None:
        """Set the run's checkpoints of later steps aside at the first save, if ``to`` is a checkpoint of this run.

        Otherwise the next start would resume from them. Their markers are renamed to ``COMMITTED.abandoned``.
        """
        if to.committed.run == self.run:
            self._back_to = to.step

    def protect(self, step: int | None) -> None:
        """Keep the run's checkpoint of ``step``, besides those that the policies keep; None: no other."""
        for target in self._targets:
            target.protected = step

    def save(
        self, step: int, state: dict[str, Any], meta: dict[str, Any], *, force: bool = False, saver: Saver = TORCHS
    ) -> list[str]:
        """Write and commit ``state`` into each folder that is due, or into all with ``force``. Collective.

        ``meta`` must be plain JSON; rank 0's is the one stored. ``saver`` writes the tree. Returns the paths of the
        checkpoints, complete and durable; when asynchronous none, see `finish`, which is called first. Raises
        `CheckpointError` on every rank when any rank failed; no trace of that attempt then counts, and what was
        committed before is untouched.
        """
        self._end_pending()
        due = [target for target in self._targets if force or target.policy.due(step)]
        if not due:
            return []
        state = present(state)
        # A snapshot; and what cannot be stored is to fail before the large files are written.
        meta = {**json.loads(on_main("cannot save", lambda: json.dumps(meta))), "step": step}
        if self.run.id:
            meta["run"] = self.run.to_json()
        if saver.names != HUGGING_FACE:
            meta["names"] = saver.names
        attempt = partial(
            Attempt, model_type=self.model_type, began=time.monotonic(), back_to=self._back_to, on_stage=self.on_stage,
            beside={TOKENIZER + name: file for name, file in self.tokenizer.items()},
        )  # fmt: skip

        def write(state: dict[str, Any]) -> list[Saved]:
            return [self._save_to(target, state, meta, saver, attempt) for target in due]

        if isinstance(saver, LibrarySaver) and (self.asynchronous or not saver.library.takes_writer):
            if saver.library.asynchronous and not any(is_s3(target.folder.location) for target in due):
                for target in due:
                    self._end_pending()
                    self._pending = attempt(target, meta=meta).begin(saver, state)
                if self.asynchronous:
                    return []
                self._end_pending()
                return [each.path for each in self._saved[-len(due) :]]
        elif self.asynchronous:
            self._pending = self._writer.begin(state, write)
            if self._pending is not None:
                return []
            self.asynchronous = False
        saved = write(state)
        self._saved += saved
        return [each.path for each in saved]

    def _save_to(
        self, target: Target, state: dict[str, Any], meta: dict[str, Any], saver: Saver, attempt: Callable[..., Attempt]
    ) -> Saved:
        """Write and commit into one folder, then delete what that replaces; collective."""
        if not target.node_local:
            durable = attempt(target, meta=meta).save(saver, state)
            target.retain(durable.step, self.on_stage)
            return durable
        mine = {**meta, NODE_LOCAL: compatible_with([each.policy.folder for each in self._shared], meta.get("mesh"))}

        def save_mine() -> Saved:
            with alone():
                return attempt(target, meta=mine).save(saver, local_part(state))

        # Every rank has committed its part before any deletes an older one: there is always a step that all have.
        saved = gather("cannot save", save_mine)[rank()]
        with alone():
            target.retain(saved.step, self.on_stage)
        return saved

    def staged(self) -> None:
        """Wait until the state of the save under way is copied: to be called before each update of it."""
        if self._pending is not None:
            heartbeat.at(heartbeat.SAVE)
            self._pending.staged()
            heartbeat.at(heartbeat.UPDATE)

    def busy(self) -> bool:
        """Return whether this rank is still writing a save; its peers may be ahead or behind."""
        return self._pending is not None and self._pending.running()

    def poll(self) -> bool:
        """Return whether the save under way has ended on every rank, so that `finish` will not wait; collective."""
        return self._pending is not None and self._pending.ended_everywhere()

    def finish(self) -> list[Saved]:
        """Wait for the save under way, and return what was committed since the last call. Collective.

        Raises what the save raised, on every rank.
        """
        self._end_pending()
        saved, self._saved = self._saved, []
        return saved

    def close(self) -> None:
        """Release the folders; where a failed run has a save under way, wait a few seconds for it. Not collective."""
        if self._pending is not None:
            self._pending.abandon(ABANDON_SECONDS)
        for target in self._targets:
            if target.owner is not None:
                target.owner.release()

    def _end_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            self._saved += pending.result()
