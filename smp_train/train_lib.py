"""The story of a training run: set up, build, resume, loop, finish."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice

import torch

import smp_train
from smp_train import arguments, backends, runtime, train_utils
from smp_train.arguments import Arguments, Resolved
from smp_train.backends.base import Backend, Topology
from smp_train.checkpoints import Checkpoint, CheckpointManager, open_checkpoint, policies
from smp_train.checkpoints.export import check_tokenizer, export, export_weights, tokenizer_beside
from smp_train.checkpoints.model_folder import check_writable
from smp_train.checkpoints.node_local import check_saver, find_newest, is_node_local
from smp_train.checkpoints.record import COMMITTED
from smp_train.checkpoints.storage import open_storage, place_of
from smp_train.data.opening import open_data
from smp_train.data.pipelines.data_pipeline import Batch, Dealing, ValidationData
from smp_train.errors import CheckpointError, ConfigError, DataError, SmpTrainError
from smp_train.learning_rates import Schedule, schedule
from smp_train.models.flops import count_parameters, flops_per_token
from smp_train.models.resolve import CONFIG_FILE, DEFAULT_CONTEXT, ModelSpec, resolve
from smp_train.runtime import Runtime
from smp_train.stop import StopRequest
from smp_train.telemetry.audit import DataAudit
from smp_train.telemetry.logging_utils import batch_line, get_logger, setup_logging, validation_line
from smp_train.telemetry.memory_tracker import memory_gib, memory_report
from smp_train.telemetry.metrics import MetricsWriter, Throughput, peak_flops
from smp_train.telemetry.profiling import Profiler
from smp_train.telemetry.run_folder import RunFolder, versions

log = get_logger()

MODEL_FOLDER = "hf"
"""Within a checkpoint, where --checkpoint_type full writes the model."""
READ_TOGETHER = 16
"""Validation batches that are read before the ranks ask each other whether all could."""


@dataclass
class Progress:
    """How far the run is; with the weights and the optimizer, all that a resume needs."""

    step: int = 0
    consumed: int = 0
    """Samples of the global order that have gone into an update."""
    tokens: int = 0
    """Counted tokens that have gone into an update."""


@dataclass
class Run:
    """Everything a run consists of, put together once by `set_up`."""

    args: Arguments
    runtime: Runtime
    backend: Backend
    spec: ModelSpec
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    train_data: Dealing
    validation: ValidationData | None
    schedule: Schedule
    total_steps: int
    checkpoints: CheckpointManager
    folder: RunFolder
    metrics: MetricsWriter
    throughput: Throughput
    stop: StopRequest
    audit: DataAudit | None
    found: Checkpoint | None
    """What the run resumes from; None for a first start."""
    progress: Progress = field(default_factory=Progress)
    saved_step: int = 0
    """Step of the newest checkpoint that this run wrote or resumed from; there is nothing to save at step 0."""
    saved_path: str | None = None

    def close(self) -> None:
        """Flush and close what was opened, give signals back, and leave the process group."""
        self.metrics.close()
        if self.audit is not None:
            self.audit.close()
        self.stop.close()
        self.checkpoints.close()
        runtime.stop()


def main(resolved: Resolved, ranks: Runtime) -> int:
    """Train as the arguments say and return the exit code; raises `SmpTrainError` for what the user can mend."""
    device = runtime.start(
        ranks,
        distributed_backend=resolved.args.distributed_backend,
        timeout_seconds=60 * resolved.args.distributed_timeout_minutes,
    )
    with ExitStack() as opened:
        run = set_up(resolved, ranks, device, opened)
        opened.pop_all()
    try:
        resume(run)
        stopped = not validate(run) if run.args.evaluate_only else fit(run)
        finish(run, stopped=stopped)
    except BaseException:
        run.checkpoints.close()
        # Leaving the group in order would wait for peers, and the message with it: the process is to end as it is.
        if ranks.world_size == 1:
            run.close()
        raise
    run.close()
    return 0


def set_up(resolved: Resolved, ranks: Runtime, device: torch.device, opened: ExitStack) -> Run:
    """Open the run folder and the data, build the model, and put the run together; collective.

    What others must not find locked when this fails goes to ``opened``.
    """
    args = resolved.args
    folder = RunFolder(args.run_dir)
    with runtime.together("opening the run folder"):
        if ranks.is_main:
            folder.create()
    with runtime.together("opening the log"):
        setup_logging(ranks.rank, log_dir=folder.logs, level="DEBUG" if args.debug else "INFO")
        metrics = MetricsWriter(folder.path, is_main=ranks.is_main, tensorboard_dir=args.tensorboard_dir)
    stop = StopRequest(folder.stop)
    log.info("smp-train %s, torch %s, %s", smp_train.__version__, torch.__version__, describe(ranks, device))
    backend, why = backends.select(args, ranks, device)
    for line in arguments.ineffective(resolved, backend.name):
        log.info(line)
    topology = backend.topology
    log.info("Backend: %s (%s); mesh: %s", backend.name, why, layout(topology.mesh))

    audit = open_audit(folder, ranks, topology) if args.data_audit else None
    with runtime.together("choosing the model"):
        spec = resolve(args)
    seq_len = args.max_context_width or min(
        DEFAULT_CONTEXT, getattr(spec.config, "max_position_embeddings", DEFAULT_CONTEXT)
    )
    backend.check(spec, seq_len=seq_len)
    checkpoints = CheckpointManager(
        policies(args.checkpoint_dir, args.checkpoint_freq, args.num_kept_checkpoints),
        model_type=spec.model_type,
        asynchronous=(args.checkpoint_type or backend.checkpoint_type) == "async_sharded",
    )
    with runtime.together("looking at the checkpoint folders"):
        checkpoints.check_writable()
        if args.save_final_model and ranks.is_main and args.model_dir is not None:
            check_writable(args.model_dir, "model_dir")
        if (args.save_final_model or args.checkpoint_type == "full") and ranks.is_main:
            check_tokenizer(tokenizer_of(args, spec))
    checkpoints.check_shared()
    opened.callback(checkpoints.close)
    if not args.evaluate_only:
        checkpoints.lock(force=args.break_checkpoint_lock)
    train_data, validation = open_data(
        args,
        vocab_size=spec.config.vocab_size,
        seq_len=seq_len,
        ranks=ranks,
        dp_rank=topology.dp_rank,
        dp_size=topology.dp_size,
        pin_memory=device.type == "cuda",
    )
    total_steps = count_steps(args, train_data)

    found = look_for_checkpoint(args, spec.model_type, topology.mesh)
    if found is not None:
        backend.check_checkpoint(found)
    model = backend.build(spec, seed=args.seed, seq_len=seq_len, initial=found is None)
    if any(map(is_node_local, args.checkpoint_dir)):
        check_saver(backend.saver)
    parameters = count_parameters(spec.config)
    log.info("Model: %s with total parameters: %d (%s)", spec.name, parameters, in_short(parameters))
    if found is not None:
        log.info("Weights and optimizer: those of %s", found.path)
    elif spec.pretrained is None:
        log.info("Initial weights: drawn %s seed %d", backend.draws, args.seed)
    else:
        log.info("Initial weights: read from %s", spec.pretrained)
    optimizer = train_utils.build_optimizer(
        model,
        lr=args.lr,
        betas=(args.beta1, args.beta2),
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        decays=backend.decays,
    )
    # A save in the background copies while the next gradients are computed; the update must not overtake it.
    optimizer.register_step_pre_hook(lambda *_: checkpoints.staged())
    run = Run(
        args=args,
        runtime=ranks,
        backend=backend,
        spec=spec,
        model=model,
        optimizer=optimizer,
        train_data=train_data,
        validation=validation,
        schedule=schedule(
            args.lr_decay_style,
            lr=args.lr,
            min_lr=args.min_lr,
            max_steps=total_steps,
            decay_iters=args.lr_decay_iters,
            warmup=args.warmup,
            plateau=args.plateau,
        ),
        total_steps=total_steps,
        checkpoints=checkpoints,
        folder=folder,
        metrics=metrics,
        throughput=Throughput(
            devices=ranks.world_size,
            flops_per_token=flops_per_token(spec.config, seq_len),
            peak=peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None,
            synchronize=torch.cuda.synchronize if device.type == "cuda" else None,
        ),
        stop=stop,
        audit=audit,
        found=found,
    )
    if run.schedule.warmup_steps > total_steps:
        log.info("--warmup of %d steps is longer than the run: --lr is not reached", run.schedule.warmup_steps)
    with runtime.together("writing run.json"):
        if ranks.is_main:
            folder.write_run(
                config=asdict(args),
                sources=resolved.sources,
                mesh={"world_size": ranks.world_size, **topology.mesh},
                backend=backend.name,
                model=spec.name,
                parameters=parameters,
                total_steps=total_steps,
                samples=train_data.sizes(),
            )
    if args.enable_memory_profiling:
        log.info(memory_report(device, "model and optimizer built"))
    return run


def open_audit(folder: RunFolder, ranks: Runtime, topology: Topology) -> DataAudit:
    """Open this rank's audit of the data; collective."""
    with runtime.together("opening the audit"):
        earlier = folder.earlier_attempts()
    # On another file system a rank sees fewer attempts.
    attempt = runtime.largest([earlier])[0] + 1
    with runtime.together("opening the audit"):
        return DataAudit(
            folder.path, ranks.rank, attempt=attempt, dp_rank=topology.dp_rank, dp_size=topology.dp_size
        )


