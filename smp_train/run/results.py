"""Reads, checks and logs a step's numbers once they have reached the host."""

from __future__ import annotations

from smp_train.distributed import generation, heartbeat
from smp_train.run import divergence
from smp_train.run.saving import call_back, report_saves
from smp_train.run.state import Run
from smp_train.telemetry.logging_utils import batch_line, get_logger, perplexity
from smp_train.telemetry.memory_tracker import memory_gib, memory_report
from smp_train.train_utils import PendingStep, StepNumbers

log = get_logger()


def finish_pending_step(run: Run) -> bool:
    """Read and log the pending step's numbers, if a step is pending, and respond to a spike; collective.

    Returns True if the weights lack the step's update; the step queued after it must then be repeated.
    """
    heartbeat.enter(heartbeat.LOG)
    pending, run.pending_step = run.pending_step, None
    if pending is None:
        return False
    numbers = StepNumbers.read(pending.copy)
    if not numbers.exceeded:
        run.spikes.accept(pending.step, numbers.loss, numbers.grad_norm)
    start = None if numbers.not_finite else run.spikes.diverges(numbers.loss)
    if pending.logged:
        write_log(run, pending, numbers)
    if start is not None:
        divergence.report_divergence(run, pending.step, numbers.loss, start)
    if not numbers.exceeded:
        return False
    with generation.no_recovery("a spike was being answered"):
        return divergence.respond(run, pending, numbers)


def write_log(run: Run, pending: PendingStep, numbers: StepNumbers) -> None:
    """Log a step; collective."""
    step = pending.step
    record = {
        "step": step,
        "loss": numbers.loss,
        "perplexity": perplexity(numbers.loss),
        "grad_norm": numbers.grad_norm,
        "lr": run.schedule(step - 1),
        **numbers.router,
        **run.throughput.window(),
        "memory_gib": memory_gib(run.backend.topology.device),
        "tokens": pending.tokens,
        "consumed": pending.consumed,
        **({"truncated_rows": run.truncated, "truncated_targets": run.truncated_targets} if run.truncated else {}),
        **(run.times.fields() if run.times is not None else {}),
    }
    log.info(batch_line(record))
    record = run.record = run.metrics.step(record)
    run.losses["loss"] = numbers.loss
    next_save = min(run.checkpoints.next_due(step) or run.total_steps, run.total_steps)
    run.screen.figures(record, next_save=next_save, saving=run.checkpoints.busy())
    if run.checkpoints.poll():
        report_saves(run)
    if run.args.enable_memory_profiling:
        log.info(memory_report(run.backend.topology.device, f"step {step}"))
    call_back(run, "on_step", record)
