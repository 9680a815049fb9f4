"""Refusal, before anything starts, of settings that cannot work alone or together."""

from __future__ import annotations

import os
from collections.abc import Iterator

from smp_train.arguments import checkpointing
from smp_train.arguments.flag import RULES, show
from smp_train.arguments.groups import Arguments, flags
from smp_train.arguments.own import Own
from smp_train.arguments.parse import Resolved
from smp_train.arguments.run_name import CHECKPOINT_NAME, is_run_name
from smp_train.arguments.sources import is_streamed, may_be_held_out, training_sources
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.distributed import smp_installed
from smp_train.distributed.degrees import divisors, plan
from smp_train.errors import ConfigError

OF_DATA = (
    "training_dir", "dataset", "streaming", "test_dir", "dataset_type", "zipped_data", "data_num_workers",
    "data_cache_dir", "bad_rows", "long", "short",
)  # fmt: skip
"""Flags of data that is read."""
OF_CACHE = ("data_num_workers", "data_cache_dir")
"""Flags of the conversion to a token cache."""


def validate(
    args: Arguments, world_size: int, local_world_size: int | None = None, own: Own | None = None
) -> None:  # fmt: skip
    """Raise `ConfigError`, in one line with the way out, for what cannot work on ``world_size`` processes.

    ``local_world_size`` of them are on a node; by default all. ``own`` is what a program gives besides flags.
    """
    own = own or Own()
    own.check()
    natively = runs_natively(args)
    check_values(args)
    if natively:
        refuse_natively(args)
    elif args.auto != "off" and not args.evaluate_only:
        raise ConfigError(f"--auto {args.auto} plans the native backend; give --backend native, or leave it out")
    plan(args, world_size, local_world_size or world_size, smp=not natively)
    check_together(args)
    for problems in (_checkpoints(args), _data(args, own)):
        _refuse(problems)


def runs_natively(args: Arguments) -> bool:
    """Return whether the native backend will run: as asked, or because this torch has no SMP."""
    return args.backend == "native" or (args.backend == "auto" and not smp_installed())


def refuse_natively(args: Arguments) -> None:
    """Raise `ConfigError` for what only SMP can do."""
    _refuse(
        f"--{name} {show(getattr(args, name))}: {flag.only_natively.why}"
        for name, flag in flags().items()
        if flag.only_natively
        and getattr(args, name) not in flag.only_natively.values
        and (not flag.idle_without or getattr(args, flag.idle_without))
    )
    if args.fp8 and args.tensor_parallel_degree > 1:
        raise ConfigError("--fp8 1 with --tensor_parallel_degree above 1 is not available; give one of them")


def check_values(args: Arguments) -> None:
    """Raise `ConfigError` for a value that its flag does not allow."""
    _refuse(_values(args))


def check_together(args: Arguments) -> None:
    """Raise `ConfigError` for flags of the model and of what it computes that contradict each other."""
    for problems in (_model(args), _finetuning(args), _computation(args)):
        _refuse(problems)


def _refuse(problems: Iterator[str]) -> None:
    for problem in problems:
        raise ConfigError(problem)


def _turned_on(name: str) -> str:
    return f"--{name} 1" if flags()[name].switch else f"--{name}"


def _both(what: str, *given: tuple[str, object]) -> Iterator[str]:
    """Yield a problem where two flags, each a name and whether it is given, set the same thing."""
    names = [name for name, value in given if value]
    if len(names) > 1:
        yield f"{' and '.join(names)} both {what}; give one of them"


def _values(args: Arguments) -> Iterator[str]:
    """Hold each flag's value against its row."""
    for flag in flags().values():
        value = getattr(args, flag.name)
        given = f"--{flag.name} {show(value)}"
        if flag.only and value not in flag.only.values:
            yield f"{given}: {flag.only.why}"
        if value and flag.needs and not getattr(args, flag.needs):
            yield f"{given} needs {_turned_on(flag.needs)}"
        for each in value if isinstance(value, list) else [] if value is None else [value]:
            if flag.choices and each not in flag.choices:
                yield f"--{flag.name} {show(each)}: is not one of {', '.join(map(str, flag.choices))}"
            if flag.must and not RULES[flag.must].holds(each):
                yield f"--{flag.name} {show(each)}: {RULES[flag.must].says}"


