"""A folder that a run saves to: when it gets a checkpoint, how one begins there, and which of them stay."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smp_train.checkpoints.commit import open_folder
from smp_train.checkpoints.manifest import ABANDONED, RunId
from smp_train.checkpoints.node_local import is_node_local, storage_of
from smp_train.checkpoints.owner import Owner
from smp_train.checkpoints.runs import committed
from smp_train.distributed.agree import rank
from smp_train.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Policy:
    """Save into ``folder`` every ``every`` steps and keep the newest ``keep`` (0 or less: all)."""

    folder: str
    every: int
    keep: int

    def due(self, step: int) -> bool:
        """Return whether to save after ``step``. ``every`` of 0 or less: only when forced."""
        return step > 0 and self.every > 0 and step % self.every == 0

    def kept(self, steps: Sequence[int], newest: int) -> set[int]:
        """Return which of the committed ``steps`` stay; the one just written also where later ones are there."""
        return {*steps} if self.keep <= 0 else {newest, *sorted({*steps})[-self.keep :]}


class Target:
    """A folder that ``run`` saves to by ``policy``. Its methods are for rank 0, or each rank of a node-local one."""

    def __init__(self, policy: Policy, run: RunId) -> None:
        self.policy = policy
        self.node_local = is_node_local(policy.folder)
        self.folder = storage_of(policy.folder, run) if self.node_local else open_folder(policy.folder, run)
        self.owner: Owner | None = None
        self.protected: int | None = None
        """A step of the run whose checkpoint stays, whatever the policy says."""
        self._opened = time.monotonic()
        self._newest_commit: float | None = None

    def begin(self, name: str, back_to: int | None) -> str:
        """Begin an attempt at the checkpoint ``name``.

        The first one removes what interrupted saves left, and sets the run's checkpoints after ``back_to`` aside.
        """
        if self._newest_commit is None:
            if self.owner is not None:
                self.owner.check()  # what is unfinished, or of later steps, may be the job's that has taken over
            self._sweep()
            for entry in committed(self.folder, self.folder.run):
                if back_to is not None and entry.step > back_to:
                    aside = self.folder.set_aside(entry.name, ABANDONED)
                    what = os.path.join(self.folder.location, entry.name)
                    logger.warning("%s is of a later step than %d, to which this run went back: kept as %s",
                                   what, back_to, aside)  # fmt: skip
            self._newest_commit = max((entry.time for entry in committed(self.folder)), default=0.0)
        return self.folder.stage(name)

    def _sweep(self) -> None:
        # Under the lock all that is unfinished is a dead job's; without it, what is older than this one.
        idle = -math.inf if self.owner is not None else time.monotonic() - self._opened
        try:
            for done in self.folder.sweep(idle):
                logger.info("checkpoint folder %s: %s", self.folder.location, done)
        except (OSError, CheckpointError) as error:
            logger.warning("checkpoint folder %s cannot be tidied: %s", self.folder.location, error)

    def commit_time(self) -> float:
        """Return the time for a commit: later than the newest one there was, whatever the clock says."""
        return max(time.time(), (self._newest_commit or 0.0) + 0.001)

    def retain(self, step: int, on_stage: Callable[[str], None]) -> None:
        """Delete, on rank 0, what the policy does not keep of the run's checkpoints now that ``step`` is committed.

        A failure costs disk space, not the run: it is a warning.
        """
        if rank() != 0:
            return
        try:
            on_stage("retain")
            own = committed(self.folder, self.folder.run)
            steps = [entry.step for entry in own]
            kept = self.policy.kept(steps, step) if step in steps else steps
            for entry in reversed(own):
                if entry.step not in kept and entry.step != self.protected:
                    self.folder.delete(entry.name)
        except (OSError, CheckpointError) as error:
            logger.warning("checkpoint folder %s: an old checkpoint cannot be deleted: %s", self.folder.location, error)
