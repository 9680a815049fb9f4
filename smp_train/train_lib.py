"""A training run from start to end: build, resume, fit, finish."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import transformers.modeling_utils  # noqa: F401  every run needs it: imported here, no garbage is looked for meanwhile

from smp_train import distributed, train_utils
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.validation import prompts_only, runs_natively
from smp_train.build_run import build_run, mesh_sizes
from smp_train.distributed import Runtime, agree, heartbeat
from smp_train.errors import DataError
from smp_train.inference import generation
from smp_train.progress import MOVED, Progress
from smp_train.run import recovery, resizing
from smp_train.run.resizing import Kept
from smp_train.run.resume import changed_settings, set_position
from smp_train.run.saving import best_checkpoint, complete_model, load, load_best, save, save_final_model, save_last
from smp_train.run.start_log import how_to_resume, output_line
from smp_train.run.state import NO_LIMIT, Run
from smp_train.run.step import is_last, step
from smp_train.run.validation import validate
from smp_train.telemetry import goodput
from smp_train.telemetry.logging_utils import get_logger
from smp_train.telemetry.memory_owners import out_of_memory
from smp_train.telemetry.profiling import Profiler
from smp_train.telemetry.trackers import NOT_TRACKED, Trackers, chosen

log = get_logger()


def main(resolved: Resolved, ranks: Runtime) -> int:
    """Run ``smp-train train`` and return the exit code. Raises `SmpTrainError` for a failure that the user can fix."""
    if prompts_only(resolved.args):
        with distributed.started(ranks, **group_settings(resolved.args)) as device:
            generation.generate_with_flags(resolved.args, device)
        return 0
    train(resolved, ranks)
    return 0


def group_settings(args: Arguments) -> dict[str, Any]:
    """Return the settings with which a run's process group is formed."""
    seconds = 60 * args.distributed_timeout_minutes
    one_queue = not runs_natively(args) and args.tensor_parallel_degree > 1
    return {"distributed_backend": args.distributed_backend, "timeout_seconds": seconds, "one_queue": one_queue}


