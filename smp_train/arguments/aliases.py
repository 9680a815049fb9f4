"""The flags of the systems smp-train replaces, and SMP's own configuration keys: one table.

An alias names one or more of our flags. Its value is read as our flag's type would read it, unless ``read``
translates it first. Names that several systems share (``--batch_size``, ``--sharding_strategy``,
``--vocab_size``, ...) mean one thing in all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from smp_train.arguments.values import nearest, read_bool, read_int, unquote
from smp_train.errors import ConfigError

SMP = "SMP v2 samples (17.SM-modelparallelv2)"
FSDP = "AWS FSDP sample (10.FSDP)"
PROFILING = "AWS FSDP profiling sample (19.FSDP-llama2-profiling)"
MINIMAL = "minimal_fsdp"
FSDP2 = "FSDP2 LLM Training"


@dataclass(frozen=True)
class Alias:
    """Another system's name for a setting of ours."""

    name: str
    system: str
    ours: tuple[str, ...]
    help: str = ""
    # Reads the text and returns values by our names; raises ValueError with what was expected.
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
        "warmup_steps", FSDP2, ("warmup",), "a number of steps", read=lambda text: {"warmup": read_int(text)}
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
)

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
