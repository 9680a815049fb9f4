"""The flags of the systems smp-train replaces, and SMP's own configuration keys: one table.

An alias names one or more of our flags. Its value is read as our flag's type would read it, unless ``read``
translates it first. An alias of none is accepted with a note or refused, by its value. Names that several systems
share (``--batch_size``, ``--sharding_strategy``, ``--vocab_size``, ...) mean one thing in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smp_train.arguments.values import nearest, read_bool, read_float, read_int, unquote
from smp_train.errors import ConfigError

SMP = "SMP v2 samples (17.SM-modelparallelv2)"
FSDP = "AWS FSDP sample (10.FSDP)"
PROFILING = "AWS FSDP profiling sample (19.FSDP-llama2-profiling)"
MINIMAL = "minimal_fsdp"
FSDP2 = "FSDP2 LLM Training"
TRAINER = "Hugging Face Trainer"


@dataclass(frozen=True)
class Implied:
    """A value that gives way, in any order, to the same setting given by another flag of the same source."""

    value: Any


@dataclass(frozen=True)
class Alias:
    """Another system's name for a setting of ours."""

    name: str
    system: str
    ours: tuple[str, ...]
    help: str = ""
    # Reads the text and returns values (or `Implied` ones) by our names; raises ValueError with what was expected.
    read: Callable[[str], dict[str, Any]] | None = None
    # A switch may stand without a value.
    switch: bool = False


def _switch(ours: str, on: Any, off: Any) -> Callable[[str], dict[str, Any]]:
    return lambda text: {ours: on if read_bool(text) else off}


def _model_name(text: str) -> dict[str, Any]:
    """``llama2_7b`` is the preset 7b of llama_v2."""
    match = re.fullmatch(r"llama([23])(?:\.\d)?[_-](\d+(?:\.\d+)?b)", text.strip().lower())
    if not match:
        raise ValueError(
            "is not a name such as llama2_7b; any other model is chosen by --model_type and --model_size"
        )
    return {"model_type": f"llama_v{match[1]}", "model_size": match[2]}


def _model(text: str) -> dict[str, Any]:
    if text.strip().lower() != "mingpt":
        raise ValueError("is not mingpt; any other model is chosen by --model_type and --model_size")
    return {"model_type": "gpt2"}


def _precision(text: str) -> dict[str, Any]:
    known = {"float32": False, "fp32": False, "bf16": True, "bfloat16": True}
    if text.strip().lower() not in known:
        raise ValueError("is not float32 or bf16")
    return {"bf16": known[text.strip().lower()]}


def _max_epochs(text: str) -> dict[str, Any]:
    epochs = read_int(text)
    return {"evaluate_only": True} if epochs < 0 else {"epochs": epochs}


def _output_dir(text: str) -> dict[str, Any]:
    folder = unquote(text).rstrip("/") or "/"
    if "://" in folder:
        raise ValueError("holds the run folder too, which S3 cannot; give --run_dir FOLDER --checkpoint_dir s3://...")
    return {"run_dir": Implied(folder), "checkpoint_dir": Implied([f"{folder}/checkpoints"])}


def _lr_scheduler(text: str) -> dict[str, Any]:
    known: dict[str, dict[str, Any]] = {
        "linear": {"lr_decay_style": "linear", "min_lr": Implied(0.0)},
        "cosine": {"lr_decay_style": "cosine", "min_lr": Implied(0.0)},
        "cosine_with_min_lr": {"lr_decay_style": "cosine"},
        "constant": {"lr_decay_style": "constant", "warmup": Implied(0.0)},
        "constant_with_warmup": {"lr_decay_style": "constant"},
        "warmup_stable_decay": {"lr_decay_style": "wsd"},
    }
    return _chosen(text, known)


