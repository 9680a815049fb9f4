"""Model families: the configuration field of each flag, and the configuration of models without a preset.

Fields have the names of transformers 4 (``rope_theta``, ``rope_scaling``, ``rotary_pct``, ``partial_rotary_factor``);
transformers 5 converts them to its ``rope_parameters`` itself.

A model type outside `attention.KNOWN` has transformers' masks and no context parallelism; the loss of one outside
`traits.PLAIN_HEADS` is not computed in chunks. Add a new family to each table whose condition it meets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def _same(*names: str) -> dict[str, str]:
    """Return the table of flags that have the same name as their configuration field."""
    return {name: name for name in names}


COMMON = {
    "hidden_width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_context_width": "max_position_embeddings",
    **_same("vocab_size", "initializer_range", "tie_word_embeddings"),
}
"""Most common configuration field of each flag."""
LLAMA_LIKE = (
    COMMON
    | _same("num_key_value_heads", "intermediate_size")
    | {"attn_pdrop": "attention_dropout", "rotary_emb_base": "rope_theta"}
)
ROPE_SCALING = {
    "rope_scaling_type": "rope_type",
    "rope_scaling_factor": "factor",
    "rope_scaling_high_freq_factor": "high_freq_factor",
    "rope_scaling_low_freq_factor": "low_freq_factor",
    "rope_scaling_original_max_position_embeddings": "original_max_position_embeddings",
}
"""Keys of the configuration's ``rope_scaling``, by flag."""
EXPERTS = _same("num_experts_per_tok", "num_local_experts")
WINDOW = _same("sliding_window")
MODEL_FLAGS = (*LLAMA_LIKE, "rotary_pct", "resid_pdrop", "embd_pdrop", *WINDOW, *EXPERTS, *ROPE_SCALING)
"""All flags that describe a model. A family refuses the flags that it has no field for."""


@dataclass(frozen=True)
class Family:
    """A model family."""

    hf_model_type: str
    """``model_type`` in transformers."""
    fields: dict[str, str]
    """Configuration field of each flag."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Configuration of a model without a preset, except its widths."""
    feed_forward: Callable[[int], int] = lambda hidden: 4 * hidden
    """Default feed-forward width for a hidden size."""


def _llama_width(hidden: int) -> int:
    """Return Llama's feed-forward width: 8/3 of the hidden size, rounded up to a multiple of 256 (11008 at 4096)."""
    return -(-8 * hidden // (3 * 256)) * 256


def _wide(hidden: int) -> int:
    """Return the feed-forward width of Llama 3 8B, Mistral and Mixtral: 14336 at 4096."""
    return 7 * hidden // 2


def _tokens(bos: int, eos: int) -> dict[str, int]:
    return {"bos_token_id": bos, "eos_token_id": eos}


_LLAMA = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **_tokens(1, 2)}
_LLAMA3 = _LLAMA | {"vocab_size": 128256, "rope_theta": 500000.0, **_tokens(128000, 128001)}
_MISTRAL = _LLAMA | {"sliding_window": None}
_MIXTRAL = _LLAMA | {"rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2}
_HIDDEN_DROPOUTS = {"resid_pdrop": "hidden_dropout", "attn_pdrop": "attention_dropout"}

FAMILIES: dict[str, Family] = {
    "gpt_neox": Family(
        "gpt_neox",
        COMMON | _same("intermediate_size", "rotary_pct", "rotary_emb_base") | _HIDDEN_DROPOUTS,
        {"vocab_size": 50432, "rotary_pct": 0.25, "rotary_emb_base": 10000, **_tokens(0, 0)},
    ),
    "llama_v2": Family("llama", LLAMA_LIKE | ROPE_SCALING, _LLAMA, _llama_width),
    "llama_v3": Family("llama", LLAMA_LIKE | ROPE_SCALING, _LLAMA3, _wide),
    "codellama": Family(
        "llama", LLAMA_LIKE | ROPE_SCALING, _LLAMA | {"vocab_size": 32016, "rope_theta": 1e6}, _llama_width
    ),
    "scratch": Family("llama", LLAMA_LIKE | ROPE_SCALING, _LLAMA, _llama_width),
    "mistral": Family("mistral", LLAMA_LIKE | WINDOW, _MISTRAL, _wide),
    "mathstral": Family("mistral", LLAMA_LIKE | WINDOW, _MISTRAL | {"vocab_size": 32768}, _wide),
    "mixtral": Family("mixtral", LLAMA_LIKE | WINDOW | EXPERTS, _MIXTRAL, _wide),
    "gpt2": Family(
        "gpt2",
        COMMON
        | {"hidden_width": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "intermediate_size": "n_inner"}
        | {"max_context_width": "n_positions"}
        | _same("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        {"vocab_size": 50257, "tie_word_embeddings": True},
    ),
    "falcon": Family(
        "falcon",
        COMMON
        | {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"}
        | {"rotary_emb_base": "rope_theta", **_HIDDEN_DROPOUTS},
        {"vocab_size": 65024, "tie_word_embeddings": True, "bias": False, **_tokens(11, 11)},
    ),
    "phi": Family(
        "phi",
        LLAMA_LIKE | {"rotary_pct": "partial_rotary_factor"} | _same("resid_pdrop", "embd_pdrop"),
        {"vocab_size": 51200, "partial_rotary_factor": 0.4, "hidden_act": "gelu_new", "tie_word_embeddings": False},
    ),
}
SYNONYMS = {
    "llama": "llama_v2", "llama2": "llama_v2", "llama3": "llama_v3", "llama_v3_1": "llama_v3", "phi2": "phi",
}  # fmt: skip
"""Families by their alternative names."""


def family_of(hf_model_type: str) -> Family:
    """Return the first family with a transformers ``model_type``, else one with its fields that have common names."""
    for family in FAMILIES.values():
        if family.hf_model_type == hf_model_type:
            return family
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[hf_model_type]()
    common = FAMILIES["mixtral"].fields | FAMILIES["phi"].fields
    renamed = getattr(config, "attribute_map", {})
    known = {flag: name for flag, name in common.items() if hasattr(config, name) or name == "rope_theta"}
    return Family(hf_model_type, {flag: renamed.get(name, name) for flag, name in known.items()})
