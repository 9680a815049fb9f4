"""Recovery in place: when a rank dies, the others keep their processes and their state (--recovery in_place).

The supervisors replace the dead rank and begin a new generation (`distributed.generation`). Every collective of the
other ranks fails; they leave the step, form the process groups again, and bind the living model to them. The
replacement replays the recorded collectives of the run's start, and copies weights and optimizer state from a replica;
without a living replica, all ranks load the newest checkpoint. The step is then repeated with the same samples.

If a node is lost and no spare node is left, the run goes on with fewer replicas, and with more when nodes return
(`run.resizing`).

Either all ranks make an update or none does: `commit` is the last collective before the update, over all ranks. If it
succeeded on any living rank, every rank had its final gradient, and ranks on which it failed make the update now.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smp_train import distributed
from smp_train.arguments import Arguments
from smp_train.checkpoints.background import MEMORY_SHARE
from smp_train.checkpoints.find import open_checkpoint
from smp_train.distributed import ALL_RANKS, Runtime, agree, failures, generation, group, heartbeat
from smp_train.distributed.dtensor import local_tensor
from smp_train.distributed.environment import GENERATION
from smp_train.distributed.host_memory import free_host_bytes
from smp_train.distributed.job import Job
from smp_train.errors import CheckpointError, ConfigError, LostPeerError, SmpTrainError
from smp_train.models.hub_state import create_optimizer_state
from smp_train.run.results import finish_pending_step
from smp_train.run.resume import find_checkpoint, set_position
from smp_train.run.saving import load
from smp_train.run.start import Start, candidates_in
from smp_train.run.state import Position, Run, Shared
from smp_train.telemetry.logging_utils import batch_line
from smp_train.telemetry.metrics import read_metrics
from smp_train.train_utils import StepNumbers

log = logging.getLogger("smp_train.recovery")

NOTICE_SECONDS = 30.0
"""How long a rank that has lost a peer waits for the next generation before it fails."""


class LeaveStep(BaseException):
    """Raised to leave a step that the present generation cannot finish; handlers of `Exception` do not catch it."""


class Resized(BaseException):
    """Raised to leave the loop, because the run must be built again for another number of ranks."""


def check(args: Arguments, ranks: Runtime) -> None:
    """Raise `ConfigError` if ranks shall be replaced, but there is no supervisor that replaces them."""
    off = args.recovery == "off" or args.evaluate_only or ranks.world_size == 1
    if not off and GENERATION not in os.environ:
        raise ConfigError(f"--recovery {args.recovery} needs our launcher: start the run by smp-train launch")


def begin_transcript() -> None:
    """Record the collectives of the start, once the process group is formed; a replacement replays the recorded ones.

    In a generation with a new number of ranks every rank starts, and no rank replays.
    """
    member = generation.member
    if member is None:
        return
    agree.record()
    if member.replaces and not member.joined_resized:
        agree.replay(member.start_of_run())


def begin_training(run: Run) -> None:
    """Allow the replacement of ranks from now on. Not collective."""
    results = agree.recorded()
    if run.runtime.is_main and generation.member is not None and results is not None:
        generation.member.begin_training(results, run.backend.degrees.sharing, world_sizes(run))


def world_sizes(run: Run) -> list[int]:
    """Return the numbers of ranks, up to the present one, with which the run can make the same global batches."""
    degrees, rows = run.backend.degrees, run.train_data.global_batch // run.args.train_batch_size
    data_ranks = degrees.data_parallel // degrees.replicate
    counts = range(1, degrees.replicate + 1)
    sizes = [count * degrees.sharing for count in counts if rows % (count * data_ranks) == 0]
    return [size for size in sizes if size > 1]


def end_training(run: Run) -> None:
    """Make any later death end the run, since work after the training loop is not repeated; collective.

    Raises `LostPeerError` if another generation begins first.
    """
    member = generation.member
    if member is not None and not distributed.on_main("ending the training", member.end_training):
        raise LostPeerError("the next generation begins")


def replaces() -> bool:
    """Return whether this process replaces a dead rank, or joins a run that trains already."""
    return generation.member is not None and generation.member.replaces


def outgrown(run: Run) -> bool:
    """Return whether the newest generation has another number of ranks than the run was built for."""
    return generation.member is not None and run.generation < generation.member.resized


def interrupts(failure: BaseException) -> bool:
    """Return whether ``failure`` comes from a death that the run can recover from; waits for the next generation."""
    member = generation.member
    if member is None or member.refused or isinstance(failure, LeaveStep):
        return isinstance(failure, LeaveStep)
    # The failure of a node that joins, raised on all ranks, does not end the run either.
    other_rank_failed = failures.lost_peer(failure) or (member.rebuilds and getattr(failure, "repeats", False))
    return member.superseded() or (other_rank_failed and member.wait(NOTICE_SECONDS))


def commit(run: Run, values: Tensor) -> None:
    """Sum ``values``, a step's outcome, over all ranks in place; once this returns, every rank makes the update.

    Waits for the sum. If a rank dies meanwhile, this rank takes the sum from another rank, or raises `LeaveStep`
    if no rank has the sum. Collective.
    """
    member = generation.member
    if member is None:
        dist.all_reduce(values)
        return
    step = run.progress.step + 1
    counted = torch.cat([values, values.new_ones(1)])
    try:
        dist.all_reduce(counted)
        *sums, ranks = counted.tolist()
        if ranks != run.runtime.world_size or member.superseded():  # an aborted collective may return any value
            raise LostPeerError("the sum was aborted")
    except Exception as failure:
        if not interrupts(failure):
            raise
        positions = meet(run)
        outcomes = [position.outcome for position in positions if position.progress.step == step]
        if not outcomes:
            raise LeaveStep from failure
        sums = outcomes[0]
    run.outcome = sums
    values.copy_(torch.tensor(sums, dtype=values.dtype))


def meet(run: Run) -> list[Shared]:
    """Form the groups of the newest generation, bind the model to them, and return the `position` of each rank.

    If the generation has another number of ranks, the model is not bound: only the default group works.
    """
    heartbeat.enter(heartbeat.START)
    while True:
        try:
            if run.checkpoints.abandon():  # save again, if no update was made since
                run.saved_step, run.unfinished = 0, True
            group.form_again()
            if not outgrown(run):
                run.backend.rebind(run.model)
            return exchange(run)
        except Exception as failure:
            if not interrupts(failure):
                raise


def exchange(run: Run) -> list[Shared]:
    """Return the `position` of each rank; collective. A replacement's step is -1."""
    positions = distributed.gather("comparing the positions of the ranks", lambda: position(run))
    run.has_met = True
    return positions


