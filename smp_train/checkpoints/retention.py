"""When a folder gets a checkpoint, which of those in it stay, and what becomes of what a save or a run has left."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from smp_train.checkpoints.commit import CheckpointFolder
from smp_train.checkpoints.manifest import ABANDONED
from smp_train.checkpoints.runs import committed
from smp_train.distributed.agree import rank
from smp_train.errors import CheckpointError, ConfigError

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


def policies(folders: Sequence[str], every: Sequence[int], keep: Sequence[int]) -> list[Policy]:
    """Make one policy of each folder. Raises `ConfigError` where the lists are not equally long."""
    if not len(folders) == len(every) == len(keep):
        raise ConfigError(
            "--checkpoint_dir, --checkpoint_freq and --num_kept_checkpoints must be equally long: "
            f"got {len(folders)}, {len(every)} and {len(keep)}"
        )
    return [Policy(*each) for each in zip(folders, every, keep, strict=True)]


def steps_kept(steps: Sequence[int], rules: Sequence[Policy], newest: int) -> set[int]:
    """Return which of the committed ``steps`` of one folder stay.

    Each rule keeps its newest ``keep`` of the steps that are its own (due under it, or under none: forced
    ones). The step just written, ``newest``, always stays, even where an abandoned run left later ones
    behind.
    """
    kept = {newest}
    for rule in rules:
        own = [step for step in steps if rule.due(step) or not any(other.due(step) for other in rules)]
        kept.update(own if rule.keep <= 0 else sorted(own)[-rule.keep :])
    return kept & set(steps)


def retain(storage: CheckpointFolder, rules: Sequence[Policy], step: int, on_stage: Callable[[str], None]) -> None:
    """Delete, on rank 0, what no rule keeps of the run's checkpoints now that ``step`` is committed.

    A failure costs disk space, not the run: it is a warning.
    """
    if rank() != 0:
        return
    try:
        on_stage("retain")
        own = committed(storage, storage.run)
        steps = {entry.step for entry in own}
        if step not in steps:
            return
        kept = steps_kept(list(steps), rules, step)
        for entry in reversed(own):
            if entry.step not in kept:
                storage.delete(entry.name)
    except (OSError, CheckpointError) as error:
        logger.warning("checkpoint folder %s: an old checkpoint cannot be deleted: %s", storage.location, error)


def sweep(storage: CheckpointFolder, idle: float) -> None:
    """Clear away what interrupted saves left and nobody has touched for ``idle`` seconds; a failure is a warning."""
    try:
        for done in storage.sweep(idle):
            logger.info("checkpoint folder %s: %s", storage.location, done)
    except (OSError, CheckpointError) as error:
        logger.warning("checkpoint folder %s cannot be tidied: %s", storage.location, error)


def set_later_aside(storage: CheckpointFolder, step: int) -> None:
    """Rename the run's checkpoints of steps later than ``step``, to which it went back: they no longer count."""
    for entry in committed(storage, storage.run):
        if entry.step > step:
            aside = storage.set_aside(entry.name, ABANDONED)
            logger.warning(
                "%s is of a later step than %d, to which this run went back: kept as %s",
                os.path.join(storage.location, entry.name), step, aside,
            )  # fmt: skip