def _fsdp(text: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    strategies = {name: {"sharding_strategy": name} for name in ("full_shard", "shard_grad_op", "no_shard")}
    strategies["hybrid_shard"] = {"sharding_strategy": "hybrid_shard"}
    strategies["hybrid_shard_zero2"] = {"sharding_strategy": "_hybrid_shard_zero2"}
    for word in unquote(text).split():
        # Every decoder layer is wrapped, without being asked.
        values |= _chosen(word, strategies | {"auto_wrap": {}, "offload": {"cpu_offload": True}})
    return values


def _chosen(text: str, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    word = unquote(text).strip().lower()
    if word not in known:
        raise ValueError(f"is not one of {', '.join(known)}")
    return known[word]


def _choice(known: dict[str, dict[str, Any]], otherwise: str) -> Callable[[str], dict[str, Any]]:
    """Read one of a few words; any other is refused with what to do."""

    def read(text: str) -> dict[str, Any]:
        try:
            return _chosen(text, known)
        except ValueError:
            raise ValueError(f"is not available; {otherwise}") from None

    return read


def _only(accepted: tuple[str, ...], otherwise: str) -> Callable[[str], dict[str, Any]]:
    """Accept a few words, which change nothing; refuse any other with what to do."""
    return _choice({word: {} for word in accepted}, otherwise)


def _ignored_count(text: str) -> dict[str, Any]:
    read_int(text)
    return {}


def _warmup_ratio(text: str) -> dict[str, Any]:
    share = read_float(text)
    if not 0 <= share < 1:
        raise ValueError("expects a share of the run from 0 up to, not including, 1")
    return {"warmup": share}


OFF = ("0", "false", "no", "off", "none")
ON = ("1", "true", "yes", "on")
REFUSED = "refused"
"""As the help of an alias: none of its values is accepted."""
BOARDS: dict[str, dict[str, Any]] = {
    "none": {"tensorboard_dir": None},
    "tensorboard": {"tensorboard_dir": Implied(["{run_dir}/tensorboard"])},
}


def _same(pairs: str) -> tuple[Alias, ...]:
    """Return the aliases of Hugging Face's Trainer that only have another name, from ``theirs=ours`` words."""
    return tuple(Alias(theirs, TRAINER, (ours,)) for theirs, ours in (pair.split("=") for pair in pairs.split()))


ALIASES: tuple[Alias, ...] = (
    Alias("max_training_steps", SMP, ("max_steps",)),
    Alias("shard_degree", SMP, ("hybrid_shard_degree",)),
    Alias("offload_activations", SMP, ("sm_activation_offloading",)),
    Alias("llama_intermediate_size", SMP, ("intermediate_size",)),
    Alias("dataset_path", FSDP, ("training_dir",)),
    Alias("model_name", PROFILING, ("model_type", "model_size"), "such as llama2_7b", read=_model_name),
    Alias("ckpt_load_path", PROFILING, ("resume_from_checkpoint",)),
    Alias("ckpt_save_path", PROFILING, ("checkpoint_dir",)),
    Alias("data_path", PROFILING, ("training_dir",)),
    Alias("fsdp_activation_checkpointing", PROFILING, ("activation_checkpointing",)),
    Alias("low_cpu_fsdp", PROFILING, ("delayed_param",)),
    Alias("batch_size", f"{PROFILING}, {MINIMAL}, {FSDP2}", ("train_batch_size",)),
    Alias("report_interval", PROFILING, ("logging_freq",)),
    Alias("checkpoint_interval", f"{PROFILING}, {FSDP2}", ("checkpoint_freq",)),
    Alias("model", MINIMAL, ("model_type",), "mingpt", read=_model),
    Alias("seq_len", f"{MINIMAL}, {FSDP2}", ("max_context_width",)),
    Alias("embed_size", MINIMAL, ("hidden_width",)),
    Alias("restart_checkpoint_file", MINIMAL, ("resume_from_checkpoint",)),
    Alias("sharding", MINIMAL, ("sharding_strategy",)),
    Alias("precision", MINIMAL, ("bf16",), "float32 or bf16", read=_precision),
    Alias("activation_checkpoints", MINIMAL, ("activation_checkpointing",)),
    Alias("meta_init", MINIMAL, ("delayed_param",)),
    Alias("train_data", MINIMAL, ("training_dir",)),
    Alias("val_data", MINIMAL, ("test_dir",)),
    Alias("max_epochs", MINIMAL, ("epochs", "evaluate_only"), "below 0: evaluate only", read=_max_epochs),
    Alias("dropout", MINIMAL, ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    Alias("hf_model", FSDP2, ("hf_pretrained_model_name_or_dir",)),
    Alias("grad_accum_steps", FSDP2, ("gradient_accumulation_steps",)),
    Alias("max_lr", FSDP2, ("lr",)),
    Alias(
        "warmup_steps", f"{FSDP2}, {TRAINER}", ("warmup",), "a number of steps",
        read=lambda text: {"warmup": read_int(text)},
    ),
    Alias("num_epochs", FSDP2, ("epochs",)),
    Alias("mixed_precision", FSDP2, ("bf16",)),
    Alias(
        "use_flash_attn",
        FSDP2,
        ("attn_implementation",),
        "flash_attention_2, or sdpa when 0",
        read=_switch("attn_implementation", "flash_attention_2", "sdpa"),
        switch=True,
    ),
    Alias("log_interval", FSDP2, ("logging_freq",)),
    *_same(
        "learning_rate=lr per_device_train_batch_size=train_batch_size per_device_eval_batch_size=val_batch_size "
        "num_train_epochs=epochs save_steps=checkpoint_freq save_total_limit=num_kept_checkpoints "
        "logging_steps=logging_freq eval_steps=validation_freq model_name_or_path=hf_pretrained_model_name_or_dir "
        "tokenizer_name=tokenizer dataset_name=dataset train_file=dataset validation_file=test_dir "
        "gradient_checkpointing=activation_checkpointing adam_beta1=beta1 adam_beta2=beta2 max_grad_norm=grad_clip "
        "block_size=max_context_width max_seq_length=max_context_width model_max_length=max_context_width "
        "torch_compile=use_torch_compile logging_dir=tensorboard_dir ddp_backend=distributed_backend"
    ),
    Alias("output_dir", TRAINER, ("run_dir", "checkpoint_dir"), "DIR: DIR and DIR/checkpoints", read=_output_dir),
    Alias("warmup_ratio", TRAINER, ("warmup",), "a share of the run", read=_warmup_ratio),
    Alias(
        "lr_scheduler_type", TRAINER, ("lr_decay_style", "min_lr", "warmup"),
        "linear and cosine end at 0, constant has no warm-up", read=_lr_scheduler,
    ),
    Alias(
        "report_to", TRAINER, ("tensorboard_dir",), "tensorboard (in RUN_DIR/tensorboard) or none",
        read=_choice(BOARDS, "give tensorboard or none; the numbers of each step are in metrics.jsonl"),
    ),
    Alias("fsdp", TRAINER, ("sharding_strategy", "cpu_offload"), 'such as "full_shard auto_wrap"', read=_fsdp),
    Alias(
        "ddp_timeout", TRAINER, ("distributed_timeout_minutes",), "in seconds",
        read=lambda text: {"distributed_timeout_minutes": read_float(text) / 60},
    ),
    Alias(
        "eval_strategy", TRAINER, ("validation_freq",), "steps (as --eval_steps says) or no",
        read=_choice({"steps": {}, "no": {"validation_freq": None}}, "give --eval_steps N"),
    ),
    Alias(
        "evaluation_strategy", TRAINER, ("validation_freq",), "as --eval_strategy",
        read=_choice({"steps": {}, "no": {"validation_freq": None}}, "give --eval_steps N"),
    ),
    Alias(
        "fp16", TRAINER, (), "0: float16 is not used", switch=True,
        read=_only(OFF, "training in float16 is not available; give --bf16 1 (bfloat16), or --bf16 0 (float32)"),
    ),
    Alias("optim", TRAINER, (), "adamw_torch: the optimizer is always AdamW", read=_only(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"), "the optimizer is AdamW: give adamw_torch",
    )),
    Alias("do_train", TRAINER, (), "1: the verb says it", switch=True,
          read=_only(ON, "to validate and train nothing, give --evaluate_only 1")),
    Alias("do_eval", TRAINER, (), "--eval_steps N validates every N steps and at the end", switch=True,
          read=_only((*ON, *OFF), "give 0 or 1")),
    Alias("overwrite_output_dir", TRAINER, (), "a run without --resume_from_checkpoint begins anew",
          switch=True, read=_only((*ON, *OFF), "give 0 or 1")),
    Alias("save_strategy", TRAINER, (), "steps: --save_steps says when", read=_only(("steps",), "give --save_steps N")),
    Alias("logging_strategy", TRAINER, (), "steps: --logging_steps says when",
          read=_only(("steps",), "give --logging_steps N")),
    Alias("load_best_model_at_end", TRAINER, (), "0: the newest are kept", switch=True, read=_only(
        OFF, "the newest checkpoints are kept; metrics.jsonl says which validated best")),
    *(Alias(name, TRAINER, (), "batches are read ahead by themselves", read=_ignored_count)
      for name in ("dataloader_num_workers", "dataloader_prefetch_factor", "preprocessing_num_workers")),
    *(Alias(name, TRAINER, (), note, switch=True, read=_only((*ON, *OFF), "give 0 or 1")) for name, note in (
        ("dataloader_pin_memory", "batches are read ahead by themselves"),
        ("dataloader_persistent_workers", "batches are read ahead by themselves"),
        ("remove_unused_columns", "columns that are not trained on are not read"),
        ("overwrite_cache", "a cache that does not fit the data is made again"),
        ("use_fast_tokenizer", "tokenizers are the fast ones"),
        ("logging_first_step", "--logging_steps says when"),
        ("disable_tqdm", "there is no bar"),
    )),
    *(Alias(name, TRAINER, (), f"1: {note}", switch=True, read=_only(ON, note)) for name, note in (
        ("streaming", "text is always tokenised as it is read"),
        ("keep_linebreaks", "text is read as it is"),
        ("save_safetensors", "a final model is always in safetensors"),
        ("prediction_loss_only", "validation always measures the loss alone"),
    )),
    Alias("ddp_bucket_cap_mb", TRAINER, (), "gradients are reduced layer by layer", read=_ignored_count),
    Alias("low_cpu_mem_usage", TRAINER, (), "weights are streamed into each rank's part", switch=True,
          read=_only((*ON, *OFF), "give 0 or 1")),
    Alias("ddp_find_unused_parameters", TRAINER, (), "0: there are none", switch=True,
          read=_only(OFF, "every parameter of a decoder-only model is used")),
    Alias("torch_dtype", TRAINER, (), "float32 or auto: weights are float32",
          read=_only(("float32", "auto"), "weights stay in float32; --bf16 1 computes in bfloat16")),
    Alias("config_name", TRAINER, (), REFUSED, read=_only(
        (), "give --model_name_or_path a folder with that config.json and no weights, or --model_type with widths")),
    Alias("deepspeed", TRAINER, (), REFUSED, read=_only(
        (), "--sharding_strategy full_shard is ZeRO 3, shard_grad_op is ZeRO 2; --cpu_offload 1 offloads")),
    Alias("fsdp_config", TRAINER, (), REFUSED, read=_only(
        (), "give flags: --sharding_strategy, --hybrid_shard_degree, --cpu_offload, --forward_prefetch")),
    Alias("push_to_hub", TRAINER, (), "0: nothing is uploaded", switch=True,
          read=_only(OFF, "--save_final_model 1 writes a folder, which `hf upload` sends")),
)  # fmt: skip

BY_NAME: dict[str, Alias] = {alias.name: alias for alias in ALIASES}

# SMP's nine documented configuration keys; each is a flag of ours by the same name.
SMP_KEYS = (
    "hybrid_shard_degree",
    "sm_activation_offloading",
    "activation_loading_horizon",
    "fsdp_cache_flush_warnings",
    "allow_empty_shards",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "random_seed",
)
# SageMaker's SDK sends this one itself with recipes; SMP v2 tolerates it.
SMP_TOLERATED = frozenset({"placement_strategy"})
SMP_V1_KEYS = frozenset(
    {
        "active_microbatches", "auto_partition", "bf16", "checkpoint_attentions", "ddp", "ddp_dist_backend",
        "default_partition", "delayed_parameter_initialization", "fp16", "fp16_params", "memory_weight",
        "microbatches",
        "offload_activations", "optimize", "partitions", "pipeline", "pipeline_parallel_degree",
        "prescaled_batch", "sdp_gradient_clipping", "sdp_hierarchical_allgather", "sdp_max_live_parameters",
        "sdp_param_persistence_threshold", "sdp_reduce_bucket_size", "sharded_data_parallel_degree",
        "shard_optimizer_state", "skip_tracing",
    }
)  # fmt: skip


def _pairs(text: str, spelling: str) -> dict[str, Any]:
    """Read ``{"k": v}`` or ``k=v,k=v``."""
    text = text.strip()
    if text.startswith(("{", '"')):
        try:
            parsed = json.loads(text)
            parsed = json.loads(parsed) if isinstance(parsed, str) and parsed.startswith("{") else parsed
        except ValueError:
            raise ConfigError(f"{spelling}: neither JSON nor key=value,key=value: {text!r}") from None
        if isinstance(parsed, dict):
            return parsed
        text = str(parsed)
    found: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{spelling}: {pair!r} is not key=value")
        found[key.strip()] = unquote(value.strip())
    return found


def read_mp_parameters(value: Any, spelling: str) -> tuple[dict[str, Any], list[str]]:
    """Return (values by our flags' names, keys that have no effect) of an SMP parameter set."""
    if value in (None, "", "None", "{}", {}):
        return {}, []
    pairs = value if isinstance(value, dict) else _pairs(str(value), spelling)
    settings, tolerated = {}, []
    for key, setting in pairs.items():
        if key in SMP_KEYS:
            settings[key] = setting
        elif key in SMP_TOLERATED:
            tolerated.append(key)
        elif key in SMP_V1_KEYS:
            raise ConfigError(
                f"{spelling}: {key!r} is a parameter of SMP v1, which has no counterpart here; "
                f"the parameters are {', '.join(SMP_KEYS)}"
            )
        else:
            hint = nearest(key, SMP_KEYS) or f"; known: {', '.join(SMP_KEYS)}"
            raise ConfigError(f"{spelling}: unknown SMP parameter {key!r}{hint}")
    return settings, tolerated