def look_for_checkpoint(args: Arguments, model_type: str, mesh: dict[str, int]) -> Checkpoint | None:
    """Return the newest committed checkpoint, if the run asks for one and there is one; collective."""
    location = args.resume_from_checkpoint
    if location is None:
        return None
    found = find_newest(location, args.checkpoint_dir, model_type=model_type, mesh=mesh, strict=args.strict_resume)
    if found is None:
        log.info("No committed checkpoint in %s yet", location)
    return found


def count_steps(args: Arguments, training: Dealing) -> int:
    """Return the optimizer steps of the whole run: --max_steps, or fewer where --epochs ends first.

    Samples of the last epoch that do not fill a global batch are not trained on; between epochs nothing is left out.
    """
    steps = args.max_steps
    if args.epochs is not None:
        rows = training.rows_in_epoch
        assert rows is not None, "checked by arguments.validate"
        of_epochs = args.epochs * rows // training.global_batch
        if args.steps_per_epoch is not None:
            of_epochs = min(of_epochs, args.epochs * args.steps_per_epoch)
        if of_epochs < 1:
            raise ConfigError(
                f"--epochs {args.epochs} of {rows} samples do not fill one global batch of {training.global_batch}; "
                "lower --train_batch_size or --gradient_accumulation_steps"
            )
        steps = min(steps, of_epochs)
    return steps