def _model(args: Arguments) -> Iterator[str]:
    shard = args.hybrid_shard_degree or 1
    if args.sharding_strategy == "no_shard" and shard > 1:
        yield f"--sharding_strategy no_shard and --hybrid_shard_degree {shard} contradict each other; give one of them"
    other = "--from_scratch" if args.from_scratch else f"--model_size {args.model_size}"
    hub = ("--hf_pretrained_model_name_or_dir (--hf_model)", args.hf_pretrained_model_name_or_dir)
    yield from _both("choose the model", hub, (other, args.from_scratch or args.model_size))
    width, heads, kv = args.hidden_width, args.num_heads, args.num_key_value_heads
    if width and heads and width % heads:
        yield f"--hidden_width {width} is not a multiple of --num_heads {heads}"
    if heads and kv and heads % kv:
        would = ", ".join(map(str, divisors(heads)))
        yield f"--num_key_value_heads {kv} does not divide --num_heads {heads}; {would} would"
    experts, used = args.num_local_experts, args.num_experts_per_tok
    if experts and used and used > experts:
        yield f"--num_experts_per_tok {used} is above --num_local_experts {experts}"


def _finetuning(args: Arguments) -> Iterator[str]:
    model, hub = args.pretrained_model_name, args.hf_pretrained_model_name_or_dir
    file, folder = args.pretrained_checkpoint_file, args.finetune_checkpoint_load_dir
    if args.finetune and not (model or file or hub):
        yield (
            "--finetune 1 needs weights: give --pretrained_model_name (with --finetune_checkpoint_load_dir where they "
            "lie elsewhere) or --pretrained_checkpoint_file"
        )
    yield from _both(
        "choose the model", ("--pretrained_model_name", model), ("--hf_pretrained_model_name_or_dir", hub)
    )
    yield from _both(
        "choose the weights", ("--pretrained_checkpoint_file", file), ("--finetune_checkpoint_load_dir", folder)
    )
    if folder and not (model or hub):
        yield "--finetune_checkpoint_load_dir needs --pretrained_model_name, to know the model's shape"


def _computation(args: Arguments) -> Iterator[str]:
    setting, selective = args.activation_checkpointing, args.selective_checkpointing
    for name, value in (("fp8", args.fp8), ("attn_implementation", args.attn_implementation.startswith("flash"))):
        if value and args.bf16 is False:
            yield f"--{name} {show(getattr(args, name))} does not compute in float32; give --bf16 1"
    asked = checkpointing.read(setting)
    if selective != 1 and asked[0] and asked != checkpointing.read(checkpointing.of_layers(selective)):
        yield (
            f"--activation_checkpointing {setting} and --selective_checkpointing {show(selective)} contradict each "
            "other; give one of them"
        )
    if args.short == "pack" and args.context_parallel_degree > 1:
        yield (
            f"--short pack does not go with --context_parallel_degree {args.context_parallel_degree}: packed documents "
            "are not split over ranks; use --short concat"
        )
    if args.min_lr > args.lr and args.lr_decay_style != "constant":
        yield f"--min_lr {show(args.min_lr)} is above --lr {show(args.lr)}; give a lower --min_lr"
    if args.warmup < 1 and args.warmup + args.plateau > 1:
        yield (
            f"--warmup {show(args.warmup)} and --plateau {show(args.plateau)} are fractions of one run: "
            "together at most 1"
        )


