"""A training run from start to end: build, resume, fit, finish."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack
from typing import Any

import transformers.modeling_utils  # noqa: F401  every run needs it: imported here, no garbage is looked for meanwhile

from smp_train import distributed, train_utils
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.validation import prompts_only, runs_natively
from smp_train.build_run import build_run, mesh_sizes
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.data.batch import Batch, collate
from smp_train.distributed import Runtime, heartbeat
from smp_train.errors import ConfigError, DataError
from smp_train.inference import generation
from smp_train.models.tokenizer import tokenizer_from
from smp_train.parallel import compile
from smp_train.progress import MOVED, Progress
from smp_train.run import divergence
from smp_train.run.best import Best
from smp_train.run.naming import how_to_resume, output
from smp_train.run.resume import changed_settings, imported_position
from smp_train.run.saving import (
    best_checkpoint,
    complete_model,
    load,
    load_best,
    notify,
    report_saves,
    save,
    save_final_model,
    save_last,
)
from smp_train.run.state import NO_LIMIT, Position, Run
from smp_train.telemetry.logging_utils import batch_line, get_logger, perplexity, validation_line
from smp_train.telemetry.memory_owners import out_of_memory
from smp_train.telemetry.memory_tracker import memory_gib, memory_report
from smp_train.telemetry.profiling import Profiler
from smp_train.telemetry.trackers import NOT_TRACKED, Trackers, chosen

log = get_logger()


def main(resolved: Resolved, ranks: Runtime) -> int:
    """Train as the arguments say and return the exit code; raises `SmpTrainError` for what the user can fix."""
    if prompts_only(resolved.args):
        with distributed.started(ranks, **group_settings(resolved.args)) as device:
            generation.with_flags(resolved.args, device)
        return 0
    train(resolved, ranks)
    return 0


def group_settings(args: Arguments) -> dict[str, Any]:
    """Return how the process group of a run is formed."""
    seconds = 60 * args.distributed_timeout_minutes
    one_queue = not runs_natively(args) and args.tensor_parallel_degree > 1
    return {"distributed_backend": args.distributed_backend, "timeout_seconds": seconds, "one_queue": one_queue}


def train(resolved: Resolved, ranks: Runtime) -> Run:
    """Train, or evaluate, as the arguments say, and return the run, closed; failures are those of `main`."""
    device = distributed.start(ranks, **group_settings(resolved.args))
    with ExitStack() as opened:
        if ranks.world_size == 1:
            opened.callback(distributed.stop)
        run = build_run(resolved, ranks, device, opened)
        opened.pop_all()
    try:
        resume(run)
        with train_utils.garbage_collected_together():
            run.stopped = not validate(run) if run.args.evaluate_only else fit(run)
        finish(run)
    except BaseException as failure:
        no_memory = out_of_memory(
            failure, run.args, ranks, run.model, run.optimizer, device=device, step=run.progress.step + 1,
            folder=run.folder.logs, smp=run.backend.name == "smp",
        )  # fmt: skip
        heartbeat.end()
        run.screen.close()
        run.checkpoints.close()
        run.metrics.close()
        # Destroying the process group waits for the peers, which may never come: the process ends without it.
        if ranks.world_size == 1:
            run.close()
        if no_memory is not None:
            raise no_memory from failure
        raise
    run.close()
    return run


def resume(run: Run) -> None:
    """Continue from the newest committed checkpoint, if the run asks for one and there is one; collective."""
    found = run.found
    if found is None:
        log.info("Starting at step 0")
        track(run)
        return
    with Progress(f"Loading {found.path}, rank 0's part", unit="B", shown=run.runtime.is_main, moved=MOVED):
        load(run, found)
    with distributed.together(f"resuming from {found.path}"):
        consumed = data_position(run, found)
    if run.start.is_own:  # another run's best checkpoint is not among this one's
        run.best = Best.of_meta(found.meta)
    run.spikes.restore(found.meta.get("spikes"), run.train_data.global_batch)
    run.progress = Position(step=found.step, consumed=consumed, tokens=found.meta["tokens"])
    if found.durable:
        run.saved_step, run.saved_path = found.step, found.path
    log.info("Resumed from %s at step %d, %d samples in", found.path, found.step, consumed)
    then, here = (mesh_sizes(mesh) for mesh in (found.meta.get("mesh", {}), run.backend.topology.mesh))
    if then != here and "data" in found.meta:
        log.info(
            "It was saved on another mesh (%s; here %s): weights, moments and the order of samples are the same; "
            "dropout masks differ, because they depend on the rank", then, here,
        )  # fmt: skip
    if (changed := changed_settings(run.args, found)) and not run.args.evaluate_only:
        log.info("From here on with other settings than the checkpoint's: %s", ", ".join(changed))
    track(run)
    run.metrics.event("resume", step=found.step, checkpoint=found.path, consumed=consumed)
    if run.args.checkpoint_type == "full" and not run.args.evaluate_only:
        complete_model(run, found)


def track(run: Run) -> None:
    """Start the trackers that the flags name, on rank 0, at the step the run begins at. Not collective."""
    if run.runtime.is_main:
        step = run.progress.step
        trackers = chosen(run.args, name=run.start.name, id=run.id, folder=run.folder.path, step=step)
        facts = run.folder.read_run()
        config = {**facts.pop("config", {}), **{name: facts[name] for name in facts if name not in NOT_TRACKED}}
        run.metrics.trackers = Trackers(trackers, config) if trackers else None


def data_position(run: Run, found: Checkpoint) -> int:
    """Return how many samples of this run's order are consumed at the checkpoint; not collective."""
    if "data" in found.meta:
        if run.args.evaluate_only and run.args.training_dir is None:  # the data it is of may not be here
            return int(found.meta["data"].get("consumed", 0))
        return run.train_data.check_state(found.meta["data"], allow_data_change=run.args.allow_data_change)
    consumed, by = imported_position(found, run.train_data)
    log.info(
        "Data: begins at sample %d (by %s); this run has its own sample order: within this epoch some rows repeat and "
        "others are skipped", consumed, by,
    )  # fmt: skip
    return consumed


