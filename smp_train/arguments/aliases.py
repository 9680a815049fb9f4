"""Other systems' names for settings: plain synonyms (listed with the flags), names with other values or no effect.

An alias names one or more of our flags. The flag's type reads its value, unless ``read`` translates it first. An alias
without a flag is accepted with a note, or refused, by its value. Names that several systems share (``--batch_size``,
``--vocab_size``, ...) mean the same in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from smp_train.arguments.groups import flags
from smp_train.arguments.values import FALSE, TRUE, nearest, read_bool, read_float, read_int, unquote

MP_PARAMETERS = "mp_parameters"
SMP_KEYS = tuple(name for name, flag in flags().items() if flag.smp_key)
"""SMP's nine documented configuration keys; each is a flag of the same name."""

Reader = Callable[[str], dict[str, Any]]
"""Translates an alias's text into values of our flags, by name; its ValueError describes the text that it expects."""


@dataclass(frozen=True)
class Alias:
    """Another system's name for a setting."""

    name: str
    flags: tuple[str, ...]
    help: str = ""
    read: Reader | None = None
    bare: bool = False
    """Whether an alias with ``read`` may be written without a value, which then means 1."""
    yields: tuple[str, ...] = ()
    """Flags for which this alias yields: if the same source sets such a flag under another name, that value counts."""

    @property
    def is_switch(self) -> bool:
        """Whether the name may be written without a value, which then means 1."""
        return self.bare or (self.read is None and all(flags()[name].switch for name in self.flags))

    @property
    def takes_many(self) -> bool:
        """Whether the name takes a list of values, as `--checkpoint_freq 5 10`."""
        return self.read is None and flags()[self.flags[0]].many


def _one_of(meanings: dict[str, dict[str, Any]], remedy: str) -> Reader:
    """Return a reader that accepts the words in ``meanings`` and refuses others with the remedy."""

    def read(text: str) -> dict[str, Any]:
        value = unquote(text).strip().lower()
        if value not in meanings:
            raise ValueError(f"is not available; {remedy}")
        return meanings[value]

    return read


def _model_name(text: str) -> dict[str, Any]:
    """Return the preset 7b of llama_v2 for ``llama2_7b``."""
    match = re.fullmatch(r"llama([23])(?:\.\d)?[_-](\d+(?:\.\d+)?b)", text.strip().lower())
    if not match:
        raise ValueError("is not a name such as llama2_7b; any other model is chosen by --model_type and --model_size")
    return {"model_type": f"llama_v{match[1]}", "model_size": match[2]}


def _max_epochs(text: str) -> dict[str, Any]:
    epochs = read_int(text)
    return {"evaluate_only": True} if epochs < 0 else {"epochs": epochs}


def _output_dir(text: str) -> dict[str, Any]:
    folder = unquote(text).rstrip("/") or "/"
    if "://" in folder:
        raise ValueError("holds the run folder too, which S3 cannot; give --run_dir FOLDER --checkpoint_dir s3://...")
    return {"run_dir": folder, "checkpoint_dir": [f"{folder}/checkpoints"]}


def _fsdp(text: str) -> dict[str, Any]:
    return {flag: value for option in unquote(text).split() for flag, value in FSDP_OPTION(option).items()}


def _warmup_ratio(text: str) -> dict[str, Any]:
    share = read_float(text)
    if not 0 <= share < 1:
        raise ValueError("expects a share of the run, at least 0 and below 1")
    return {"warmup": share}


def _smp_keys(text: str) -> dict[str, Any]:
    """Return the keys of an SMP parameter set: ``{"k": v}`` or ``k=v,k=v``, either also as a JSON string."""
    text = unquote(text.strip()).strip()
    if text.startswith("{"):
        try:
            pairs = json.loads(text)
        except ValueError:
            raise ValueError("neither JSON nor key=value,key=value") from None
    else:
        parts = [part.partition("=") for part in text.split(",") if part.strip()]
        if malformed := [key for key, equals, _ in parts if not equals or not key.strip()]:
            raise ValueError(f"{malformed[0]!r} is not key=value")
        pairs = {key.strip(): unquote(value.strip()) for key, _, value in parts}
    pairs.pop("placement_strategy", None)  # SageMaker's SDK adds it to recipes, and SMP v2 ignores it
    for key in pairs:
        if key not in SMP_KEYS:
            hint = nearest(key, SMP_KEYS) or f"; the parameters are {', '.join(SMP_KEYS)}"
            raise ValueError(f"{key!r} is no parameter of SMP v2{hint}")
    return pairs