def _checkpoints(args: Arguments) -> Iterator[str]:
    folders, resume = args.checkpoint_dir, args.resume_from_checkpoint or ""
    if args.run_name and not is_run_name(args.run_name):
        yield f"--run_name {args.run_name!r}: is no name for a folder; give one such as llama-7b"
    if CHECKPOINT_NAME.fullmatch(args.run_name):
        yield f"--run_name {args.run_name}: is the name of a checkpoint; give another name, such as llama-7b"
    entries = "1 entry" if len(folders) == 1 else f"{len(folders)} entries"
    for name in ("checkpoint_freq", "num_kept_checkpoints"):
        length = len(getattr(args, name))
        if length != len(folders):
            yield f"--checkpoint_dir has {entries} and --{name} {length}: give one value per folder"
    if len(set(folders)) != len(folders):
        yield "--checkpoint_dir names one folder twice; give each policy a folder of its own"
    if all(folder.startswith(NODE_LOCAL) for folder in folders):
        yield f"--checkpoint_dir {folders[0]} is lost with its node; add a folder that all nodes share, or s3://"
    if resume.startswith(NODE_LOCAL):
        yield (
            f"--resume_from_checkpoint {resume}: give the folder that all nodes share; those of --checkpoint_dir that "
            "begin with local: are searched with it"
        )
    if resume.lower() in ("true", "1", "false", "0"):
        yield (
            f"--resume_from_checkpoint {resume}: give the folder to resume from, here {folders[0]}; leave it out to "
            "begin anew"
        )
    if args.save_final_model:
        yield from _final_model(args)


def _final_model(args: Arguments) -> Iterator[str]:
    """Refuse to write the final model over the one that the run starts from."""
    if not args.model_dir:
        yield "--save_final_model 1 needs --model_dir (or SM_MODEL_DIR), the folder to write it to"
    folder, name = args.finetune_checkpoint_load_dir, args.pretrained_model_name
    file = args.pretrained_checkpoint_file
    is_file = file and (file.endswith((".safetensors", ".bin", ".pt", ".pth")) or os.path.isfile(file))
    read = [
        ("hf_pretrained_model_name_or_dir", args.hf_pretrained_model_name_or_dir),
        ("pretrained_model_name", name),
        ("finetune_checkpoint_load_dir", folder),
        ("finetune_checkpoint_load_dir", os.path.join(folder, name) if folder and name else None),  # models by name
        ("pretrained_checkpoint_file", file),
        ("pretrained_checkpoint_file", os.path.dirname(file) if file and is_file else None),
    ]
    for flag, place in read:
        if place is not None and _real(place) == _real(args.model_dir or ""):
            yield (
                f"--model_dir {args.model_dir} holds what the run starts from (--{flag} {getattr(args, flag)}), which "
                "would be replaced; give another folder"
            )


def _real(path: str) -> str:
    """Return a path in a form that is equal for two names of one folder."""
    return path.rstrip("/") if path.startswith("s3://") else os.path.realpath(os.path.expanduser(path))


def prompts_only(args: Arguments) -> bool:
    """Return whether a checkpoint is only to continue a prompt: nothing is trained or validated."""
    return bool(args.evaluate_only and args.prompt and not args.test_dir)


def _data(args: Arguments, own: Own) -> Iterator[str]:
    if args.shuffle.startswith("window"):
        yield f"--shuffle {args.shuffle} is no longer available; for data larger than the disk, give --streaming 1"
    if args.shuffle not in ("global", "none"):
        yield f"--shuffle {args.shuffle}: is not one of global, none"
    if args.short in ("concat", "pack") and args.long == "crop":
        yield f"--long crop leaves tokens out, --short {args.short} keeps all; use --long split"
    if args.short == "concat" and args.long not in (None, "split"):
        yield f"--short concat joins whole rows, --long {args.long} cuts them before; use --long split"
    if prompts_only(args):
        return
    yield from _own_data(args, own)
    if args.use_synthetic_data:
        return
    locations, weights = training_sources(args)
    if is_streamed(args, locations):
        yield from _streamed(args, own, weights)
    if not (locations or own.training_data is not None or args.evaluate_only):
        yield "no training data: give --training_dir (or the SageMaker channel train), or --use_synthetic_data 1"
    held_out = args.test_dir or own.validation_data is not None or any(map(may_be_held_out, locations))
    if (args.validation_freq or args.evaluate_only) and not held_out:
        cause = "--evaluate_only" if args.evaluate_only else f"--validation_freq {args.validation_freq}"
        yield f"{cause} needs --test_dir (or the SageMaker channel test) to validate on"


