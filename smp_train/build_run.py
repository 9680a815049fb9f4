"""Construction of a run: folder, backend, model, checkpoints and data, all checked before training begins."""

from __future__ import annotations

import functools
import math
import platform
import uuid
from contextlib import ExitStack
from dataclasses import asdict

import torch

import smp_train
from smp_train import arguments, backends, distributed, losses, storage, train_utils
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.program_inputs import ProgramInputs, qualified_name
from smp_train.backends.base import Backend, MetaModel, Topology
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.node_local import check_saver, is_node_local
from smp_train.checkpoints.save import CheckpointManager, Policy
from smp_train.data.loader import Loader
from smp_train.data.open_data import open_data
from smp_train.distributed import Runtime, generation, heartbeat
from smp_train.distributed.host_memory import free_host_bytes
from smp_train.distributed.watch import watch
from smp_train.errors import ConfigError
from smp_train.inference.generation import prompt_ids
from smp_train.learning_rates import Schedule, schedule
from smp_train.models import smp_names, tokenizer
from smp_train.models.flops import count_parameters, flops_per_token
from smp_train.models.hugging_face import ModelSpec
from smp_train.models.resolve import names_model, resolve, row_length
from smp_train.models.state_memory import check_state, in_short
from smp_train.parallel import compile
from smp_train.progress import Progress
from smp_train.run import auto, resizing, resume
from smp_train.run import tokenizer as run_tokenizer
from smp_train.run.resizing import Kept
from smp_train.run.spikes import Spikes
from smp_train.run.start import Start, choose_start
from smp_train.run.start_log import how_to_resume, output_line, shared_folder_warning, start_line
from smp_train.run.state import NO_LIMIT, Run
from smp_train.run.stop import StopRequest
from smp_train.storage.probe import check_writable
from smp_train.telemetry.audit import DataAudit
from smp_train.telemetry.logging_utils import get_logger, setup_logging
from smp_train.telemetry.memory_owners import while_building
from smp_train.telemetry.memory_tracker import MemoryRows
from smp_train.telemetry.metrics import MetricsWriter, Throughput, peak_flops
from smp_train.telemetry.run_folder import RunFolder
from smp_train.telemetry.step_times import StepTimes

log = get_logger()