def in_short(number: float) -> str:
    """Return a count as people say it: 6.74 B, 124.4 M."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def describe(ranks: Runtime, device: torch.device) -> str:
    """Say in a few words on what this run runs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return f"{ranks.world_size} x {name} on {ranks.num_nodes} node(s), started by {ranks.launcher}"


def layout(mesh: dict[str, int]) -> str:
    """Say how many ranks each dimension of a mesh has."""
    return " x ".join(f"{name} {size}" for name, size in mesh.items())


def resume(run: Run) -> None:
    """Continue from the newest committed checkpoint, if the run asks for one and there is one; collective."""
    found = run.found
    if found is None:
        log.info("Starting at step 0")
        return
    saver = run.backend.saver
    run.backend.load_state(run.model, run.optimizer, lambda state: found.load(state, saver))
    with runtime.together(f"resuming from {found.path}"):
        consumed = run.train_data.check_state(
            found.meta["data"], allow_data_change=run.args.allow_data_change
        )
    run.progress = Progress(step=found.step, consumed=consumed, tokens=found.meta["tokens"])
    if found.durable:
        run.saved_step, run.saved_path = found.step, found.path
    if place_of(run.args.resume_from_checkpoint or "") == found.path:  # this very one, not the newest of a folder
        run.checkpoints.go_back(found)
    log.info("Resumed from %s at step %d, %d samples in", found.path, found.step, consumed)
    then, here = (layout(mesh) for mesh in (found.meta.get("mesh", {}), run.backend.topology.mesh))
    if then != here:
        log.info(
            "It was saved on another mesh (%s; here %s): weights, moments and the order of samples are the same; "
            "dropout is drawn by step and rank, so otherwise than there", then, here,
        )  # fmt: skip
    run.metrics.event("resume", step=found.step, checkpoint=found.path, consumed=consumed)
    if run.args.checkpoint_type == "full" and not run.args.evaluate_only:
        complete_models(run, os.path.basename(found.path))


