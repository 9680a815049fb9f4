"""Other systems' names for settings: those that a flag's row declares, and those whose values are translated.

An alias names one or more of our flags. Its value is read as our flag's type would read it, unless ``read`` translates
it first. An alias of none is accepted with a note, or refused, by its value. Names that several systems share
(``--batch_size``, ``--vocab_size``, ...) mean one thing in all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smp_train.arguments.flag import SYSTEMS
from smp_train.arguments.groups import flags
from smp_train.arguments.mp_parameters import MP_PARAMETERS, SMP_KEYS
from smp_train.arguments.values import read_bool, read_float, read_int, unquote


@dataclass(frozen=True)
class Implied:
    """A value that gives way, in any order, to the same setting given by another flag of the same source."""

    value: Any


Reader = Callable[[str], dict[str, Any]]
"""Reads the text of an alias: values (or `Implied` ones) by our names; raises ValueError with what was expected."""


@dataclass(frozen=True)
class Alias:
    """Another system's name for a setting of ours."""

    name: str
    systems: tuple[str, ...]
    ours: tuple[str, ...]
    help: str = ""
    read: Reader | None = None
    switch: bool = False
    """It may stand without a value, where ``read`` reads it; see `is_switch`."""

    @property
    def is_switch(self) -> bool:
        """Whether it may stand without a value, for 1."""
        return self.switch or (self.read is None and all(flags()[name].switch for name in self.ours))

    @property
    def takes_many(self) -> bool:
        """Whether several values may follow it."""
        return self.read is None and flags()[self.ours[0]].many


def _model_name(text: str) -> dict[str, Any]:
    """``llama2_7b`` is the preset 7b of llama_v2."""
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
    return {"run_dir": Implied(folder), "checkpoint_dir": Implied([f"{folder}/checkpoints"])}


def _fsdp(text: str) -> dict[str, Any]:
    # Every decoder layer is wrapped, without being asked.
    known: dict[str, dict[str, Any]] = {"auto_wrap": {}, "offload": {"cpu_offload": True}}
    for name in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"):
        known[name] = {"sharding_strategy": "_hybrid_shard_zero2" if name == "hybrid_shard_zero2" else name}
    read = _choice(known, f"give {', '.join(known)}")
    return {flag: value for word in unquote(text).split() for flag, value in read(word).items()}


def _warmup_ratio(text: str) -> dict[str, Any]:
    share = read_float(text)
    if not 0 <= share < 1:
        raise ValueError("expects a share of the run from 0 up to, not including, 1")
    return {"warmup": share}


def _choice(known: dict[str, dict[str, Any]], otherwise: str) -> Reader:
    """Read one of a few words; any other is refused with what to do."""

    def read(text: str) -> dict[str, Any]:
        word = unquote(text).strip().lower()
        if word not in known:
            raise ValueError(f"is not available; {otherwise}")
        return known[word]

    return read


SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {"lr_decay_style": "linear", "min_lr": Implied(0.0)},
    "cosine": {"lr_decay_style": "cosine", "min_lr": Implied(0.0)},
    "cosine_with_min_lr": {"lr_decay_style": "cosine"},
    "constant": {"lr_decay_style": "constant", "warmup": Implied(0.0)},
    "constant_with_warmup": {"lr_decay_style": "constant"},
    "warmup_stable_decay": {"lr_decay_style": "wsd"},
}
MODELS: dict[str, dict[str, Any]] = {"mingpt": {"model_type": "gpt2"}}
PRECISIONS: dict[str, dict[str, Any]] = {
    word: {"bf16": word[0] == "b"} for word in ("float32", "fp32", "bf16", "bfloat16")
}
EVAL = _choice({"steps": {}, "no": {"validation_freq": None}}, "give --eval_steps N")


def _flash(text: str) -> dict[str, Any]:
    return {"attn_implementation": "flash_attention_2" if read_bool(text) else "sdpa"}


