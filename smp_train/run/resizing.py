"""Recovery in place with a new number of replicas: each rank keeps its state while it builds its run again.

Only the replicate dimension of the mesh changes, so a rank's shards stay the same. The number of micro-steps changes
with it, so the global batch and its samples stay the same. Sums change their order, so losses differ in the last bits.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smp_train import distributed
from smp_train.arguments import Arguments, Resolved
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.owner import Ownership
from smp_train.distributed import Runtime, generation, heartbeat
from smp_train.distributed.degrees import plan
from smp_train.distributed.dtensor import forget_layouts
from smp_train.errors import SmpTrainError
from smp_train.run import recovery
from smp_train.run.start import Start
from smp_train.run.state import Position, Run, Shared
from smp_train.run.stop import StopRequest


@dataclass(frozen=True)
class Settled:
    """Results of a run's first start, which later starts reuse."""

    args: Arguments
    start: Start
    resumed: Checkpoint | None
    id: str
    choice: dict[str, Any] | None
    """The record of --auto's choice."""
    global_batch: int


@dataclass
class Kept:
    """State that a rank keeps while it builds its run again."""

    settled: Settled
    owner: Ownership | None
    tensors: list[Tensor]
    """The rank's weights and optimizer state in host memory, as `recovery.local_state` yields them."""
    position: Shared
    stop: StopRequest
    device: torch.device
    has_met: bool = True
    """Whether this rank is already in the default group of the newest generation."""


def keep(run: Run) -> Kept:
    """Copy this rank's state to host memory, and close the run. Not collective."""
    args = replace(run.args, hybrid_shard_degree=run.backend.degrees.sharded)
    start = replace(run.start, owner=None, generation=run.checkpoints.generation)
    settled = Settled(args, start, run.resumed, run.id, run.choice, run.train_data.global_batch)
    kept = Kept(
        settled, run.checkpoints.owner, [local.to("cpu", copy=True) for local in recovery.local_state(run)],
        recovery.position(run), run.stop, run.backend.topology.device,
    )  # fmt: skip
    run.screen.close()
    run.batches.close()
    heartbeat.end()
    run.metrics.close()
    if run.audit is not None:
        run.audit.close()
    return kept


def free_memory() -> None:
    """Free the memory and the cache entries of a closed run. Not collective."""
    torch._dynamo.reset()
    forget_layouts()  # they refer to meshes whose groups are gone
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def compare(kept: Kept | None) -> None:
    """Exchange positions with ranks that are in `recovery.meet`, if the number of ranks has changed; collective.

    A rank that was in `recovery.meet` itself must not call this.
    """
    if generation.member is not None and generation.member.joined_resized:
        position = Shared(progress=Position(step=-1)) if kept is None else kept.position
        distributed.gather("comparing the positions of the ranks", lambda: position)


def settled(kept: Kept | None, resolved: Resolved, ranks: Runtime) -> tuple[Resolved, Settled | None]:
    """Return the settings for the present number of ranks, and the results of the first start; collective.

    The results are None if the number of ranks has never changed.
    """
    if generation.member is None or not generation.member.resized:
        return resolved, None
    all_settled = distributed.gather("building the run again", lambda: None if kept is None else kept.settled)
    known = next(filter(None, all_settled), None)
    if known is None:
        raise SmpTrainError("no rank with the state of the run is left: start it again")
    args = known.args
    degrees = plan(args, ranks.world_size, ranks.local_world_size, smp=False)
    steps = known.global_batch // (args.train_batch_size * degrees.data_parallel)
    args = replace(args, gradient_accumulation_steps=steps)
    owner = kept.owner if kept and ranks.is_main else None
    return replace(resolved, args=args), replace(known, args=args, start=replace(known.start, owner=owner))


def restore(run: Run, kept: Kept | None) -> None:
    """Load the ``kept`` state, if any, into a run that was built again. Not collective."""
    run.progress = Position(step=-1)
    if kept is None or kept.position.progress.step < 0:
        return
    for local, saved in zip(recovery.local_state(run), kept.tensors, strict=True):
        local.copy_(saved)
    kept.tensors.clear()
    recovery.adopt(run, kept.position)