def _own_data(args: Arguments, own: Own) -> Iterator[str]:
    """Refuse a program's rows, or synthetic ones, together with a flag that names other data."""
    read = [("--training_dir (or the SageMaker channel train)", args.training_dir), ("--dataset", args.dataset)]
    synthetic = ("--use_synthetic_data", args.use_synthetic_data)
    if own.training_data is not None:
        yield from _both("name the training data", ("training_data", True), *read, synthetic)
    if own.validation_data is not None:
        yield from _both("name the validation data", ("validation_data", True), ("--test_dir", args.test_dir))


def _streamed(args: Arguments, own: Own, weights: list[float] | None) -> Iterator[str]:
    """Refuse flags that do not go with streams, whose length is unknown."""
    if own.training_data is not None:
        yield "--streaming 1: training_data has random access; leave it out"
    if weights is not None:
        yield "--streaming 1 reads all sources alike; leave out the weights, or give --streaming 0"
    if args.steps_per_epoch is not None:
        yield "--steps_per_epoch does not go with streamed data; give --max_steps"


def ineffective(resolved: Resolved, backend: str | None = None) -> list[str]:
    """Return one line per setting that was given and changes nothing on ``backend``, and the notes of parsing.

    Without ``backend``: on the one that is asked for, which is the native one when left open.
    """
    args = resolved.args
    backend = backend or args.backend
    lines = list(resolved.notes)
    idle: dict[str, str] = {}
    for name, flag in flags().items():
        why = flag.no_effect if backend == "smp" else flag.idle
        if not why and flag.idle_without and _is_off(args, flag.idle_without):
            why = f"it needs {_turned_on(flag.idle_without)}"
        if why:
            idle[name] = why
    idle |= _idle_data(args)
    if resolved.own.training_data is not None and not args.test_dir:
        idle |= dict.fromkeys(("dataset_type", "zipped_data", *OF_CACHE), "training_data gives its rows itself")
    if args.activation_checkpointing == checkpointing.NONE and args.selective_checkpointing not in (0, 1):
        idle["selective_checkpointing"] = "--activation_checkpointing is none"
    given = {name: show(getattr(args, name)) for name in idle if resolved.given(name)}
    return lines + [f"--{name} {value} has no effect: {idle[name]}" for name, value in given.items()]


def _is_off(args: Arguments, name: str) -> bool:
    """Return whether a flag is off; a switch that is not given may be settled at start."""
    value = getattr(args, name)
    return not value and not (value is None and flags()[name].kind is bool)


def _idle_data(args: Arguments) -> dict[str, str]:
    """Return the flags of the data that change nothing beside the others, and why."""
    idle: dict[str, str] = {}
    if args.use_synthetic_data:
        idle |= dict.fromkeys(OF_DATA, "--use_synthetic_data 1 trains on random tokens")
    elif is_streamed(args, training_sources(args)[0]):
        idle |= dict.fromkeys(OF_CACHE, "streamed data is not cached")
    if args.bad_rows != "skip":
        idle["max_bad"] = "it needs --bad_rows skip"
    if not (args.validation_freq or args.evaluate_only):
        of_validation = ("test_dir", "validation_batches", "val_batch_size", "fast_validation")
        idle |= dict.fromkeys(of_validation, "nothing is validated without --validation_freq")
    return idle