TRANSLATED: tuple[Alias, ...] = (
    Alias("model_name", ("profiling",), ("model_type", "model_size"), "such as llama2_7b", _model_name),
    Alias("model", ("minimal",), ("model_type",), "mingpt",
          _choice(MODELS, "any other model is chosen by --model_type and --model_size")),
    Alias("precision", ("minimal",), ("bf16",), "float32 or bf16", _choice(PRECISIONS, "give float32 or bf16")),
    Alias("max_epochs", ("minimal",), ("epochs", "evaluate_only"), "below 0: evaluate only", _max_epochs),
    Alias("warmup_steps", ("fsdp2", "trainer"), ("warmup",), "steps", lambda text: {"warmup": read_int(text)}),
    Alias("use_flash_attn", ("fsdp2",), ("attn_implementation",), "flash_attention_2; 0: sdpa", _flash, switch=True),
    Alias("output_dir", ("trainer",), ("run_dir", "checkpoint_dir"), "DIR and DIR/checkpoints", _output_dir),
    Alias("warmup_ratio", ("trainer",), ("warmup",), "a share of the run", _warmup_ratio),
    Alias("lr_scheduler_type", ("trainer",), ("lr_decay_style", "min_lr", "warmup"),
          "linear and cosine end at 0, constant has no warm-up", _choice(SCHEDULES, f"give {' or '.join(SCHEDULES)}")),
    Alias("fsdp", ("trainer",), ("sharding_strategy", "cpu_offload"), 'such as "full_shard auto_wrap"', _fsdp),
    Alias("ddp_timeout", ("trainer",), ("distributed_timeout_minutes",), "seconds",
          lambda text: {"distributed_timeout_minutes": read_float(text) / 60}),
    Alias("disable_tqdm", ("trainer",), ("progress_bar",), "1: no progress line",
          lambda text: {"progress_bar": not read_bool(text)}, switch=True),
    Alias("packing", ("trainer",), ("short",), "1: pack",
          lambda text: {"short": "pack"} if read_bool(text) else {}, switch=True),
    Alias("eval_strategy", ("trainer",), ("validation_freq",), "steps (of --eval_steps) or no", EVAL),
    Alias("evaluation_strategy", ("trainer",), ("validation_freq",), "as --eval_strategy", EVAL),
)  # fmt: skip

OFF = ("0", "false", "no", "off", "none")
ON = ("1", "true", "yes", "on")
ANY = (*ON, *OFF)
COUNT = None
"""Any integer."""
REFUSED = "refused"
"""As the note of a name: none of its values is accepted."""
READ_AHEAD = "batches are read ahead by themselves"
BOOLEAN = "give 0 or 1"

