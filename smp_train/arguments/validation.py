"""Refusal, before anything starts, of settings that cannot work alone or together."""

from __future__ import annotations

import os

from smp_train.arguments import checkpointing
from smp_train.arguments.flag import Flag, show
from smp_train.arguments.groups import Arguments, flags
from smp_train.arguments.parse import Resolved
from smp_train.arguments.run_name import CHECKPOINT_NAME, CHECKPOINTS, is_run_name
from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.distributed import smp_installed
from smp_train.distributed.degrees import divisors, plan
from smp_train.errors import ConfigError

OF_FILES = (
    "training_dir", "test_dir", "dataset_type", "zipped_data", "data_num_workers", "data_cache_dir", "bad_rows", "long",
    "short",
)  # fmt: skip
"""Flags of data that lies somewhere."""


def validate(args: Arguments, world_size: int, local_world_size: int | None = None) -> None:
    """Raise `ConfigError`, in one line with the way out, for what cannot work on ``world_size`` processes.

    ``local_world_size`` of them are on a node; by default all.
    """
    for flag in flags().values():
        _check_values(args, flag)
    if _natively(args):
        refuse_natively(args)
    _check_degrees(args, world_size, local_world_size or world_size)
    _check_model(args)
    _check_activations(args)
    _check_schedule(args)
    _check_checkpoints(args)
    _check_data(args)


def _check_values(args: Arguments, flag: Flag) -> None:
    """Hold what a flag is set to against its row."""
    value = getattr(args, flag.name)
    if flag.only and value not in flag.only.values:
        raise ConfigError(f"--{flag.name} {show(value)}: {flag.only.why}")
    if value and flag.needs and not getattr(args, flag.needs):
        raise ConfigError(f"--{flag.name} {show(value)} needs {_turned_on(flag.needs)}")
    for each in value if isinstance(value, list) else [value]:
        if each is None:
            continue
        if flag.choices and each not in flag.choices:
            raise ConfigError(f"--{flag.name} {show(each)}: is not one of {', '.join(map(str, flag.choices))}")
        if flag.must and not flag.must.holds(each):
            raise ConfigError(f"--{flag.name} {show(each)}: {flag.must.says}")


def _turned_on(name: str) -> str:
    return f"--{name} 1" if flags()[name].switch else f"--{name}"


def _choose_one(what: str, *given: tuple[str, object]) -> None:
    """Refuse two flags, each a name and whether it is given, that say the same thing."""
    names = [name for name, value in given if value]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} both {what}; give one of them")


def refuse_natively(args: Arguments) -> None:
    """Raise `ConfigError` for what only SMP can do."""
    for flag in flags().values():
        value = getattr(args, flag.name)
        if flag.only_natively and value not in flag.only_natively.values:
            raise ConfigError(f"--{flag.name} {show(value)}: {flag.only_natively.why}")
    if args.fp8 and args.tensor_parallel_degree > 1:
        raise ConfigError("--fp8 1 with --tensor_parallel_degree above 1 is not available; give one of them")


def _natively(args: Arguments) -> bool:
    return args.backend == "native" or (args.backend == "auto" and not smp_installed())


def _check_degrees(args: Arguments, world_size: int, local_world_size: int) -> None:
    plan(args, world_size, local_world_size, smp=not _natively(args))
    shard = args.hybrid_shard_degree
    if args.sharding_strategy == "no_shard" and shard and shard > 1:
        raise ConfigError(
            f"--sharding_strategy no_shard and --hybrid_shard_degree {shard} contradict each other; give one of them"
        )


def _check_model(args: Arguments) -> None:
    other = "--from_scratch" if args.from_scratch else f"--model_size {args.model_size}"
    hub = ("--hf_pretrained_model_name_or_dir (--hf_model)", args.hf_pretrained_model_name_or_dir)
    _choose_one("choose the model", hub, (other, args.from_scratch or args.model_size))
    _check_finetuning(args)
    width, heads, kv = args.hidden_width, args.num_heads, args.num_key_value_heads
    if width and heads and width % heads:
        raise ConfigError(f"--hidden_width {width} is not a multiple of --num_heads {heads}")
    if heads and kv and heads % kv:
        raise ConfigError(
            f"--num_key_value_heads {kv} does not divide --num_heads {heads}; "
            f"{', '.join(map(str, divisors(heads)))} would"
        )
    experts, used = args.num_local_experts, args.num_experts_per_tok
    if experts and used and used > experts:
        raise ConfigError(f"--num_experts_per_tok {used} is above --num_local_experts {experts}")


def _check_finetuning(args: Arguments) -> None:
    model, file, folder = (
        args.pretrained_model_name, args.pretrained_checkpoint_file, args.finetune_checkpoint_load_dir,
    )  # fmt: skip
    hub = args.hf_pretrained_model_name_or_dir
    if args.finetune and not (model or file or hub):
        raise ConfigError(
            "--finetune 1 needs weights: give --pretrained_model_name (with --finetune_checkpoint_load_dir where they "
            "lie elsewhere) or --pretrained_checkpoint_file"
        )
    _choose_one("choose the model", ("--pretrained_model_name", model), ("--hf_pretrained_model_name_or_dir", hub))
    weights = ("--pretrained_checkpoint_file", file), ("--finetune_checkpoint_load_dir", folder)
    _choose_one("choose the weights", *weights)
    if folder and not (model or hub):
        raise ConfigError("--finetune_checkpoint_load_dir needs --pretrained_model_name, to know the model's shape")