def complete_models(run: Run, name: str) -> None:
    """Write the models that a run which was cut short left out beside its checkpoint ``name``; collective."""
    for folder in run.args.checkpoint_dir:
        if is_node_local(folder):
            continue
        lacking = False
        with runtime.together(f"looking into {folder}"):
            if run.runtime.is_main:
                storage = open_storage(folder)
                lacking = storage.has(name, COMMITTED) and not storage.has(name, f"{MODEL_FOLDER}/{CONFIG_FILE}")
        if runtime.any_rank(lacking):
            path = os.path.join(place_of(folder), name)
            write_model(run, path, os.path.join(path, MODEL_FOLDER))


def fit(run: Run) -> bool:
    """Train to the last step, or until asked to stop; return whether it was the latter; collective."""
    args, progress = run.args, run.progress
    if progress.step >= run.total_steps:
        log.info("Nothing left to do: step %d of %d is done", progress.step, run.total_steps)
        save(run, force=True)  # if that is known to the nodes' own disks alone
        return False
    if run.runtime.is_main:
        run.folder.reopen()
    if progress.step == 0:
        run.metrics.event("start", step=0, total_steps=run.total_steps)
    log.info(
        "Training from step %d to %d, %d samples per step; to stop and save: kill -TERM %d, or touch %s",
        progress.step, run.total_steps, run.train_data.global_batch, os.getpid(), run.folder.stop,
    )  # fmt: skip
    batches = run.train_data.batches(progress.consumed)
    stopped = False
    profiler = Profiler(args, run.folder.path, run.runtime.rank)
    while progress.step < run.total_steps and not stopped:
        with profiler.step(progress.step + 1):
            # Asked to stop in the last step: there is nothing to stop any more.
            stopped = step(run, batches) and progress.step < run.total_steps
        last = stopped or progress.step == run.total_steps
        if not stopped and args.validation_freq and (last or progress.step % args.validation_freq == 0):
            given_up = not validate(run)
            stopped = given_up and progress.step < run.total_steps
            last = last or stopped
        if last or run.checkpoints.due(progress.step):
            save(run, force=last)
    batches.close()
    profiler.close()
    return stopped


