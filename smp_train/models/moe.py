"""Mixtures of experts, as their configurations tell them."""

from __future__ import annotations

from typing import Any

from smp_train.errors import ConfigError

OLDEST_TRANSFORMERS = 5
"""Older ones make a module of each expert: one without tokens has no gradient, and ranks would reduce unlike ones."""


def number_of_experts(config: Any) -> int:
    """Return how many experts a layer of the model has, 0 for a model without."""
    for name in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        count = getattr(config, name, None)
        if isinstance(count, int) and count > 1:
            return count
    return 0


def split_sizes(config: Any) -> dict[str, int]:
    """Return the sizes of the model that tensor parallelism splits, by what a message calls them."""
    experts = number_of_experts(config)
    heads = int(config.num_attention_heads)
    sizes = {
        "attention heads": heads,
        "key-value heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "tokens of vocabulary": int(config.vocab_size),
    }
    if experts:
        return sizes | {"experts": experts}
    inner = getattr(config, "intermediate_size", None)
    return sizes | ({"columns of the feed-forward layer": int(inner)} if inner else {})


def check(config: Any) -> None:
    """Raise `ConfigError` for a mixture of experts where the installed transformers cannot train it sharded."""
    from transformers import __version__

    if number_of_experts(config) and int(__version__.split(".")[0]) < OLDEST_TRANSFORMERS:
        raise ConfigError(
            f"a mixture of experts ({config.model_type}) needs transformers {OLDEST_TRANSFORMERS} or newer on the "
            f"native backend, this is {__version__}; upgrade transformers, or use --backend smp"
        )