def _check_activations(args: Arguments) -> None:
    setting, selective = args.activation_checkpointing, args.selective_checkpointing
    for name, value in (("fp8", args.fp8), ("attn_implementation", args.attn_implementation.startswith("flash"))):
        if value and not args.bf16:
            raise ConfigError(f"--{name} {show(getattr(args, name))} does not compute in float32; give --bf16 1")
    asked = checkpointing.read(setting)
    if selective != 1 and asked[0] and asked != checkpointing.read(checkpointing.of_layers(selective)):
        raise ConfigError(
            f"--activation_checkpointing {setting} and --selective_checkpointing {show(selective)} contradict each "
            "other; give one of them"
        )


def _check_schedule(args: Arguments) -> None:
    if args.min_lr > args.lr and args.lr_decay_style != "constant":
        raise ConfigError(f"--min_lr {show(args.min_lr)} is above --lr {show(args.lr)}; give a lower --min_lr")
    if args.warmup < 1 and args.warmup + args.plateau > 1:
        raise ConfigError(
            f"--warmup {show(args.warmup)} and --plateau {show(args.plateau)} are fractions of one run: "
            "together at most 1"
        )


def _check_checkpoints(args: Arguments) -> None:
    if args.run_name and not is_run_name(args.run_name):
        raise ConfigError(f"--run_name {args.run_name!r}: is no name for a folder; give one such as llama-7b")
    if f"{CHECKPOINTS}/{args.run_name}" in args.checkpoint_dir and CHECKPOINT_NAME.fullmatch(args.run_name):
        raise ConfigError(f"--run_name {args.run_name}: names a checkpoint, not a folder of them; give another name")
    folders = len(args.checkpoint_dir) or 1
    for name in ("checkpoint_freq", "num_kept_checkpoints"):
        length = len(getattr(args, name))
        if length != folders:
            raise ConfigError(
                f"--checkpoint_dir has {folders} {'entry' if folders == 1 else 'entries'} and --{name} {length}: give "
                "one value per folder"
            )
    if len(set(args.checkpoint_dir)) != len(args.checkpoint_dir):
        raise ConfigError("--checkpoint_dir names one folder twice; give each policy a folder of its own")
    if args.checkpoint_dir and all(place.startswith(NODE_LOCAL) for place in args.checkpoint_dir):
        raise ConfigError(
            f"--checkpoint_dir {args.checkpoint_dir[0]} is lost with its node; add a folder that all nodes share, or s3://"
        )
    if (args.resume_from_checkpoint or "").startswith(NODE_LOCAL):
        raise ConfigError(
            f"--resume_from_checkpoint {args.resume_from_checkpoint}: give the folder that all nodes share; those of "
            "--checkpoint_dir that begin with local: are looked at with it"
        )
    if (args.resume_from_checkpoint or "").lower() in ("true", "1", "false", "0"):
        raise ConfigError(
            f"--resume_from_checkpoint {args.resume_from_checkpoint}: give the folder to resume from, here "
            f"{(args.checkpoint_dir or ['checkpoints'])[0]}; leave it out to begin anew"
        )
    if args.save_final_model and not args.model_dir:
        raise ConfigError("--save_final_model 1 needs --model_dir (or SM_MODEL_DIR), the folder to write it to")
    if args.save_final_model:
        _check_model_dir(args)


def _check_model_dir(args: Arguments) -> None:
    """Refuse to write the final model where the model to start from is: that one would be gone."""
    folder, name = args.finetune_checkpoint_load_dir, args.pretrained_model_name
    file = args.pretrained_checkpoint_file
    read = [
        ("hf_pretrained_model_name_or_dir", args.hf_pretrained_model_name_or_dir),
        ("pretrained_model_name", name),
        ("finetune_checkpoint_load_dir", folder),
        ("finetune_checkpoint_load_dir", os.path.join(folder, name) if folder and name else None),  # models by name
        ("pretrained_checkpoint_file", file),
        ("pretrained_checkpoint_file", os.path.dirname(file) if file and _is_file(file) else None),
    ]
    for flag, place in read:
        if place is not None and _real(place) == _real(args.model_dir or ""):
            raise ConfigError(
                f"--model_dir {args.model_dir} holds what the run starts from (--{flag} {getattr(args, flag)}), which "
                "would be replaced; give another folder"
            )


def _is_file(place: str) -> bool:
    return place.endswith((".safetensors", ".bin", ".pt", ".pth")) or os.path.isfile(place)


def _real(place: str) -> str:
    """Return a place in the one form that tells whether two are the same."""
    if place.startswith("s3://"):
        return place.rstrip("/")
    return os.path.realpath(os.path.expanduser(place))