def recover(run: Run) -> None:
    """Bring all ranks of the newest generation to the same position; collective.

    Raises `Resized` if the run must be built again first; only the update in progress is then complete.
    """
    member = generation.member
    assert member is not None
    began, waited = member.noticed or time.monotonic(), 0.0
    heartbeat.enter(heartbeat.START)
    while True:
        try:
            if not run.has_met:
                meet(run)
            if outgrown(run):
                finish_pending(run)
                check_memory(run)
                raise Resized
            waited = synchronize(run, began)
            break
        except Exception as failure:
            if not interrupts(failure):
                raise
            run.has_met = False
    run.has_met = False
    member.recovered()
    step, seconds = run.progress.step, max(waited, time.monotonic() - began)
    run.throughput.window()  # the time of the recovery is not a step's
    log.warning("Recovered in %.1f s, at step %d: %s", seconds, step, member.reason, extra=ALL_RANKS)
    run.metrics.event("recovery", step=step, seconds=seconds, replaced=member.replaced, reason=member.reason)
    if run.runtime.is_main:
        member.report_step(step)


def check_memory(run: Run) -> None:
    """End the run if this host cannot hold copies of its ranks' states (`resizing.keep`). Not collective."""
    size, free = run.runtime.local_world_size * sum(each.nbytes for each in local_state(run)), free_host_bytes()
    if free is not None and size > MEMORY_SHARE * free:
        memory = f"{free / 2**30:.1f} GiB of memory free, copies of the state take {size / 2**30:.1f}"
        raise give_up(f"{run.runtime.hostname} has {memory}")


def join(run: Run) -> None:
    """Bring a run, which was built while its peers train or were built again, to the same position; collective.

    A replacement's step is -1.
    """
    begin_training(run)  # with the transcript of this start, which the next line ends
    agree.replay(None)
    try:
        exchange(run)
    except Exception as failure:
        if not interrupts(failure):
            raise
    recover(run)


def synchronize(run: Run, began: float) -> float:
    """Make the state of all ranks equal: from the living ranks, or from the newest checkpoint; collective.

    Returns the longest wait of any rank, in seconds; this rank's wait started at ``began``.
    """
    finish_pending(run)
    positions = exchange(run)
    living = [rank for rank, each in enumerate(positions) if each.progress.step >= 0]
    if len({positions[rank].progress.step for rank in living}) > 1:
        raise give_up("the ranks are at different steps")
    sources = replicas(run, living)
    if sources is None:
        go_back(run)
    else:
        copy_state(run, sources)
        first = min(living, key=lambda rank: (not positions[rank].unfinished, positions[rank].validated, rank))
        adopt(run, positions[first])
    for failure in filter(None, (each.callback_failure for each in positions)):
        failure.repeats = not run.runtime.is_main  # raised on all ranks, printed by one
        run.callback_failure = failure
    own_checkpoints(run)
    return max(distributed.gather("measuring the recovery", lambda: time.monotonic() - began))


def finish_pending(run: Run) -> None:
    """Log the update in progress. Not collective, as other ranks may have logged it already."""
    if run.pending_step is not None:
        if StepNumbers.read(run.pending_step.copy).exceeded:
            raise give_up("a spike in the step before")
        with agree.alone():
            times, run.times = run.times, None
            finish_pending_step(run)
            run.times = times