def build_run(
    resolved: Resolved, ranks: Runtime, device: torch.device, opened: ExitStack, kept: Kept | None = None
) -> Run:
    """Open the run folder and the data, build the model, and return the run; collective.

    ``kept`` is this rank's state if the run is built again. On a failure ``opened`` closes what was opened.
    """
    check_inputs(resolved.inputs)
    resolved, settled = resizing.settled(kept, resolved, ranks)
    if settled is None:
        resolved, start = choose_start(resolved, ranks)
        resolved = resume.with_saved_row_length(resolved, start)
        if ranks.is_main:
            opened.push(start.delete_new_folders)
    else:
        start = settled.start
    folder, metrics = open_run_folder(resolved.args, ranks)
    opened.callback(metrics.close)
    if settled is None:
        resolved, choice = auto.choose(resolved, ranks, device, folder)
    else:
        choice = settled.choice
    args = resolved.args
    # If the run cannot be built again, the next attempt needs the stop request and the claim on the checkpoints.
    lasting = opened if kept is None else ExitStack()
    stop = StopRequest(folder.stop) if kept is None else kept.stop
    lasting.callback(stop.close)
    opened.callback(heartbeat.end)
    if args.telemetry == "full":
        watch(ranks, folder.logs, report_seconds=args.hang_report_seconds, end_seconds=args.train_timeout_seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    log.info(
        "smp-train %s, torch %s, %d x %s on %d node(s), started by %s", smp_train.__version__, torch.__version__,
        ranks.world_size, name, ranks.num_nodes, ranks.launcher,
    )  # fmt: skip
    log.info(output_line(args))
    backend = choose_backend(resolved, ranks, device)
    topology = backend.topology
    if backend.compiled and args.torch_compile_backend == compile.INDUCTOR:
        compile.prepare(folder.path, topology.device)
    audit = open_audit(folder, ranks, topology) if args.data_audit else None
    meta = choose_model(args, backend, start)
    spec, seq_len = meta.spec, meta.seq_len
    if resolved.inputs.loss is not None:
        choose_loss(resolved.inputs.loss, backend, spec)
    if settled is None:
        check_memory(args, backend, spec, ranks)
    checkpoints = open_checkpoints(args, ranks, backend, spec, start, lasting)

    @functools.cache
    def tokenizer_for_text() -> str | None:
        return temporary.enter_context(run_tokenizer.tokenizer_for_text(args, spec, start.newest_readable))

    with ExitStack() as temporary:
        train_data, validation, reads_text = open_data(
            args, vocab_size=spec.config.vocab_size, seq_len=seq_len, ranks=ranks, dp_rank=topology.dp_rank,
            dp_size=topology.dp_size, pin_memory=device.type == "cuda", inputs=resolved.inputs,
            tokenizer=tokenizer_for_text,
        )  # fmt: skip
    if settled is None:
        resumed, start = resume.find_checkpoint(args, spec, start, topology.mesh)
    else:
        resumed = settled.resumed
    with distributed.together("reading the tokenizer"):
        if ranks.is_main:
            checkpoints.tokenizer = run_tokenizer.tokenizer_of_run(args, spec, resumed, reads_text=reads_text)
            use_tokenizer(args, spec, checkpoints.tokenizer, new=resumed is None or names_model(args))
    with distributed.together("looking at the checkpoint folders"):
        if ranks.is_main and settled is None:
            log.info(start_line(args, start, resumed))
            if warning := shared_folder_warning(args, start):
                log.warning("%s", warning)
            if not args.evaluate_only:
                log.info("If this run is interrupted, %s", how_to_resume(resolved, start, ranks))
    total_steps = count_steps(resolved, train_data, resumed)
    if resumed is not None:
        with distributed.together("comparing the models"):
            resume.check_model(args, spec, resumed)
    memory = MemoryRows(device, folder.logs, ranks.rank, on=args.enable_memory_profiling)
    smp = backend.name == "smp"
    shown = ranks.is_main and smp  # the native backend shows its own progress
    with (
        while_building(args, backend.degrees, ranks, device, folder.logs, smp=smp),
        Progress("Building the model", shown=shown),
    ):
        model = backend.build(meta, seed=args.seed, initial=resumed is None and settled is None)
    memory.row("model built")
    if any(map(is_node_local, args.checkpoint_dir)):
        check_saver(backend.saver)
    parameters = count_parameters(spec.config)
    log.info("Model: %s with total parameters: %d (%s)", spec.name, parameters, in_short(parameters))
    if spec.lora is not None:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        log.info("Adapters: %d parameters, %.2f%% of the model's, are trained", trained, 100 * trained / parameters)
    if settled is None:
        log.info(where_weights_are_from(args, backend, spec, resumed))
    optimizer = train_utils.build_optimizer(args, backend, model)
    # A background save copies the state during the next forward and backward pass; the update waits for the copy.
    optimizer.register_step_pre_hook(lambda *_: checkpoints.staged())
    run = Run(
        resolved=resolved, start=start, runtime=ranks, backend=backend, spec=spec, model=model,
        optimizer=optimizer, train_data=train_data, validation=validation,
        schedule=choose_schedule(args, total_steps), total_steps=total_steps, checkpoints=checkpoints, folder=folder,
        metrics=metrics, throughput=open_throughput(ranks, device, spec, seq_len), stop=stop, audit=audit,
        resumed=resumed, inputs=resolved.inputs,
        spikes=Spikes(args.on_spike, args.spike_threshold, args.spike_window),
        times=StepTimes(ranks, device) if args.telemetry == "full" else None, choice=choice,
        id=settled.id if settled is not None else distributed.from_main(run_id(start, resumed)),
        generation=generation.joined(),
    )  # fmt: skip
    distributed.on_main("writing run.json", lambda: write_run(run, parameters))
    memory.row("model and optimizer built")
    return run


def check_inputs(inputs: ProgramInputs) -> None:
    """Raise `ConfigError` if the ranks' programs gave different data, losses or callbacks; collective.

    Their collectives would not match.
    """
    names_by_rank = distributed.gather("comparing what the ranks were given", inputs.names)
    for rank, names in enumerate(names_by_rank):
        if names != names_by_rank[0]:
            mine, first = (" ".join(sorted(each.values())) or "nothing" for each in (names, names_by_rank[0]))
            raise ConfigError(
                f"rank {rank} was given {mine} and rank 0 {first}; give every rank the same, callbacks too, which are "
                "called in rank 0's process alone"
            )


def use_tokenizer(args: Arguments, spec: ModelSpec, files: dict[str, bytes], *, new: bool) -> None:
    """Set the end tokens of a ``new`` model without pretrained weights, and check --prompt; not collective."""
    if spec.pretrained is None and new:
        tokenizer.set_end_tokens(spec.config, files)
    if args.prompt and not files:
        raise ConfigError("--prompt: the run has no tokenizer; give --tokenizer")
    if args.prompt:  # a bad prompt is refused now, not at the end of the run
        with tokenizer.tokenizer_from(files) as opened:
            prompt_ids(opened, args.prompt, spec.config)


def open_throughput(ranks: Runtime, device: torch.device, spec: ModelSpec, seq_len: int) -> Throughput:
    """Return the counter of samples, tokens and FLOPs per second."""
    gpu = device.type == "cuda"
    return Throughput(
        devices=ranks.world_size, flops_per_token=flops_per_token(spec.config, seq_len, frozen=spec.lora is not None),
        peak=peak_flops(torch.cuda.get_device_name(device)) if gpu else None,
        synchronize=torch.cuda.synchronize if gpu else lambda: None,
    )  # fmt: skip


def open_run_folder(args: Arguments, ranks: Runtime) -> tuple[RunFolder, MetricsWriter]:
    """Create the run folder on rank 0, and open the log and the metrics in it; collective."""
    folder = RunFolder(args.run_dir)
    distributed.on_main("opening the run folder", folder.create)
    with distributed.together("opening the log"):
        setup_logging(ranks.rank, log_dir=folder.logs, level="DEBUG" if args.debug else "INFO")
        metrics = MetricsWriter(folder.path, is_main=ranks.is_main)
    return folder, metrics


def choose_backend(resolved: Resolved, ranks: Runtime, device: torch.device) -> Backend:
    """Return the selected backend, and log the reason and the flags without effect on it; collective."""
    with distributed.together("reading --smp_names"):
        smp_names.read_table(resolved.args.smp_names)
    backend, why = backends.select(resolved.args, ranks, device)
    for line in arguments.ineffective(resolved, backend.name):
        log.info(line)
    log.info("Backend: %s (%s); mesh: %s", backend.name, why, mesh_sizes(backend.topology.mesh))
    return backend


def choose_model(args: Arguments, backend: Backend, start: Start) -> MetaModel:
    """Return the model on the meta device, accepted by the backend; collective.

    If no flag names the model, the checkpoint to resume from does.
    """
    with distributed.together("choosing the model"):
        spec = resume.model_to_resume(args, start) or resolve(args)
    return backend.check(spec, seq_len=row_length(args, spec))


def choose_loss(loss: losses.Loss, backend: Backend, spec: ModelSpec) -> None:
    """Let the backend compute a loss of the program's own, if that is a sum over counted tokens; collective."""
    with distributed.together("trying the loss"):
        backend.use_loss(loss)
        topology = backend.topology
        losses.check_sum(loss, spec.config.vocab_size, topology.device, split=topology.cp_size > 1)
    log.info("Loss: %s, from all logits; loss and perplexity in the log are its own", qualified_name(loss))


def check_memory(args: Arguments, backend: Backend, spec: ModelSpec, ranks: Runtime) -> None:
    """Refuse, before allocation, a model whose state exceeds the memory; collective."""
    device, host, on_host = backend.topology.device, ranks.hostname, 0
    if device.type == "cpu" or args.cpu_offload:
        memory, on_host = free_host_bytes(), ranks.local_world_size
        place = f"for the {on_host} process{'es' * (on_host > 1)} of {host}, which has"
    else:
        memory = torch.cuda.get_device_properties(device).total_memory
        place = f"on each GPU, which has on {host}"
    with distributed.together("comparing the model with the memory"):
        warning = check_state(
            args, count_parameters(spec.config), name=spec.name, frozen=args.evaluate_only or spec.lora is not None,
            sharing=backend.degrees.sharing, processes=ranks.world_size, memory=memory, where=place, on_host=on_host,
        )  # fmt: skip
        if warning:
            log.warning("%s", warning)


def open_checkpoints(
    args: Arguments, ranks: Runtime, backend: Backend, spec: ModelSpec, start: Start, opened: ExitStack
) -> CheckpointManager:
    """Check that the run can write its checkpoints and models; collective."""
    per_node = ranks.local_world_size
    checkpoints = CheckpointManager(
        list(map(Policy, args.checkpoint_dir, args.checkpoint_freq, args.num_kept_checkpoints)),
        run_name=start.name, model_type=spec.model_type, owner=start.owner, generation=start.generation,
        asynchronous=(args.checkpoint_type or backend.checkpoint_type) == "async_sharded",
        buddy=per_node if args.recovery == "in_place" and per_node < ranks.world_size else 0,
        keeps_scheduled=args.on_spike == "rollback",
    )  # fmt: skip
    opened.callback(checkpoints.close)
    if not args.evaluate_only:
        checkpoints.check_folders()
    with distributed.together("looking at the model folder"):
        if args.save_final_model and ranks.is_main and args.model_dir is not None:
            check_writable(storage.open_storage(args.model_dir), "model_dir")
    return checkpoints


def open_audit(folder: RunFolder, ranks: Runtime, topology: Topology) -> DataAudit:
    """Open this rank's audit of the data; collective."""
    # Use the maximum over all ranks, since ranks on another file system see fewer attempts.
    attempt = max(distributed.gather("opening the audit", folder.earlier_attempts)) + 1
    with distributed.together("opening the audit"):
        return DataAudit(folder.path, ranks.rank, attempt, topology.dp_rank, topology.dp_size)


def count_steps(resolved: Resolved, training: Loader, resumed: Checkpoint | None) -> int:
    """Return the number of optimizer steps of the whole run, from --epochs or --max_steps, the smaller number.

    The rest of the epochs is counted from the sample at which a resume begins, as earlier steps may have had another
    global batch size.
    """
    args = resolved.args
    if args.epochs is None:
        return args.max_steps
    if training.end is None:  # streams, whose length is unknown before their end
        if args.lr_decay_iters is None and not resolved.given("max_steps"):
            raise ConfigError(
                f"--epochs {args.epochs}: the length of streamed data is unknown before its end; give --max_steps, or "
                "the length of the schedule by --lr_decay_iters"
            )
        return args.max_steps if resolved.given("max_steps") else NO_LIMIT
    done = consumed = 0
    if resumed is not None:
        done = resumed.step
        data = resumed.meta.get("data")
        consumed = resume.imported_position(resumed, training)[0] if data is None else data.get("consumed", 0)
    steps = done + math.ceil(max(0, training.end - consumed) / training.global_batch)
    ends = {"--epochs": steps}
    if args.steps_per_epoch is not None:
        ends["--steps_per_epoch"] = args.epochs * args.steps_per_epoch
    if resolved.given("max_steps") or args.use_synthetic_data:  # synthetic data has no end
        ends["--max_steps"] = args.max_steps
    first = min(ends, key=lambda flag: ends[flag])
    log.info("%d epochs of %s samples take %d steps", args.epochs, training.rows_in_epoch, steps)
    if ends[first] < steps:
        log.info("%s ends the run before, at step %d", first, ends[first])
    return ends[first]


def choose_schedule(args: Arguments, total_steps: int) -> Schedule:
    """Return the learning rate schedule of the run."""
    chosen = schedule(
        args.lr_decay_style, lr=args.lr, min_lr=args.min_lr, max_steps=total_steps, decay_iters=args.lr_decay_iters,
        warmup=args.warmup, plateau=args.plateau,
    )  # fmt: skip
    if chosen.warmup_steps > total_steps:
        log.info("--warmup of %d steps is longer than the run: --lr is not reached", chosen.warmup_steps)
    return chosen


def run_id(start: Start, resumed: Checkpoint | None) -> str:
    """Return the id in the run's own checkpoint, else a fresh one, different on each rank."""
    before = resumed.meta.get("run") if resumed is not None and start.is_own else None
    return str(before["id"]) if isinstance(before, dict) and "id" in before else uuid.uuid4().hex[:8]


def write_run(run: Run, parameters: int) -> None:
    """Write run.json of this start."""
    run.folder.write_run(
        run={"name": run.start.name, "id": run.id}, config=asdict(run.args), sources=run.resolved.sources,
        mesh={"world_size": run.runtime.world_size, **run.backend.topology.mesh}, backend=run.backend.name,
        model=run.spec.name, inputs=run.inputs.names(), parameters=parameters, total_steps=run.total_steps,
        samples=run.train_data.sizes(), streams=getattr(run.train_data, "streams", 0),
        **({"auto": run.choice} if run.choice else {}),
    )  # fmt: skip


def where_weights_are_from(args: Arguments, backend: Backend, spec: ModelSpec, resumed: Checkpoint | None) -> str:
    """Return the log line on the source of the weights."""
    if resumed is not None:
        weights = "Weights" if spec.lora is None else f"Weights read from {spec.pretrained}; adapters"
        return f"{weights} and optimizer: those of {resumed.path}"
    if spec.pretrained is None:
        return f"Initial weights: drawn {backend.draws} seed {args.seed}"
    return f"Initial weights: read from {spec.pretrained}"


def mesh_sizes(mesh: dict[str, int]) -> str:
    """Return the size of each dimension of a mesh, for the log."""
    return " x ".join(f"{name} {size}" for name, size in mesh.items())