FSDP: dict[str, dict[str, Any]] = {
    "auto_wrap": {},  # every decoder layer is wrapped anyway
    "offload": {"cpu_offload": True},
    **{name: {"sharding_strategy": name} for name in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard")},
    "hybrid_shard_zero2": {"sharding_strategy": "_hybrid_shard_zero2"},
}
FSDP_OPTION = _one_of(FSDP, f"give {', '.join(FSDP)}")
SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"lr_decay_style": "linear", "min_lr": 0.0},
    "cosine": {"lr_decay_style": "cosine", "min_lr": 0.0},
    "cosine_with_min_lr": {"lr_decay_style": "cosine"},
    "constant": {"lr_decay_style": "constant", "warmup": 0.0},
    "constant_with_warmup": {"lr_decay_style": "constant"},
    "warmup_stable_decay": {"lr_decay_style": "wsd"},
}
PRECISIONS = {name: {"bf16": name[0] == "b"} for name in ("float32", "fp32", "bf16", "bfloat16")}
MINGPT = _one_of({"mingpt": {"model_type": "gpt2"}}, "any other model is chosen by --model_type and --model_size")
EVAL = _one_of({"steps": {}, "no": {"validation_freq": None}}, "give --eval_steps N")

TRANSLATED: tuple[Alias, ...] = (
    Alias("model_name", ("model_type", "model_size"), "such as llama2_7b", _model_name),
    Alias("model", ("model_type",), "mingpt", MINGPT),
    Alias("precision", ("bf16",), "float32 or bf16", _one_of(PRECISIONS, "give float32 or bf16")),
    Alias("max_epochs", ("epochs", "evaluate_only"), "below 0: evaluate only", _max_epochs),
    Alias("warmup_steps", ("warmup",), "steps", lambda text: {"warmup": read_int(text)}),
    Alias("use_flash_attn", ("attn_implementation",), "flash_attention_2; 0: sdpa",
          lambda text: {"attn_implementation": "flash_attention_2" if read_bool(text) else "sdpa"}, bare=True),
    Alias("output_dir", ("run_dir", "checkpoint_dir"), "DIR and DIR/checkpoints", _output_dir,
          yields=("run_dir", "checkpoint_dir")),
    Alias("warmup_ratio", ("warmup",), "a share of the run", _warmup_ratio),
    Alias("lr_scheduler_type", ("lr_decay_style", "min_lr", "warmup"),
          "linear and cosine end at 0, constant has no warm-up",
          _one_of(SCHEDULES, f"give {' or '.join(SCHEDULES)}"), yields=("min_lr", "warmup")),
    Alias("fsdp", ("sharding_strategy", "cpu_offload"), 'such as "full_shard auto_wrap"', _fsdp),
    Alias("ddp_timeout", ("distributed_timeout_minutes",), "seconds",
          lambda text: {"distributed_timeout_minutes": read_float(text) / 60}),
    Alias("disable_tqdm", ("progress_bar",), "1: no progress line",
          lambda text: {"progress_bar": not read_bool(text)}, bare=True),
    Alias("packing", ("short",), "1: pack", lambda text: {"short": "pack"} if read_bool(text) else {}, bare=True),
    Alias("eval_strategy", ("validation_freq",), "steps (of --eval_steps) or no", EVAL),
    Alias("evaluation_strategy", ("validation_freq",), "as --eval_strategy", EVAL),
    Alias(MP_PARAMETERS, SMP_KEYS, "SMP's parameters, as key=value,key=value or JSON", _smp_keys),
)  # fmt: skip

ANY = None