def train(resolved: Resolved, ranks: Runtime) -> Run:
    """Train, or evaluate with --evaluate_only, and return the closed run. Raises `SmpTrainError`, as `main`."""
    kept: Kept | None = None
    while True:
        run = start(resolved, ranks, kept)
        try:
            if run.generation > 1:
                join(run, kept)
            else:
                resume(run)
            with train_utils.garbage_collected_together():
                if run.args.evaluate_only:
                    run.stopped = not validate(run)
                else:
                    fit(run)
            if run.callback_failure is not None:
                if not run.args.evaluate_only:
                    save_last(run)
                raise run.callback_failure
            finish(run)
        except recovery.Resized:
            kept = resizing.keep(run)
        except BaseException as failure:
            no_memory = out_of_memory(
                failure, run.args, run.backend.degrees, ranks, run.model, run.optimizer,
                device=run.backend.topology.device, step=run.progress.step + 1, folder=run.folder.logs,
                smp=run.backend.name == "smp",
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
        else:
            run.close()
            return run
        del run
        resizing.free_memory()


def start(resolved: Resolved, ranks: Runtime, kept: Kept | None = None) -> Run:
    """Form the process group and build the run; collective. A process begins again if another rank dies meanwhile.

    Such a process is a replacement, or one that has ``kept`` its state.
    """
    recovery.check(resolved.args, ranks)
    while True:
        try:
            if kept is not None and kept.has_met:
                device, kept.has_met = kept.device, False
            else:
                device = distributed.start(ranks, **group_settings(resolved.args))
                resizing.compare(kept)
            ranks = distributed.renumbered(ranks)
            recovery.begin_transcript()
            with ExitStack() as opened:
                if ranks.world_size == 1:
                    opened.callback(distributed.stop)
                run = build_run(resolved, ranks, device, opened, kept)
                opened.pop_all()
                return run
        except Exception as failure:
            if not ((recovery.replaces() or kept is not None) and recovery.interrupts(failure)):
                raise
            distributed.stop()
        agree.replay(None)
        resizing.free_memory()


def join(run: Run, kept: Kept | None) -> None:
    """Bring a run that was not built at the first start to the position of its peers; collective."""
    if run.resumed is not None and "data" in run.resumed.meta:
        run.train_data.restore_state(run.resumed.meta["data"], allow_data_change=True)
    resizing.restore(run, kept)
    recovery.join(run)
    track(run)


def resume(run: Run) -> None:
    """Load the checkpoint that `build_run` found, if any, and set the run's position; collective."""
    checkpoint = run.resumed
    if checkpoint is None:
        log.info("Starting at step 0")
        track(run)
        return
    with Progress(f"Loading {checkpoint.path}, rank 0's part", unit="B", shown=run.runtime.is_main, moved=MOVED):
        load(run, checkpoint)
    set_position(run, checkpoint)
    log.info("Resumed from %s at step %d, %d samples in", checkpoint.path, checkpoint.step, run.progress.consumed)
    saved_mesh, mesh = (mesh_sizes(mesh) for mesh in (checkpoint.meta.get("mesh", {}), run.backend.topology.mesh))
    if saved_mesh != mesh and "data" in checkpoint.meta:
        log.info(
            "It was saved on another mesh (%s; here %s): weights, moments and the order of samples are the same; "
            "dropout masks differ, because they depend on the rank", saved_mesh, mesh,
        )  # fmt: skip
    if (changed := changed_settings(run.args, checkpoint)) and not run.args.evaluate_only:
        log.info("From here on with other settings than the checkpoint's: %s", ", ".join(changed))
    track(run)
    run.metrics.event("resume", step=checkpoint.step, checkpoint=checkpoint.path, consumed=run.progress.consumed)
    if run.args.checkpoint_type == "full" and not run.args.evaluate_only:
        complete_model(run, checkpoint)


def track(run: Run) -> None:
    """Start the trackers that the flags name, on rank 0, at the step the run begins at. Not collective."""
    if run.runtime.is_main:
        step = run.progress.step
        trackers = chosen(run.args, name=run.start.name, id=run.id, folder=run.folder.path, step=step)
        facts = run.folder.read_run()
        config = {**facts.pop("config", {}), **{name: facts[name] for name in facts if name not in NOT_TRACKED}}
        run.metrics.trackers = Trackers(trackers, config) if trackers else None


def fit(run: Run) -> None:
    """Train to the last step, or until asked to stop (``run.stopped``); collective."""
    if run.generation <= 1 and not begin(run):
        return
    run.read_from_here()
    profiler = Profiler(run.args, run.folder.path, run.runtime.rank, run.metrics.event)
    if run.runtime.is_main:
        run.screen.open(run.progress.step, run.total_steps, bar=run.args.progress_bar)
    first_step = run.progress.step + 1
    while True:
        shown = run.runtime.is_main and run.progress.step + 1 == first_step
        try:
            if not run.unfinished:
                if run.stopped or is_over(run):
                    recovery.end_training(run)
                    break
                with (
                    profiler.step(run.progress.step + 1),
                    Progress(f"First step{', with compilation' * run.backend.compiled}", shown=shown),
                ):
                    # A request during the last step changes nothing: the run is finished.
                    run.stopped = step(run) and not is_last(run)
                run.screen.step(run.progress.step)
                train_utils.collect_garbage(run.progress.step)
            finish_step(run)
        except (Exception, recovery.LeaveStep) as failure:
            if not recovery.interrupts(failure):
                raise
            recovery.recover(run)
    run.batches.close()
    profiler.close()
    run.screen.close()


def begin(run: Run) -> bool:
    """Prepare the first step after a start; return whether there is one; collective."""
    progress = run.progress
    run.data_ended = run.train_data.exhausted
    if is_over(run):
        log.info("Nothing left to do: step %d of %d is done", progress.step, run.total_steps)
        save(run, force=True)  # the step may be saved on the nodes' own disks only
        return False
    distributed.on_main("opening the run again", run.folder.reopen)
    if progress.step == 0:
        run.metrics.event("start", step=0, total_steps=run.total_steps)
    log.info(
        "Training from step %d to %s, %d samples per step; to stop and save: kill -TERM %d, or touch %s",
        progress.step, run.total_steps if run.total_steps < NO_LIMIT else "the end of the data",
        run.train_data.global_batch, os.getpid(), run.folder.stop,
    )  # fmt: skip
    run.stopped = bool(run.args.evaluate_first and progress.step == 0 and not validate(run))
    if not run.stopped:
        recovery.begin_training(run)
    return not run.stopped


def finish_step(run: Run) -> None:
    """Validate and save, if that is due after the step just made; collective."""
    args, progress = run.args, run.progress
    if not run.stopped and validation_is_due(run) and run.validated < progress.step:
        try:
            run.stopped = not validate(run) and not is_last(run)
        except DataError:
            save_last(run)
            raise
    better = args.keep_best and run.validated == run.best.step == progress.step
    force = run.stopped or is_over(run) or better
    if force or run.checkpoints.due(progress.step):
        save(run, force=force)
    run.unfinished = False


def validation_is_due(run: Run) -> bool:
    """Return whether to validate after the step just made: every --validation_freq steps, and after the last one."""
    every = run.args.validation_freq
    if every is None or run.callback_failure is not None:
        return False
    return is_last(run) or run.progress.step % every == 0


def is_over(run: Run) -> bool:
    """Return whether no step follows: all are done, a callback has failed, or --early_stopping ends the run."""
    return is_last(run) or run.callback_failure is not None or ends_early(run)


def ends_early(run: Run) -> bool:
    """Return whether the validation loss has not fallen in --early_stopping validations."""
    return run.args.early_stopping is not None and run.best.since >= run.args.early_stopping


def finish(run: Run) -> None:
    """Write the final model if asked for, and the marker DONE or STOPPED, which launchers read; collective."""
    last_step, stopped = run.progress.step, run.stopped
    heartbeat.enter(heartbeat.SAVE)
    best = None if run.args.evaluate_only else best_checkpoint(run)
    if run.args.load_best_model_at_end and best is not None and not stopped:
        load_best(run, best)
    if run.args.save_final_model and not stopped and not run.args.evaluate_only:
        save_final_model(run)
    if run.args.prompt and not stopped:
        generation.continue_with_trained_model(
            run.model, run.checkpoints.tokenizer, run.args.prompt, run.spec.config,
            generation.Sampling(run.args.num_tokens, seed=run.args.seed),
        )  # fmt: skip
    with distributed.together("writing the audit"):
        if run.audit is not None:
            run.audit.check()
    mark = run.folder.mark_stopped if stopped else run.folder.mark_done
    distributed.on_main("writing how the run ended", lambda: mark(last_step))
    ended = run.metrics.event("stop" if stopped else "finish", step=last_step)
    if stopped:
        how = how_to_resume(run.resolved, run.start, run.runtime)
        log.info("Stopped at step %d of %d on request; %s", last_step, run.total_steps, how)
    else:
        if ends_early(run):
            log.info(
                "The validation loss has not fallen in %d validations since step %s: --early_stopping %d ends the run "
                "at step %d", run.best.since, run.best.step, run.args.early_stopping, last_step,
            )  # fmt: skip
        end = ", the data has ended" if run.data_ended else f" of {run.total_steps}"
        log.info("Finished: step %d%s", last_step, end)
        if run.truncated:
            log.info(
                "%d rows lost their end, with %d tokens that carry loss (--long truncate)", run.truncated,
                run.truncated_targets,
            )  # fmt: skip
    if "goodput" in ended:
        log.info("Goodput: %s", goodput.in_words(ended))
    losses = f"step {run.best.step}, validation loss {run.best.loss:.5f}"
    log.info("%s%s", output_line(run.args), f"; best: {best} ({losses})" if best else "")
    if stopped and run.runtime.launcher == "torchrun" and (run.stop.reason or "").startswith("SIG"):
        log.info("If torchrun got the signal too, its traceback (SignalException) follows: it is no failure of the run")
