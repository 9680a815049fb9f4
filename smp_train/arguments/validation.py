"""Refusal, before anything starts, of settings that cannot work alone or together."""

from __future__ import annotations

import os
from collections.abc import Iterator

from smp_train.arguments import checkpointing
from smp_train.arguments.flag import RULES, show
from smp_train.arguments.groups import Arguments, flags
from smp_train.arguments.parse import Resolved
from smp_train.arguments.program_inputs import ProgramInputs
from smp_train.arguments.run_name import CHECKPOINT_NAME, is_run_name
from smp_train.arguments.sources import is_streamed, may_be_held_out, training_sources
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.distributed import smp_installed
from smp_train.distributed.degrees import plan
from smp_train.errors import ConfigError

CACHE_FLAGS = ("data_num_workers", "data_cache_dir")
"""Flags of the conversion to a token cache."""
DATA_FLAGS = (
    "training_dir", "dataset", "streaming", "test_dir", "zipped_data", *CACHE_FLAGS, "bad_rows", "long", "short",
)  # fmt: skip
"""Flags for data that is read, which have no effect on synthetic data."""
VALIDATION_FLAGS = ("test_dir", "validation_batches", "val_batch_size", "fast_validation")
EXCLUSIVE = (
    ("choose the model", "hf_pretrained_model_name_or_dir", "from_scratch"),
    ("choose the model", "hf_pretrained_model_name_or_dir", "model_size"),
    ("choose the model", "hf_pretrained_model_name_or_dir", "pretrained_model_name"),
    ("choose the weights", "pretrained_checkpoint_file", "finetune_checkpoint_load_dir"),
    ("name the training data", "training_dir", "training_data"),
    ("name the training data", "dataset", "training_data"),
    ("name the training data", "use_synthetic_data", "training_data"),
    ("name the validation data", "test_dir", "validation_data"),
)
"""Pairs of flags, or of a flag and a program's input, that set the same thing."""


def validate(
    args: Arguments, world_size: int, local_world_size: int | None = None, inputs: ProgramInputs | None = None
) -> None:
    """Raise `ConfigError`, in one line with the remedy, for settings that cannot work on ``world_size`` processes.

    ``local_world_size`` is the number of processes per node, by default all. ``inputs`` are a Python program's.
    """
    inputs = inputs or ProgramInputs()
    inputs.check()
    natively = runs_natively(args)
    if args.auto != "off" and not (natively or args.evaluate_only):
        raise ConfigError(f"--auto {args.auto} plans the native backend; give --backend native, or leave it out")
    check_flags(args, inputs, natively=natively)
    plan(args, world_size, local_world_size or world_size, smp=not natively)
    _refuse(_checkpoints(args))
    if not prompts_only(args):
        _refuse(_data(args, inputs))


def runs_natively(args: Arguments) -> bool:
    """Return whether the native backend will run: the user chose it, or this torch has no SMP."""
    return args.backend == "native" or (args.backend == "auto" and not smp_installed())


def prompts_only(args: Arguments) -> bool:
    """Return whether the run only continues a prompt with a checkpoint, without training or validation."""
    return bool(args.evaluate_only and args.prompt and not args.test_dir)


def check_flags(args: Arguments, inputs: ProgramInputs | None = None, *, natively: bool) -> None:
    """Raise `ConfigError` for values that no run accepts, and for flags that contradict each other."""
    _check_values(args)
    if natively:
        refuse_natively(args)
    settings = vars(args) | vars(inputs or ProgramInputs())
    for task, first, second in EXCLUSIVE:
        if settings[first] and settings[second] is not None and settings[second] is not False:
            name = f"--{second}" if second in flags() else second
            raise ConfigError(f"--{first} and {name} both {task}; give one of them")
    _refuse(_model(args))
    _refuse(_computation(args))
    _refuse(_layout(args))


def refuse_natively(args: Arguments) -> None:
    """Raise `ConfigError` for settings that only SMP supports."""
    for name, flag in flags().items():
        values, reason = flag.only_natively or ((), "")
        idle = flag.idle_without and not getattr(args, flag.idle_without)
        if values and getattr(args, name) not in values and not idle:
            raise ConfigError(f"--{name} {show(getattr(args, name))}: {reason}")
    if args.fp8 and args.tensor_parallel_degree > 1:
        raise ConfigError("--fp8 1 with --tensor_parallel_degree above 1 is not available; give one of them")