# Names of the Trainer's that set nothing here: the values that are accepted, the note on them, the advice on others.
WITHOUT_EFFECT: dict[str, tuple[tuple[str, ...] | None, str, str]] = {
    "fp16": (OFF, "0: there is no float16", "there is no float16; give --bf16 1 (bfloat16), or --bf16 0 (float32)"),
    "optim": (("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "adamw_torch: the optimizer is AdamW",
              "the optimizer is AdamW: give adamw_torch"),
    "do_train": (ON, "1: the verb says it", "to validate and train nothing, give --evaluate_only 1"),
    "do_eval": (ANY, "--eval_steps N validates every N steps and at the end", BOOLEAN),
    "overwrite_output_dir": (ANY, "a start without --run_name is a new run, of another name", BOOLEAN),
    "save_strategy": (("steps",), "steps, of --save_steps", "give --save_steps N"),
    "logging_strategy": (("steps",), "steps, of --logging_steps", "give --logging_steps N"),
    "metric_for_best_model": (("loss", "eval_loss"), "loss: the validation loss", "the lowest validation loss is best"),
    "greater_is_better": (OFF, "0: the lowest validation loss is best", "the lowest validation loss is best"),
    "dataloader_num_workers": (COUNT, READ_AHEAD, ""),
    "dataloader_prefetch_factor": (COUNT, READ_AHEAD, ""),
    "preprocessing_num_workers": (COUNT, READ_AHEAD, ""),
    "dataloader_pin_memory": (ANY, READ_AHEAD, BOOLEAN),
    "dataloader_persistent_workers": (ANY, READ_AHEAD, BOOLEAN),
    "remove_unused_columns": (ANY, "unused columns are not read", BOOLEAN),
    "overwrite_cache": (ANY, "a cache that does not fit the data is made again", BOOLEAN),
    "use_fast_tokenizer": (ANY, "tokenizers are fast ones", BOOLEAN),
    "logging_first_step": (ANY, "--logging_steps says when", BOOLEAN),
    "keep_linebreaks": (ON, "1: text is read as it is", "text is read as it is"),
    "save_safetensors": (ON, "1: a final model is in safetensors", "a final model is always in safetensors"),
    "prediction_loss_only": (ON, "1: validation measures the loss", "validation always measures the loss alone"),
    "ddp_bucket_cap_mb": (COUNT, "gradients are reduced layer by layer", ""),
    "low_cpu_mem_usage": (ANY, "weights are streamed into each rank's part", BOOLEAN),
    "ddp_find_unused_parameters": (OFF, "0: there are none", "every parameter of a decoder-only model is used"),
    "use_peft": (OFF, "0: no adapters", "--lora_rank N trains adapters"),
    "pipeline_parallel_degree": (("1",), "1: there are no pipelines",
                                 "--tensor_parallel_degree and sharding split a model"),
    "torch_dtype": (("float32", "auto"), "float32 or auto: weights are float32",
                    "weights stay in float32; --bf16 1 computes in bfloat16"),
    "push_to_hub": (OFF, "0: nothing is uploaded", "--save_final_model 1 writes a folder, which `hf upload` sends"),
    "config_name": ((), REFUSED, "give --model_name_or_path a folder with that config.json and no weights, or "
                                 "--model_type with widths"),
    "deepspeed": ((), REFUSED,
                  "--sharding_strategy full_shard is ZeRO 3, shard_grad_op is ZeRO 2; --cpu_offload 1 offloads"),
    "fsdp_config": ((), REFUSED,
                    "give flags: --sharding_strategy, --hybrid_shard_degree, --cpu_offload, --forward_prefetch"),
}  # fmt: skip


def _count(text: str) -> dict[str, Any]:
    read_int(text)
    return {}


def _without_effect(name: str) -> Alias:
    accepted, note, advice = WITHOUT_EFFECT[name]
    if accepted is None:
        return Alias(name, ("trainer",), (), note, _count)
    read = _choice({word: {} for word in accepted}, advice)
    return Alias(name, ("trainer",), (), note, read, switch=bool({"0", "1"} & set(accepted)))


def _declared() -> list[Alias]:
    """Return the aliases that rows of flags declare; one in several rows sets all of these flags."""
    table = flags().values()
    rows = [(name, system, row.name) for row in table for system in row.aka for name in row.aka[system].split()]
    found: dict[str, Alias] = {}
    for name, system, ours in rows:
        known = found.get(name, Alias(name, (), ()))
        found[name] = Alias(name, _with(known.systems, system), _with(known.ours, ours))
    return list(found.values())


def _with(known: tuple[str, ...], one: str) -> tuple[str, ...]:
    return known if one in known else (*known, one)


ALIASES = tuple(
    sorted(
        [*_declared(), *TRANSLATED, *map(_without_effect, WITHOUT_EFFECT)],
        key=lambda alias: list(SYSTEMS).index(alias.systems[0]),
    )
)
NAMES = {name: Alias(name, (), (name,)) for name in flags()} | {each.name: each for each in ALIASES}
NAMES[MP_PARAMETERS] = Alias(MP_PARAMETERS, ("smp",), SMP_KEYS)
"""Every name that sets a flag: our own, the aliases, and SMP's parameter set."""