def fit(run: Run) -> bool:
    """Train to the last step or until asked to stop; return whether the run was stopped; collective."""
    args, progress = run.args, run.progress
    over = progress.step >= run.total_steps or run.train_data.exhausted
    if over:
        log.info("Nothing left to do: step %d of %d is done", progress.step, run.total_steps)
    if over or ended_early(run):
        save(run, force=True)  # it may be on the nodes' own disks only
        return False
    distributed.on_main("opening the run again", run.folder.reopen)
    if progress.step == 0:
        run.metrics.event("start", step=0, total_steps=run.total_steps)
    log.info(
        "Training from step %d to %s, %d samples per step; to stop and save: kill -TERM %d, or touch %s",
        progress.step, run.total_steps if run.total_steps < NO_LIMIT else "the end of the data",
        run.train_data.global_batch, os.getpid(), run.folder.stop,
    )  # fmt: skip
    if args.evaluate_first and progress.step == 0 and not validate(run):
        return True
    batches = run.train_data.batches(progress.consumed)
    stopped = ended = False
    profiler = Profiler(args, run.folder.path, run.runtime.rank, run.metrics.event)
    if run.runtime.is_main:
        run.screen.open(progress.step, run.total_steps, bar=args.progress_bar)
    first, compiled = progress.step, run.backend.compiled
    while not (is_last(run) or stopped or ended):
        shown = run.runtime.is_main and progress.step == first
        with (
            profiler.step(progress.step + 1),
            Progress(f"First step{', with compilation' * compiled}", shown=shown),
        ):
            # A request during the last step changes nothing: the run is finished.
            stopped = step(run, batches) and not is_last(run)
        run.screen.step(progress.step)
        train_utils.collect_garbage(progress.step)
        last = stopped or is_last(run)
        better = False
        if not stopped and args.validation_freq and (last or progress.step % args.validation_freq == 0):
            try:
                given_up = not validate(run)
            except DataError:
                save_last(run)
                raise
            stopped = given_up and not is_last(run)
            better = args.keep_best and run.best.step == progress.step
            ended = ended_early(run)
            last = last or stopped or ended
        if last or better or run.checkpoints.due(progress.step):
            save(run, force=last or better)
    batches.close()
    profiler.close()
    run.screen.close()
    return stopped


def ended_early(run: Run) -> bool:
    """Return whether --early_stopping ends the run here, and log it."""
    best, patience = run.best, run.args.early_stopping
    if patience is None or best.since < patience:
        return False
    log.info(
        "The validation loss has not fallen in %d validations since step %s: --early_stopping %d ends the run at step "
        "%d", best.since, best.step, patience, run.progress.step,
    )  # fmt: skip
    return True