def position(run: Run) -> Shared:
    """Return this rank's position in the run, with all that a replacement needs besides weights and optimizer state."""
    return Shared(**{each.name: getattr(run, each.name) for each in fields(Shared)})


def adopt(run: Run, known: Shared) -> None:
    """Take over ``known``, the `position` of the living rank that has done the least since the last update."""
    lacks_position = run.progress.step < 0
    for each in fields(Shared):
        setattr(run, each.name, getattr(known, each.name))
    if lacks_position:
        skip_to_position(run, known.saved_path)
        if run.runtime.is_main and known.record is not None:
            log_if_missing(run, known.record)


def skip_to_position(run: Run, checkpoint: str | None) -> None:
    """Read data from the run's position on; streams first skip to the position of the newest ``checkpoint``."""
    if checkpoint is not None and run.train_data.kind == "streamed":
        with suppress(CheckpointError):  # then they read all records since the run's start again
            if data := open_checkpoint(checkpoint).meta.get("data"):
                run.train_data.restore_state(data, allow_data_change=True)
    run.train_data.skip_to(run.progress.consumed)
    run.read_from_here()


def log_if_missing(run: Run, record: dict[str, Any]) -> None:
    """Log a step's record that a dead rank 0 has not logged."""
    if record["step"] not in [written["step"] for written in read_metrics(run.folder.path) if "event" not in written]:
        log.info(batch_line(record))
        run.metrics.step(record)


def replicas(run: Run, living: list[int]) -> dict[int, int] | None:
    """Return, for each replaced rank, a living rank with the same state; None if some rank has no replica left."""
    degrees = run.backend.degrees
    part = run.runtime.world_size // degrees.replicate  # ranks of one replica are neighbours
    sources = {}
    for rank in range(run.runtime.world_size):
        if rank not in living:
            same = [other for other in living if other % part == rank % part]
            if not same:
                return None
            sources[rank] = same[0]
    return sources


def copy_state(run: Run, sources: Mapping[int, int]) -> None:
    """Copy weights and optimizer state to the replaced ranks, in their replica groups; collective."""
    part = run.runtime.world_size // run.backend.degrees.replicate
    same = {rank: source for rank, source in sources.items() if rank % part == run.runtime.rank % part}
    if not same:
        return
    rank, source, replicas_group = run.runtime.rank, min(same.values()), run.backend.replica_group()
    for local in local_state(run):
        # An aborted broadcast may write anything: other living ranks keep their own state.
        dist.broadcast(local if rank in (source, *same) else local.clone(), source, group=replicas_group)
    if run.backend.topology.device.type == "cuda":
        torch.cuda.synchronize()
    if generation.member is not None and generation.member.superseded():
        raise LostPeerError("the copy was aborted")


def local_state(run: Run) -> Iterator[Tensor]:
    """Yield this rank's tensors of weights and optimizer state, in the same order on all ranks of any replica."""
    create_optimizer_state(run.optimizer)
    moments = [run.optimizer.state[p] for group in run.optimizer.param_groups for p in group["params"]]
    for state in (run.model.state_dict(keep_vars=True), *moments):
        for _, value in sorted(state.items()):
            yield local_tensor(value).detach()


def go_back(run: Run) -> None:
    """Load the newest checkpoint on all ranks; collective."""
    committed = distributed.on_main("looking for checkpoints", lambda: sorted(
        (each for folder in run.checkpoints.folders for each in candidates_in(folder)), reverse=True
    ))  # fmt: skip
    start = Start(run.start.name, True, tuple(committed))
    checkpoint, _ = find_checkpoint(run.args, run.spec, start, run.backend.topology.mesh)
    if checkpoint is None:
        raise give_up("no replica of its state lives, and there is no checkpoint yet")
    log.warning("No replica of the lost state lives: all go back to %s", checkpoint.path, extra=ALL_RANKS)
    run.progress = Position(step=-1)  # if a rank dies meanwhile, other ranks must not copy this rank's state
    load(run, checkpoint)
    set_position(run, checkpoint)
    run.unfinished, run.stopped, run.validated = False, False, checkpoint.step
    run.data_ended = run.train_data.exhausted
    run.read_from_here()


def give_up(why: str) -> SmpTrainError:
    """Return the error of a run that cannot recover from a rank's death, and forbid further attempts."""
    member = generation.member
    assert member is not None
    member.refuse(why)
    return SmpTrainError(f"{member.reason}, and the run cannot recover in place: {why}; start it again")


def own_checkpoints(run: Run) -> None:
    """Let the replacement of rank 0 own the run's checkpoints, and all ranks save in the same way; collective."""
    checkpoints = run.checkpoints
    checkpoints.asynchronous = not agree.any_rank(not checkpoints.asynchronous)
    checkpoints.generation = distributed.on_main("claiming the checkpoints", lambda: checkpoints.own(Job.current()))
