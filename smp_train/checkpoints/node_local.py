"""Node-local checkpoints: each rank saves its part to its node's own disk, so that the same ranks can restart there.

A parent folder ``local:DIR`` is not shared between nodes. Rank R writes ``DIR/<run>/rank<R>/<name>/``, an ordinary
checkpoint with only this rank's part, so nothing crosses the network and no rank waits for another. Resuming needs
every rank's part. After a node was replaced, or on another mesh, the run resumes from a durable checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from smp_train.arguments.training_flags import NODE_LOCAL as PREFIX
from smp_train.checkpoints.checkpoint import TORCHS, Checkpoint, verified
from smp_train.checkpoints.collective import gather
from smp_train.checkpoints.folder import folder_of_run
from smp_train.checkpoints.format import NODE_LOCAL
from smp_train.checkpoints.saver import HUGGING_FACE, Saver
from smp_train.distributed import ALL_RANKS
from smp_train.distributed.agree import alone, rank, unless, world_size
from smp_train.distributed.dtensor import local_tensor
from smp_train.distributed.host_copy import leaves, put
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.hub_state import present
from smp_train.storage import normal

logger = logging.getLogger(__name__)


def is_node_local(parent: str) -> bool:
    """Return whether a parent folder is on each node's own disk."""
    return parent.startswith(PREFIX)


def local_part(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with each DTensor replaced by this rank's local tensor, which shares its memory."""
    part: dict[str, Any] = {}
    for path, value in leaves(present(state)):
        put(part, path, local_tensor(value))
    return part


def check_saver(saver: Saver) -> None:
    """Raise `ConfigError` for a model that SMP has transformed: its ranks do not share one tree."""
    if saver != TORCHS:
        raise ConfigError(f"--checkpoint_dir {PREFIX}DIR is not available with SMP's own models; leave it out")


def facts_of_part(durable: Sequence[str], mesh: Any) -> dict[str, Any]:
    """Return what must be the same at saving and loading a part: ranks, mesh, durable parents and parameter names."""
    ranks = {"world_size": world_size(), "rank": rank(), "mesh": mesh}
    return {**ranks, "durable": sorted(map(normal, durable)), "names": HUGGING_FACE}


class NodeLocalCheckpoint(Checkpoint):
    """A checkpoint that consists of one node-local part per rank."""

    @property
    def durable(self) -> bool:
        """Whether the checkpoint outlives the loss of a node."""
        return False

    def load(self, state: dict[str, Any], saver: Saver = TORCHS) -> None:
        """Fill ``state`` in place; its layout must equal the saved one. Collective."""

        def load_part() -> None:
            with alone():
                Checkpoint.load(self, local_part(state), saver)

        gather(f"cannot load {self.path}", load_part)


Step = tuple[int, int]
"""Generation and step."""


def steps_on_nodes(parents: Sequence[str], run_name: str) -> list[tuple[Step, str]]:
    """Return (generation and step, parent) of each step committed on every rank, newest first. Collective."""

    def steps_of(parent: str) -> list[Step]:
        return [checkpoint[:2] for checkpoint in folder_of_run(parent, run_name).committed()]

    by_rank = gather("cannot resume", lambda: [steps_of(parent) for parent in parents])
    steps = []
    for number, parent in enumerate(parents):
        everywhere = set.intersection(*(set(steps[number]) for steps in by_rank))
        for step in set.union(*(set(steps[number]) for steps in by_rank)) - everywhere:
            logger.info("Step %d in %s is passed over: not every rank has its part", step[1], parent)
        steps += [(step, parent) for step in everywhere]
    return sorted(steps, reverse=True)


def open_parts(parent: str, run_name: str, step: Step, facts: dict[str, Any]) -> NodeLocalCheckpoint | None:
    """Return this rank's verified part of a step; None, with a warning, if any rank's part is unusable. Collective."""
    folder = folder_of_run(parent, run_name)
    part: NodeLocalCheckpoint | None = None
    problem = None
    try:
        name = next((checkpoint.name for checkpoint in folder.committed() if checkpoint[:2] == step), "")
        with alone():
            checkpoint = verified(folder, name)
        if checkpoint.meta.get(NODE_LOCAL) == facts:
            part = NodeLocalCheckpoint(**{field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)})
        else:
            problem = "it was saved by other ranks, or on another mesh"
    except (CheckpointError, OSError) as error:
        problem = str(error)
    problems = list(filter(None, gather("cannot resume", partial(unless, None, problem))))
    if problems:
        logger.warning("Step %d in %s is passed over: %s", step[1], parent, problems[0], extra=ALL_RANKS)
        return None
    return part
