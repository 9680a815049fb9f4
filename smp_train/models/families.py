"""Model families: configuration fields by flag, and defaults where neither a flag nor a preset gives a value.

Field names are those of transformers 4 (``rope_theta``, ``rope_scaling``, ``rotary_pct``, ``partial_rotary_factor``);
transformers 5 converts them to its ``rope_parameters`` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Flag -> configuration field, under its most common name.
COMMON = {
    "vocab_size": "vocab_size",
    "hidden_width": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_context_width": "max_position_embeddings",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}
LLAMA_LIKE = COMMON | {
    "num_key_value_heads": "num_key_value_heads",
    "intermediate_size": "intermediate_size",
    "attn_pdrop": "attention_dropout",
    "rotary_emb_base": "rope_theta",
}
ROPE_SCALING = {
    "rope_scaling_type": "rope_type",
    "rope_scaling_factor": "factor",
    "rope_scaling_high_freq_factor": "high_freq_factor",
    "rope_scaling_low_freq_factor": "low_freq_factor",
    "rope_scaling_original_max_position_embeddings": "original_max_position_embeddings",
}
EXPERTS = {"num_experts_per_tok": "num_experts_per_tok", "num_local_experts": "num_local_experts"}
WINDOW = {"sliding_window": "sliding_window"}
# All flags of the model; each must reach the configuration or be refused.
MODEL_FLAGS = (
    *LLAMA_LIKE, "rotary_pct", "resid_pdrop", "embd_pdrop", *WINDOW, *EXPERTS, *ROPE_SCALING,
)  # fmt: skip


def llama_width(hidden: int) -> int:
    """Return Llama's SwiGLU width: 8/3 of the hidden size, rounded up to a multiple of 256 (11008 at 4096)."""
    return -(-8 * hidden // (3 * 256)) * 256


def wide_width(hidden: int) -> int:
    """Return the SwiGLU width of Llama 3 8B, Mistral and Mixtral: 3.5 times the hidden size (14336 at 4096)."""
    return 7 * hidden // 2


def four_width(hidden: int) -> int:
    """Return GPT's feed-forward width: 4 times the hidden size."""
    return 4 * hidden


@dataclass(frozen=True)
class Family:
    """One model family."""

    hf_model_type: str
    """``model_type`` of the transformers configuration."""
    fields: dict[str, str]
    """Flag -> configuration field."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Fields of a model built from widths, without a preset."""
    width: Callable[[int], int] = four_width
    """Feed-forward width as a function of the hidden size."""


def _tokens(bos: int, eos: int) -> dict[str, int]:
    return {"bos_token_id": bos, "eos_token_id": eos}


_LLAMA = {"vocab_size": 32000, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **_tokens(1, 2)}
_LLAMA3 = _LLAMA | {"vocab_size": 128256, "rope_theta": 500000.0, **_tokens(128000, 128001)}
_LLAMA_FIELDS, _MISTRAL_FIELDS = LLAMA_LIKE | ROPE_SCALING, LLAMA_LIKE | WINDOW
_MISTRAL = _LLAMA | {"sliding_window": None}

FAMILIES: dict[str, Family] = {
    "gpt_neox": Family(
        "gpt_neox",
        COMMON
        | {"intermediate_size": "intermediate_size", "rotary_pct": "rotary_pct", "rotary_emb_base": "rotary_emb_base"}
        | {"resid_pdrop": "hidden_dropout", "attn_pdrop": "attention_dropout"},
        {"vocab_size": 50432, "rotary_pct": 0.25, "rotary_emb_base": 10000, **_tokens(0, 0)},
    ),
    "llama_v2": Family("llama", _LLAMA_FIELDS, _LLAMA, llama_width),
    "llama_v3": Family("llama", _LLAMA_FIELDS, _LLAMA3, wide_width),
    "codellama": Family("llama", _LLAMA_FIELDS, _LLAMA | {"vocab_size": 32016, "rope_theta": 1e6}, llama_width),
    "scratch": Family("llama", _LLAMA_FIELDS, _LLAMA, llama_width),
    "mistral": Family("mistral", _MISTRAL_FIELDS, _MISTRAL, wide_width),
    "mathstral": Family("mistral", _MISTRAL_FIELDS, _MISTRAL | {"vocab_size": 32768}, wide_width),
    "mixtral": Family(
        "mixtral",
        _MISTRAL_FIELDS | EXPERTS,
        _LLAMA | {"rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
        wide_width,
    ),
    "gpt2": Family(
        "gpt2",
        COMMON
        | {"hidden_width": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "intermediate_size": "n_inner"}
        | {"max_context_width": "n_positions", **{name: name for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}},
        {"vocab_size": 50257, "tie_word_embeddings": True},
    ),
    "falcon": Family(
        "falcon",
        COMMON
        | {"num_key_value_heads": "num_kv_heads", "intermediate_size": "ffn_hidden_size"}
        | {"rotary_emb_base": "rope_theta", "resid_pdrop": "hidden_dropout", "attn_pdrop": "attention_dropout"},
        {"vocab_size": 65024, "tie_word_embeddings": True, "bias": False, **_tokens(11, 11)},
    ),
    "phi": Family(
        "phi",
        LLAMA_LIKE | {"rotary_pct": "partial_rotary_factor", "resid_pdrop": "resid_pdrop", "embd_pdrop": "embd_pdrop"},
        {"vocab_size": 51200, "partial_rotary_factor": 0.4, "hidden_act": "gelu_new", "tie_word_embeddings": False},
    ),
}
# Other names of these families.
SYNONYMS = {
    "llama": "llama_v2", "llama2": "llama_v2", "llama3": "llama_v3", "llama_v3_1": "llama_v3", "phi2": "phi",
}  # fmt: skip


def other_family(hf_model_type: str) -> Family:
    """Return a family for a transformers type without an entry here: those of its fields that have common names."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[hf_model_type]()
    usual = FAMILIES["mixtral"].fields | FAMILIES["phi"].fields
    renamed = getattr(config, "attribute_map", {})
    known = {flag: name for flag, name in usual.items() if hasattr(config, name) or name == "rope_theta"}
    return Family(hf_model_type, {flag: renamed.get(name, name) for flag, name in known.items()})
