"""One step of the loop: read a batch, vote, update; log the previous step once its numbers have reached the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from smp_train import distributed, train_utils
from smp_train.data.batch import Batch, collate
from smp_train.distributed import generation, heartbeat
from smp_train.run import recovery
from smp_train.run.results import finish_pending_step
from smp_train.run.saving import save_last
from smp_train.run.state import Run
from smp_train.telemetry.logging_utils import get_logger
from smp_train.train_utils import Ballot, PendingStep, StepResult, Vote

log = get_logger()

ASYNCHRONOUS_DEVICES = {"cuda"}
"""Device types that work asynchronously: a step's numbers are read once the next step is queued."""


def step(run: Run) -> bool:
    """Make one update and log it; return whether any rank was asked to stop; collective."""
    args, progress = run.args, run.progress
    samples = run.train_data.step_samples(progress.consumed)
    micro_batches, failure = read_batch(run)
    ballot = Ballot(
        tokens=sum(batch.counted_tokens() for batch in micro_batches),
        stop=run.stop.is_requested(look_for_file=run.runtime.is_main),
        failed=failure is not None,
        remaining=not run.train_data.exhausted,
        truncated=sum(batch.truncated for batch in micro_batches),
        truncated_targets=sum(batch.truncated_targets for batch in micro_batches),
    )
    total, result = update(run, micro_batches, ballot)
    while finish_pending_step(run):  # the previous step's update was rejected, so this step's is invalid too
        total, result = update(run, micro_batches, ballot)
    if total.failed:
        save_last(run)
        with distributed.together("reading the training data"):
            if failure is not None:
                raise failure
    progress.step += 1
    progress.consumed += samples
    progress.tokens += total.tokens
    run.unfinished, run.batch = True, None
    run.data_ended = not total.remaining
    count_truncated(run, total)
    run.throughput.add(samples=samples, tokens=samples * run.train_data.seq_len)
    if run.audit is not None:
        names = [name for batch in micro_batches for name in batch.samples if name]
        run.audit.step(
            progress.step, names, truncated=ballot.truncated, truncated_targets=ballot.truncated_targets
        )  # fmt: skip
    # Read the numbers before a save, so that diverged weights do not replace good checkpoints.
    ends = total.stop > 0 or is_last(run) or run.callback_failure is not None
    read_now = ends or run.checkpoints.due(progress.step)
    logged = read_now or progress.step % args.logging_freq == 0
    run.pending_step = PendingStep(
        progress.step, progress.consumed - samples, progress.consumed, progress.tokens,
        logged, micro_batches, result, result.to_host(),
    )  # fmt: skip
    if run.has_met:  # `recovery.commit` has formed new groups, and the ranks are not synchronized yet
        raise recovery.LeaveStep
    if logged and run.times is not None:
        run.times.gather()
    validates = args.validation_freq and progress.step % args.validation_freq == 0
    asynchronous = run.backend.topology.device.type in ASYNCHRONOUS_DEVICES and generation.member is None
    if read_now or validates or not asynchronous:
        finish_pending_step(run)
    return total.stop > 0


def read_batch(run: Run) -> tuple[list[Batch], Exception | None]:
    """Return this rank's micro-batches of the next step, and why they could not be read; not collective.

    A step that is repeated after a recovery has the same micro-batches.

    The other ranks enter the step's collectives in any case: after a failure the micro-batches are empty, so that this
    rank takes part, votes for a stop, and all ranks stop together.
    """
    heartbeat.enter(heartbeat.DATA, run.progress.step + 1)
    with run.throughput.data_wait():
        try:
            if run.audit is not None:
                run.audit.check()
            if run.batch is None:
                run.batch = next(run.batches)
            return run.batch, None
        except Exception as failure:
            empty = collate([], run.train_data.seq_len, size=run.args.train_batch_size)
            return [empty] * run.args.gradient_accumulation_steps, failure


def update(run: Run, micro_batches: Sequence[Batch], ballot: Ballot) -> tuple[Ballot, StepResult]:
    """Queue the update of a step; return the sum of all ballots, and the result on the device; collective.

    If the step before is still pending and its update is rejected on the device, so is this one.
    """
    heartbeat.enter(heartbeat.VOTE)
    vote = Vote(run.backend, ballot)
    skip_update = vote.skip_update
    if run.pending_step is not None:
        skip_update = skip_update + run.pending_step.result.rejected
    train_utils.seed_for(run.backend, run.args, run.progress.step)
    result = train_utils.train_step(
        run.backend, run.model, run.optimizer, micro_batches, tokens=vote.tokens, lr=run.schedule(run.progress.step),
        max_grad_norm=run.args.grad_clip, skip_update=skip_update, limits=run.spikes.limits(run.progress.step + 1),
        reject_exceeded=run.spikes.skips_updates, commit=partial(recovery.commit, run),
    )  # fmt: skip
    heartbeat.enter(heartbeat.OUTCOME)
    return vote.outcome(), result


def count_truncated(run: Run, total: Ballot) -> None:
    """Add up the tokens that --long truncate cuts off, and warn of the first."""
    if total.truncated and not run.truncated and run.runtime.is_main:
        log.warning(
            "Step %d: %d rows longer than %d tokens lose their end, with %d tokens that carry loss (--long truncate); "
            "--long split keeps them", run.progress.step,
            total.truncated, run.train_data.seq_len, total.truncated_targets,
        )  # fmt: skip
    run.truncated += total.truncated
    run.truncated_targets += total.truncated_targets


def is_last(run: Run) -> bool:
    """Return whether the run has no step after this one: by its number, or because its data has ended."""
    return run.progress.step >= run.total_steps or run.data_ended