def step(run: Run, batches: Generator[list[Batch], None, None]) -> bool:
    """Make one update and log it; return whether any rank was asked to stop; collective."""
    args, progress, topology = run.args, run.progress, run.backend.topology
    failure: Exception | None = None
    with run.throughput.data_wait():
        try:
            micro_batches = next(batches)
            for batch in micro_batches:
                run.backend.check_rows(batch.attention_mask, batch.samples)
        except Exception as error:
            # The others are about to enter this step's collectives: take part with nothing, then stop together.
            failure = error
            micro_batches = [Batch.blank(args.train_batch_size, run.train_data.seq_len)]
            micro_batches *= args.gradient_accumulation_steps
    vote = train_utils.Vote(
        run.backend,
        tokens=sum(batch.counted_tokens() for batch in micro_batches),
        stop=run.stop.is_requested(look_for_file=run.runtime.is_main),
        failed=failure is not None,
    )
    # Tensor peers draw alike, as they work on the same tokens; context peers do not.
    stream = topology.dp_rank * topology.cp_size + topology.cp_rank
    train_utils.seed_step(args.seed, progress.step, 0 if args.same_seed else stream)
    result = train_utils.train_step(
        run.backend,
        run.model,
        run.optimizer,
        micro_batches,
        tokens=vote.tokens,
        lr=run.schedule(progress.step),
        max_grad_norm=args.grad_clip,
    )
    tokens, stopped, failed = vote.outcome()
    if failed:
        end_saves(run)
        with runtime.together("reading the training data"):
            if failure is not None:
                raise failure
    if tokens == 0:
        end_saves(run)
        samples = f"samples {progress.consumed} to {progress.consumed + run.train_data.global_batch - 1}"
        raise DataError(f"step {progress.step + 1}: {samples} have no counted token; is --max_context_width too short?")
    progress.step += 1
    progress.consumed += run.train_data.global_batch
    progress.tokens += tokens
    run.throughput.add(samples=run.train_data.global_batch, tokens=run.train_data.global_batch * run.train_data.seq_len)
    if run.audit is not None:
        run.audit.step(progress.step, [name for batch in micro_batches for name in batch.samples])
    last = stopped or progress.step == run.total_steps
    # Before a save too: weights that are not numbers must not push good ones out.
    if last or progress.step % args.logging_freq == 0 or run.checkpoints.due(progress.step):
        log_step(run, result)
    return stopped


def log_step(run: Run, result: train_utils.StepResult) -> None:
    """Bring the step's numbers to the host, write them, and refuse to go on from a loss that is not a number."""
    progress = run.progress
    loss = run.backend.sum_over_data(result.loss.clone()).item()
    grad_norm = result.grad_norm.item()
    record = {
        "step": progress.step,
        "loss": loss,
        "grad_norm": grad_norm,
        "lr": run.schedule(progress.step - 1),
        **run.throughput.window(),
        "memory_gib": memory_gib(run.backend.topology.device),
        "tokens": progress.tokens,
        "consumed": progress.consumed,
    }
    log.info(batch_line(record))
    run.metrics.step(record)
    if run.checkpoints.poll():
        report_saves(run)
    if run.args.enable_memory_profiling:
        log.info(memory_report(run.backend.topology.device, f"step {progress.step}"))
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        end_saves(run)
        raise SmpTrainError(
            f"step {progress.step}: the loss is {loss} and the gradient norm {grad_norm}; nothing was saved of it. "
            "Resume from the last checkpoint with a lower --lr or --grad_clip, and look at the data of this step"
        )


class AskedToStop(Exception):
    """Raised on every rank alike, out of a validation that a stop cuts short."""


def validate(run: Run) -> bool:
    """Measure the loss on the validation data and write it; collective.

    Returns False when any rank was asked to stop meanwhile: what was measured by then is given up.
    """
    if run.validation is None:
        raise ConfigError("there is no validation data; give --test_dir")
    try:
        with run.throughput.pause():
            loss = train_utils.evaluate(run.backend, run.model, read_together(run, run.validation))
    except AskedToStop:
        log.info("Asked to stop: the validation at step %d is given up", run.progress.step)
        return False
    log.info(validation_line(run.progress.step, loss))
    run.metrics.event("evaluate", step=run.progress.step, loss=loss)
    return True


def read_together(run: Run, data: ValidationData) -> Iterator[Batch]:
    """Yield the batches, read a few at a time so that all ranks learn of a failure or a stop before they go on."""
    batches = data.batches()
    for _ in range(0, len(data), READ_TOGETHER):
        if runtime.any_rank(run.stop.is_requested(look_for_file=run.runtime.is_main)):
            raise AskedToStop
        with runtime.together("reading the validation data"):
            some = list(islice(batches, READ_TOGETHER))
            for batch in some:
                run.backend.check_rows(batch.attention_mask, batch.samples)
        yield from some