def _check_values(args: Arguments) -> None:
    """Raise `ConfigError` for a value that its flag does not allow."""
    for flag in flags().values():
        value = getattr(args, flag.name)
        if value and flag.needs and not getattr(args, flag.needs):
            raise ConfigError(f"--{flag.name} {show(value)} needs {_turned_on(flag.needs)}")
        complaint, accepts = RULES.get(flag.must, ("", None))
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            if accepts is not None and not accepts(item):
                raise ConfigError(f"--{flag.name} {show(item)}: {complaint}")


def _refuse(problems: Iterator[str]) -> None:
    for problem in problems:
        raise ConfigError(problem)


def _turned_on(name: str) -> str:
    return f"--{name} 1" if flags()[name].switch else f"--{name}"


def _model(args: Arguments) -> Iterator[str]:
    shard = args.hybrid_shard_degree or 1
    if args.sharding_strategy == "no_shard" and shard > 1:
        yield f"--sharding_strategy no_shard and --hybrid_shard_degree {shard} contradict each other; give one of them"
    model = args.pretrained_model_name or args.hf_pretrained_model_name_or_dir
    if args.finetune and not (model or args.pretrained_checkpoint_file):
        yield (
            "--finetune 1 needs weights: give --pretrained_model_name (with --finetune_checkpoint_load_dir if they are "
            "elsewhere) or --pretrained_checkpoint_file"
        )
    if args.finetune_checkpoint_load_dir and not model:
        yield "--finetune_checkpoint_load_dir needs --pretrained_model_name, to know the model's shape"


def _computation(args: Arguments) -> Iterator[str]:
    for name, value in (("fp8", args.fp8), ("attn_implementation", args.attn_implementation.startswith("flash"))):
        if value and args.bf16 is False:
            yield f"--{name} {show(getattr(args, name))} does not compute in float32; give --bf16 1"
    setting, selective = args.activation_checkpointing, args.selective_checkpointing
    share, per_operation = checkpointing.read(setting)
    if selective != 1 and share and (share, per_operation) != checkpointing.read(checkpointing.of_layers(selective)):
        yield (
            f"--activation_checkpointing {setting} and --selective_checkpointing {show(selective)} contradict each "
            "other; give one of them"
        )
    if args.use_profiler and args.recovery != "off":
        yield (
            f"--use_profiler 1 does not go with --recovery {args.recovery}: the ranks end a profile together, and a "
            "replaced rank has none; give one of them"
        )
    if args.short == "pack" and args.context_parallel_degree > 1:
        yield (
            f"--short pack does not go with --context_parallel_degree {args.context_parallel_degree}: packed documents "
            "are not split over ranks; use --short concat"
        )
    if args.min_lr > args.lr and args.lr_decay_style != "constant":
        yield f"--min_lr {show(args.min_lr)} is above --lr {show(args.lr)}; give a lower --min_lr"
    if args.warmup < 1 and args.warmup + args.plateau > 1:
        fractions = f"--warmup {show(args.warmup)} and --plateau {show(args.plateau)}"
        yield f"{fractions} are fractions of one run: together at most 1"


def _checkpoints(args: Arguments) -> Iterator[str]:
    if args.run_name and (not is_run_name(args.run_name) or CHECKPOINT_NAME.fullmatch(args.run_name)):
        yield f"--run_name {args.run_name!r}: is the name of a checkpoint, or cannot be a folder's; give another"
    folders, resume = args.checkpoint_dir, args.resume_from_checkpoint or ""
    for name in ("checkpoint_freq", "num_kept_checkpoints"):
        policies = len(getattr(args, name))
        if policies != len(folders):
            yield f"--checkpoint_dir and --{name} have {len(folders)} and {policies} values; give one value per folder"
    if len({*map(_real_path, folders)}) != len(folders):
        yield "--checkpoint_dir names one folder twice; give each policy a folder of its own"
    if all(folder.startswith(NODE_LOCAL) for folder in folders):
        yield f"--checkpoint_dir {folders[0]} is lost with its node; add a folder that all nodes share, or s3://"
    if resume.startswith(NODE_LOCAL):
        yield (
            f"--resume_from_checkpoint {resume}: give the folder that all nodes share; the local: folders of "
            "--checkpoint_dir are searched, too"
        )
    if resume.lower() in ("true", "1", "false", "0"):
        yield (
            f"--resume_from_checkpoint {resume}: give the folder to resume from, here {folders[0]}; leave it out to "
            "begin anew"
        )
    if args.save_final_model and not args.model_dir:
        yield "--save_final_model 1 needs --model_dir (or SM_MODEL_DIR), the folder to write it to"
    for path in _starting_weights(args) if args.save_final_model else []:
        if _real_path(path) == _real_path(args.model_dir or ""):
            yield (
                f"--model_dir {args.model_dir} holds the weights that the run starts from ({path}), which would be "
                "replaced; give another folder"
            )