# Names that set nothing here: the accepted values (`ANY` accepts all, () refuses all), and the reason or the remedy.
WITHOUT_EFFECT: dict[str, tuple[Collection[str] | None, str]] = {
    # SMP v2's and AWS's FSDP samples, minimal_fsdp
    "data_type": (("gpt",), "only decoder-only models are trained"),
    "dataset_type": (("gpt_jsonl", "hf"), "the kind of the data is detected"),
    "logging_freq_for_avg": (ANY, "speeds are averaged from one log line to the next"),
    **dict.fromkeys((
        "use_orig_params", "auto_wrap_policy", "patch_neox_rope", "framework", "clean_cache", "nccl_test_log",
        "preserve_np_state",
    ), (ANY, "scripts for FSDP1 needed it, and this program does not")),
    "use_smp_flash_attn": (ANY, "--attn_implementation chooses the attention kernel"),
    "log_reduced_training_loss": (ANY, "the logged loss is always the global batch's"),
    "summary_first_pdrop": (ANY, "a language model has no classification head"),
    "environment": (("pbs", "local"), "the launcher is detected"),
    # Hugging Face's Trainer
    "fp16": (FALSE, "there is no float16; give --bf16 1 (bfloat16), or --bf16 0 (float32)"),
    "optim": (("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "the optimizer is AdamW: give adamw_torch"),
    "do_train": (TRUE, "to validate and train nothing, give --evaluate_only 1"),
    "do_eval": (ANY, "--eval_steps N validates every N steps and at the end"),
    "overwrite_output_dir": (ANY, "a start without --run_name is a new run, with another name"),
    "save_strategy": (("steps",), "give --save_steps N"),
    "logging_strategy": (("steps",), "give --logging_steps N"),
    "metric_for_best_model": (("loss", "eval_loss"), "the lowest validation loss is best"),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory", "preprocessing_num_workers"),
        (ANY, "batches are always read ahead"),
    ),
    "remove_unused_columns": (ANY, "unused columns are not read"),
    "overwrite_cache": (ANY, "a cache that does not fit the data is made again"),
    "use_fast_tokenizer": (ANY, "all tokenizers are fast"),
    "logging_first_step": (ANY, "--logging_steps decides which steps are logged"),
    "ddp_bucket_cap_mb": (ANY, "gradients are reduced layer by layer"),
    "low_cpu_mem_usage": (ANY, "each rank reads only its part of the weights"),
    "ddp_find_unused_parameters": (FALSE, "every parameter of a decoder-only model is used"),
    "use_peft": (FALSE, "--lora_rank N trains adapters"),
    "pipeline_parallel_degree": (("1",), "--tensor_parallel_degree and sharding split a model"),
    "torch_dtype": (("float32", "auto"), "weights stay in float32; --bf16 1 computes in bfloat16"),
    "push_to_hub": (FALSE, "--save_final_model 1 writes a folder, which `hf upload` uploads"),
    "config_name": ((), "give --model_name_or_path a folder with that config.json and no weights, or --model_type with "
                        "widths"),
    "deepspeed": ((), "--sharding_strategy full_shard is ZeRO 3, shard_grad_op is ZeRO 2; --cpu_offload 1 offloads"),
    "fsdp_config": ((), "give --sharding_strategy, --hybrid_shard_degree, --cpu_offload, --forward_prefetch"),
}  # fmt: skip


def _of_rows() -> list[Alias]:
    """Return the aliases in the flags' rows; an alias of several flags sets all of them."""
    names: dict[str, list[str]] = {}
    for flag in flags().values():
        for name in flag.aliases.split():
            names.setdefault(name, []).append(flag.name)
    return [Alias(name, tuple(ours)) for name, ours in names.items()]


def _without_effect(name: str) -> Alias:
    accepted, reason = WITHOUT_EFFECT[name]
    read = (lambda _: {}) if accepted is ANY else _one_of({value: {} for value in accepted}, reason)
    return Alias(name, (), reason, read, bare=True)


ALIASES = (*_of_rows(), *TRANSLATED, *map(_without_effect, WITHOUT_EFFECT))
NAMES = {name: Alias(name, (name,)) for name in flags()} | {alias.name: alias for alias in ALIASES}
"""Every name that a command line, a configuration file or SageMaker may give, our own flags' included."""