def _check_data(args: Arguments) -> None:
    name, _, shards = args.shuffle.partition(":")
    if args.shuffle not in ("global", "none") and not (name == "window" and shards.isdigit() and int(shards)):
        raise ConfigError(f"--shuffle {args.shuffle}: is not one of global, none, window:K (K shards)")
    if args.short != "pad" and args.long == "crop":
        raise ConfigError(f"--long crop leaves tokens out, --short {args.short} keeps all; use --long split")
    if args.short == "pack" and args.context_parallel_degree > 1:
        raise ConfigError(
            f"--short pack does not go with --context_parallel_degree {args.context_parallel_degree}: packed documents "
            "are not split over ranks; use --short concat"
        )
    if args.dataset:
        _check_text(args)
    if args.use_synthetic_data or _of_hub(args.dataset):
        return
    if not args.training_dir and not args.dataset:
        raise ConfigError(
            "no training data: give --training_dir (or the SageMaker channel train), --dataset, "
            "or --use_synthetic_data 1"
        )
    if (args.validation_freq or args.evaluate_only) and not args.test_dir:
        cause = "--evaluate_only" if args.evaluate_only else f"--validation_freq {args.validation_freq}"
        raise ConfigError(f"{cause} needs --test_dir (or the SageMaker channel test) to validate on")


def _check_text(args: Arguments) -> None:
    """Streamed text is all there is to train on, its documents joined end to end."""
    _choose_one(
        "say what to train on", (f"--dataset {args.dataset}", True), ("--use_synthetic_data", args.use_synthetic_data),
        ("--training_dir (or the SageMaker channel train)", args.training_dir),
    )  # fmt: skip
    if not args.tokenizer and not args.hf_pretrained_model_name_or_dir and not args.pretrained_model_name:
        raise ConfigError(f"--dataset {args.dataset} needs --tokenizer: a tokenizer.json, a folder, or a name")
    if args.epochs is not None:
        raise ConfigError(
            f"--epochs {args.epochs}: how long an epoch of streamed text is nobody knows before its end; "
            "give --max_steps alone"
        )
    if args.shuffle.startswith("window"):
        raise ConfigError(f"--shuffle {args.shuffle} is for shards; streamed text knows global and none")
    if args.zipped_data is not None:
        raise ConfigError(f"--zipped_data {int(args.zipped_data)} is for shards; of text, leave it out")
    if args.short == "pack" or args.long not in (None, "split"):
        given = "--short pack" if args.short == "pack" else f"--long {args.long}"
        raise ConfigError(
            f"{given} does not go with --dataset, whose documents are joined end to end; make shards with "
            "smp-train prepare"
        )


def _of_hub(dataset: str | None) -> bool:
    """Tell whether a data set is none of this machine's or of S3: then a split of its own is there to validate on."""
    return bool(dataset) and not str(dataset).startswith("s3://") and not os.path.exists(str(dataset))


def _idle_data(args: Arguments) -> dict[str, str]:
    """Return the flags of the data that change nothing beside the others, and why."""
    idle: dict[str, str] = {}
    if args.dataset:
        of_shards = ("data_cache_dir", "data_num_workers", "dataset_type")
        idle.update(dict.fromkeys(of_shards, "streamed text is not cached"))
    if args.use_synthetic_data:
        idle.update(dict.fromkeys(OF_FILES, "--use_synthetic_data 1 trains on random tokens"))
    if args.bad_rows != "skip":
        idle["max_bad"] = "it needs --bad_rows skip"
    elif args.dataset:
        idle["max_bad"] = "how many documents streamed text has is not known"
    if not (args.validation_freq or args.evaluate_only):
        of_validation = ("test_dir", "validation_batches", "val_batch_size", "fast_validation")
        idle.update(dict.fromkeys(of_validation, "nothing is validated without --validation_freq"))
    return idle


def ineffective(resolved: Resolved, backend: str | None = None) -> list[str]:
    """Return one line per setting that was given and changes nothing on ``backend``, and the notes of parsing.

    Without ``backend``: on the one that is asked for, which is the native one when left open.
    """
    backend = backend or resolved.args.backend
    args = resolved.args
    lines = list(resolved.notes)
    for name, flag in flags().items():
        why = flag.no_effect if backend == "smp" else flag.idle
        if not why and flag.idle_without and not getattr(args, flag.idle_without):
            why = f"it needs {_turned_on(flag.idle_without)}"
        if why and resolved.given(name):
            lines.append(f"--{name} {show(getattr(args, name))} has no effect: {why}")
    for name, why in _idle_data(args).items():
        if resolved.given(name):
            lines.append(f"--{name} {show(getattr(args, name))} has no effect: {why}")
    if args.activation_checkpointing == checkpointing.NONE and args.selective_checkpointing not in (0, 1):
        lines.append(
            f"--selective_checkpointing {show(args.selective_checkpointing)} has no effect: "
            "--activation_checkpointing is none"
        )
    return lines