def _starting_weights(args: Arguments) -> list[str]:
    """Return the possible locations of the weights that the run starts from."""
    folder, name = args.finetune_checkpoint_load_dir, args.pretrained_model_name
    file = args.pretrained_checkpoint_file
    paths = [args.hf_pretrained_model_name_or_dir, name, folder, file]
    if folder and name:
        paths.append(os.path.join(folder, name))
    if file and (file.endswith((".safetensors", ".bin", ".pt", ".pth")) or os.path.isfile(file)):
        paths.append(os.path.dirname(file))
    return [path for path in paths if path is not None]


def _real_path(path: str) -> str:
    """Return a path in a form that is equal for two names of one folder."""
    return path.rstrip("/") if path.startswith("s3://") else os.path.realpath(os.path.expanduser(path))


def _layout(args: Arguments) -> Iterator[str]:
    if args.short in ("concat", "pack") and args.long == "crop":
        yield f"--long crop leaves tokens out, --short {args.short} keeps all; use --long split"
    if args.short == "concat" and args.long not in (None, "split"):
        yield f"--short concat joins whole rows, --long {args.long} cuts them before; use --long split"


def _data(args: Arguments, inputs: ProgramInputs) -> Iterator[str]:
    if args.use_synthetic_data:
        return
    locations, weights = training_sources(args)
    if is_streamed(args, locations):
        if inputs.training_data is not None:
            yield "--streaming 1: training_data has random access; leave it out"
        if weights is not None:
            yield "--streaming 1 reads all sources alike; leave out the weights, or give --streaming 0"
        if args.steps_per_epoch is not None:
            yield "--steps_per_epoch does not go with streamed data; give --max_steps"
    if not (locations or inputs.training_data is not None or args.evaluate_only):
        yield "no training data: give --training_dir (or the SageMaker channel train), or --use_synthetic_data 1"
    held_out = args.test_dir or inputs.validation_data is not None or any(map(may_be_held_out, locations))
    if (args.validation_freq or args.evaluate_only) and not held_out:
        cause = "--evaluate_only" if args.evaluate_only else f"--validation_freq {args.validation_freq}"
        yield f"{cause} needs --test_dir (or the SageMaker channel test) to validate on"


def ineffective(resolved: Resolved, backend: str | None = None) -> list[str]:
    """Return the notes of parsing, and a line for each setting of the user that has no effect on ``backend``.

    By default, ``backend`` is the value of --backend, or the native backend for ``auto``.
    """
    args, reasons = resolved.args, _idle_flags(resolved, backend or resolved.args.backend)
    lines = [
        f"--{name} {show(getattr(args, name))} has no effect: {reason}"
        for name, reason in reasons.items() if resolved.given(name)
    ]  # fmt: skip
    return [*resolved.notes, *lines]


def _idle_flags(resolved: Resolved, backend: str) -> dict[str, str]:
    """Return the flags that have no effect with the other settings, and the reasons."""
    args, reasons = resolved.args, {}
    for name, flag in flags().items():
        if flag.smp_only and backend != "smp":
            reasons[name] = flag.smp_only
        elif flag.idle_without and _is_off(args, flag.idle_without):
            reasons[name] = f"it needs {_turned_on(flag.idle_without)}"
    if args.activation_checkpointing == checkpointing.NONE and args.selective_checkpointing not in (0, 1):
        reasons["selective_checkpointing"] = "--activation_checkpointing is none"
    if args.use_synthetic_data:
        reasons |= dict.fromkeys(DATA_FLAGS, "--use_synthetic_data 1 trains on random tokens")
    elif is_streamed(args, training_sources(args)[0]):
        reasons |= dict.fromkeys(CACHE_FLAGS, "streamed data is not cached")
    if args.bad_rows != "skip":
        reasons["max_bad"] = "it needs --bad_rows skip"
    if not (args.validation_freq or args.evaluate_only):
        reasons |= dict.fromkeys(VALIDATION_FLAGS, "nothing is validated without --validation_freq")
    if resolved.inputs.training_data is not None and not args.test_dir:
        reasons |= dict.fromkeys(("zipped_data", *CACHE_FLAGS), "training_data gives its rows itself")
    return reasons


def _is_off(args: Arguments, name: str) -> bool:
    """Return whether a flag is off; a switch that is not set (None) is not off, as the start may turn it on."""
    value = getattr(args, name)
    return not value and not (value is None and flags()[name].kind is bool)