def save(run: Run, *, force: bool) -> None:
    """Write a checkpoint of this step and commit it, unless it is there already; collective."""
    progress = run.progress
    if run.saved_step == progress.step:
        return
    meta = {
        "tokens": progress.tokens,
        "lr": run.schedule(progress.step - 1),
        "data": run.train_data.state(progress.consumed),
        "model_config": run.spec.config.to_dict(),
        "arguments": asdict(run.args),
        "mesh": run.backend.topology.mesh,
        "versions": versions(),
    }
    report_saves(run)
    with run.throughput.pause():
        state = run.backend.state_dict(run.model, run.optimizer)
        run.checkpoints.save(progress.step, state, meta, force=force, saver=run.backend.saver)
        run.saved_step = progress.step
        if force or not run.checkpoints.asynchronous:
            report_saves(run)


def report_saves(run: Run) -> None:
    """Wait for the save that is being written, if there is one, and tell what has been committed; collective."""
    for saved in run.checkpoints.finish():
        if saved.durable:
            run.saved_path = saved.path
        log.info("Saved %s in %.1f s", saved.path, saved.seconds)
        run.metrics.event("save", step=saved.step, checkpoint=saved.path, seconds=saved.seconds)
        if saved.durable and run.args.checkpoint_type == "full":
            write_model(run, saved.path, os.path.join(saved.path, MODEL_FOLDER))


def end_saves(run: Run) -> None:
    """Let a save that is under way come to its end, as the run is about to fail of something else; collective."""
    try:
        report_saves(run)
    except CheckpointError as failure:
        log.warning("%s", failure)


def finish(run: Run, *, stopped: bool) -> None:
    """Leave the marker that tells a launcher how the run ended."""
    at = run.progress.step
    if run.args.save_final_model and not stopped and not run.args.evaluate_only:
        save_final_model(run)
    if run.runtime.is_main:
        if stopped:
            run.folder.mark_stopped(at)
        else:
            run.folder.mark_done(at)
    run.metrics.event("stop" if stopped else "finish", step=at)
    if stopped:
        how = "run the same command again to go on"
        if run.args.resume_from_checkpoint is None:
            durable = next(folder for folder in run.args.checkpoint_dir if not is_node_local(folder))
            how += f" with --resume_from_checkpoint {durable}"
        log.info("Stopped at step %d of %d on request; %s", at, run.total_steps, how)
    else:
        log.info("Finished: step %d of %d", at, run.total_steps)


def save_final_model(run: Run) -> None:
    """Write the model of the last checkpoint, which is the final one, as Hugging Face has it; collective."""
    assert run.args.model_dir is not None, "checked by arguments.validate"
    write_model(run, run.saved_path, run.args.model_dir)


def write_model(run: Run, checkpoint: str | None, folder: str) -> None:
    """Write the model of a checkpoint as a Hugging Face folder; collective.

    Rank 0 writes, one tensor at a time, and the others wait: the folder may be its node's own. Where checkpoints have
    other names, it writes what the backend gathers.
    """
    weights = run.backend.full_weights(run.model)
    with runtime.together(f"writing the model to {folder}"):
        if run.runtime.is_main and checkpoint is not None:
            began = time.perf_counter()
            tokenizer = tokenizer_of(run.args, run.spec)
            if weights is None:
                export(open_checkpoint(checkpoint), folder, tokenizer=tokenizer, like=run.spec.pretrained, replace=True)
            else:
                export_weights(
                    weights, run.spec.config, folder, tokenizer=tokenizer, like=run.spec.pretrained, replace=True
                )
            log.info("Wrote the model to %s in %.1f s", folder, time.perf_counter() - began)


def tokenizer_of(args: Arguments, spec: ModelSpec) -> str | None:
    """Return the tokenizer that goes with the models which the run writes: a folder, a name, or none."""
    return args.tokenizer or tokenizer_beside(spec.pretrained)