def step(run: Run, batches: Generator[list[Batch], None, None]) -> bool:
    """Make one update and log it; return whether any rank was asked to stop; collective."""
    args, progress = run.args, run.progress
    failure: Exception | None = None
    taken = run.train_data.step_samples(progress.consumed)
    heartbeat.enter(heartbeat.DATA, progress.step + 1)
    with run.throughput.data_wait():
        try:
            if run.audit is not None:
                run.audit.check()
            micro_batches = next(batches)
        except Exception as error:
            # The other ranks enter this step's collectives: take part with an empty batch, then stop together.
            failure = error
            micro_batches = [collate([], run.train_data.seq_len, size=args.train_batch_size)]
            micro_batches *= args.gradient_accumulation_steps
    while True:
        heartbeat.enter(heartbeat.VOTE)
        truncated, truncated_targets = (
            sum(getattr(batch, name) for batch in micro_batches) for name in ("truncated", "truncated_targets")
        )
        ballot = train_utils.Ballot(
            tokens=sum(batch.counted_tokens() for batch in micro_batches),
            stop=run.stop.is_requested(look_for_file=run.runtime.is_main),
            failed=failure is not None,
            remaining=not run.train_data.exhausted,
            truncated=truncated,
            truncated_targets=truncated_targets,
        )
        vote = train_utils.Vote(run.backend, ballot)
        skip_update = vote.skip_update
        if run.pending_step is not None:  # if its update is rejected, this step is repeated
            skip_update = skip_update + run.pending_step.result.rejected
        train_utils.seed_for(run.backend, args, progress.step)
        result = train_utils.train_step(
            run.backend, run.model, run.optimizer, micro_batches, tokens=vote.tokens, lr=run.schedule(progress.step),
            max_grad_norm=args.grad_clip, skip_update=skip_update, limits=run.spikes.limits(progress.step + 1),
            reject_exceeded=run.spikes.skips_updates,
        )  # fmt: skip
        heartbeat.enter(heartbeat.OUTCOME)
        total = vote.outcome()
        heartbeat.enter(heartbeat.LOG)
        if not finish_pending_step(run):
            break
    if total.failed:
        save_last(run)
        with distributed.together("reading the training data"):
            if failure is not None:
                raise failure
    run.result = result
    progress.step += 1
    progress.consumed += taken
    progress.tokens += total.tokens
    run.data_ended = not total.remaining
    count_truncated(run, total)
    run.throughput.add(samples=taken, tokens=taken * run.train_data.seq_len)
    if run.audit is not None:
        names = [name for batch in micro_batches for name in batch.samples if name]
        run.audit.step(progress.step, names, truncated=truncated, truncated_targets=truncated_targets)
    # Also before a save: what diverged must not replace good checkpoints.
    now = total.stop > 0 or is_last(run) or run.checkpoints.due(progress.step)
    logged = now or progress.step % args.logging_freq == 0
    if logged and run.times is not None:
        run.times.gather()
    run.pending_step = train_utils.PendingStep(
        progress.step, progress.consumed - taken, progress.consumed, progress.tokens,
        logged, micro_batches, result, result.to_host(),
    )  # fmt: skip
    validates = args.validation_freq and progress.step % args.validation_freq == 0
    if now or validates or run.backend.topology.device.type not in ASYNCHRONOUS_DEVICES:
        finish_pending_step(run)
    return total.stop > 0


def count_truncated(run: Run, total: train_utils.Ballot) -> None:
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
    """Return whether the step just made is the last of the run: by its number, or because its data has ended."""
    return run.progress.step == run.total_steps or run.data_ended


ASYNCHRONOUS_DEVICES = {"cuda"}
"""Device types that run after the host: a step's numbers are read once the next step is queued."""


def finish_pending_step(run: Run) -> bool:
    """Read and log the pending step's numbers, if a step is pending, and respond to a spike; collective.

    Returns whether the step's update is not in the weights, so that the step queued after it must be repeated.
    """
    if run.pending_step is None:
        return False
    heartbeat.enter(heartbeat.LOG)
    pending, run.pending_step = run.pending_step, None
    numbers = train_utils.StepNumbers.read(pending.copy)
    if not numbers.exceeded:
        run.spikes.accept(pending.step, numbers.loss, numbers.grad_norm)
    if pending.logged:
        write_log(run, pending, numbers)
    if not numbers.not_finite and (start := run.spikes.diverges(numbers.loss)) is not None:
        divergence.report_divergence(run, pending.step, numbers.loss, start)
    return numbers.exceeded and divergence.respond(run, pending, numbers)


