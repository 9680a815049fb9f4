"""Properties of a Hugging Face model that its loss, its packed rows and its split over ranks depend on."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from smp_train.distributed.host import older
from smp_train.errors import ConfigError
from smp_train.models.lora import is_adapted

PLAIN_HEADS = frozenset(
    {"falcon", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt", "phi", "qwen2", "qwen3", "stablelm"}
)
"""Model types whose logits are the product of the head and the last hidden states, neither scaled nor capped."""
WITHOUT_PACKED_MASK = frozenset({"falcon"})
"""Model types for which transformers 5 does not derive the attention mask of packed rows from positions."""
OLDEST_TRANSFORMERS_OF_EXPERTS = "5.6"
"""In transformers 4 an expert without tokens has no gradient, so ranks would reduce different sets of gradients. 5.0 to
5.5 leave the outputs of tokens routed to another rank's experts uninitialized, which gives wrong gradients and nan."""


def check_loss(config: Any) -> None:
    """Raise `ConfigError` for a configuration that adds a term to the cross entropy."""
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"output_router_logits of this {config.model_type} asks for a load-balancing loss beside the cross "
            "entropy, which is not available on SMP; set it to false in config.json, or use --backend native"
        )


def can_chunk(model: Any) -> bool:
    """Return whether the loss can be computed in chunks, from the last hidden states and the head's weight."""
    return model.config.model_type in PLAIN_HEADS and not is_adapted(model.get_output_embeddings())


def check_packed(config: Any, short: str | None) -> None:
    """Raise `ConfigError` for packed rows of a model that would attend from one document to another."""
    if short == "pack" and config.model_type in WITHOUT_PACKED_MASK:
        raise ConfigError(f"--short pack: a {config.model_type} would mix the documents of a row; give --short concat")


def same_document(position_ids: Tensor) -> Tensor:
    """Return a causal mask within documents, bool ``[batch, 1, seq, seq]``: True at [..., i, j] if i attends to j."""
    document = (position_ids == 0).cumsum(dim=1)
    same = document[:, :, None] == document[:, None, :]
    return (same & causal(position_ids.shape[1], position_ids.device)).unsqueeze(1)


def causal(tokens: int, device: torch.device, *, earlier: int = 0) -> Tensor:
    """Return a causal mask, bool ``[tokens, earlier + tokens]``: True for a token itself and all tokens before it."""
    return torch.ones(tokens, earlier + tokens, dtype=torch.bool, device=device).tril(earlier)


def number_of_experts(config: Any) -> int:
    """Return the number of experts per layer, 0 for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    counts = (getattr(config, name, None) for name in names)
    return next((count for count in counts if isinstance(count, int) and count > 1), 0)


def check_experts(config: Any) -> None:
    """Raise `ConfigError` for a mixture of experts that the installed transformers cannot train sharded."""
    if number_of_experts(config) and older(version("transformers"), OLDEST_TRANSFORMERS_OF_EXPERTS):
        raise ConfigError(
            f"a mixture of experts ({config.model_type}) needs transformers {OLDEST_TRANSFORMERS_OF_EXPERTS} or newer "
            f"on the native backend, this is {version('transformers')}; upgrade transformers, or use --backend smp"
        )


def split_sizes(config: Any) -> dict[str, int]:
    """Return the sizes that tensor parallelism splits, by their names in messages."""
    heads = int(config.num_attention_heads)
    sizes = {
        "attention heads": heads,
        "key-value heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "tokens of vocabulary": int(config.vocab_size),
    }
    if experts := number_of_experts(config):
        return sizes | {"experts": experts}
    inner = getattr(config, "intermediate_size", None)
    return sizes | ({"columns of the feed-forward layer": int(inner)} if inner else {})