def write_log(run: Run, pending: train_utils.PendingStep, numbers: train_utils.StepNumbers) -> None:
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
    record = run.metrics.step(record)
    run.losses["loss"] = numbers.loss
    next_save = min(run.checkpoints.next_due(step) or run.total_steps, run.total_steps)
    run.screen.figures(record, next_save=next_save, saving=run.checkpoints.busy())
    if run.checkpoints.poll():
        report_saves(run)
    if run.args.enable_memory_profiling:
        log.info(memory_report(run.backend.topology.device, f"step {step}"))
    notify(run, "on_step", record)


class AskedToStop(Exception):
    """Raised on every rank when a stop request interrupts a validation."""


def give_up_if_asked(run: Run) -> None:
    """Raise `AskedToStop` on every rank where any was asked to stop; collective."""
    if distributed.any_rank(run.stop.is_requested(look_for_file=run.runtime.is_main)):
        raise AskedToStop


def validate(run: Run) -> bool:
    """Measure the loss on the validation data and write it; collective.

    Returns False when any rank was asked to stop meanwhile; the partial result is discarded.
    """
    if run.validation is None:
        raise ConfigError("there is no validation data; give --test_dir")
    heartbeat.enter(heartbeat.VALIDATION)
    try:
        shown = Progress(f"Validation at step {run.progress.step}", len(run.validation), "batches", run.runtime.is_main)
        with run.throughput.pause(), shown:
            loss, _ = train_utils.evaluate(
                run.backend, run.model, shown.over(train_utils.read_together(
                    run.backend, run.validation, "reading the validation data", before=lambda: give_up_if_asked(run)
                )),
            )  # fmt: skip
    except AskedToStop:
        log.info("Asked to stop: the validation at step %d is given up", run.progress.step)
        return False
    log.info(validation_line(run.progress.step, loss))
    record = run.metrics.event("evaluate", step=run.progress.step, loss=loss, perplexity=perplexity(loss))
    run.losses["validation_loss"] = loss
    if run.progress.step > 0:
        run.best.see(run.progress.step, loss)
    notify(run, "on_validation", record)
    return True


def put_prompt(run: Run, prompt: str) -> None:
    """Print what the trained model makes of a prompt; collective."""
    sampling = generation.Sampling(run.args.num_tokens, seed=run.args.seed)
    run.model.eval()
    with ExitStack() as opened:
        tokenizer: Any = None
        with distributed.together("reading the tokenizer"):
            tokenizer = opened.enter_context(tokenizer_from(run.checkpoints.tokenizer))  # rank 0 alone has it
        opened.enter_context(compile.disabled())
        ids = generation.encode(tokenizer, prompt, run.spec.config)
        log.info("The prompt and what follows it:")
        generation.answer(run.model, tokenizer, prompt, ids, sampling)


def finish(run: Run) -> None:
    """Write the final model if asked for, and the marker that tells a launcher how the run ended; collective."""
    at, stopped = run.progress.step, run.stopped
    heartbeat.enter(heartbeat.SAVE)
    best = None if run.args.evaluate_only else best_checkpoint(run)
    if run.args.load_best_model_at_end and best is not None and not stopped:
        load_best(run, best)
    if run.args.save_final_model and not stopped and not run.args.evaluate_only:
        save_final_model(run)
    if run.args.prompt and not stopped:
        put_prompt(run, run.args.prompt)
    with distributed.together("writing the audit"):
        if run.audit is not None:
            run.audit.check()
    mark = run.folder.mark_stopped if stopped else run.folder.mark_done
    distributed.on_main("writing how the run ended", lambda: mark(at))
    run.metrics.event("stop" if stopped else "finish", step=at)
    if stopped:
        how = how_to_resume(run.resolved, run.start, run.runtime)
        log.info("Stopped at step %d of %d on request; %s", at, run.total_steps, how)
    else:
        log.info("Finished: step %d%s", at, ", the data has ended" if run.data_ended else f" of {run.total_steps}")
        if run.truncated:
            log.info(
                "%d rows lost their end, with %d tokens that carry loss (--long truncate)", run.truncated,
                run.truncated_targets,
            )  # fmt: skip
    losses = f"step {run.best.step}, validation loss {run.best.loss:.5f}"
    log.info("%s%s", output(run.args), f"; best: {best} ({losses})" if best else "")
    if stopped and run.runtime.launcher == "torchrun" and (run.stop.reason or "").startswith("SIG"):
        log.info("If torchrun got the signal too, its traceback (SignalException) follows: it is no failure of the run")
