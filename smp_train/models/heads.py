"""Which models' losses may be computed from their last hidden states and the weight of their head."""

from __future__ import annotations

from typing import Any

from torch import nn

from smp_train.errors import ConfigError

PLAIN_HEADS = frozenset(
    {"falcon", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt", "phi", "qwen2", "qwen3", "stablelm"}
)
"""Types of transformers whose logits are the head's product with the last hidden states and nothing more."""


def check(config: Any) -> None:
    """Raise `ConfigError` for a configuration that wants more than the cross entropy in the loss."""
    if getattr(config, "output_router_logits", False):
        raise ConfigError(
            f"output_router_logits of this {config.model_type} asks for a load-balancing loss beside the cross "
            "entropy, which is not available; set it to false in config.json"
        )


def can_chunk(model: nn.Module) -> bool:
    """Tell whether the loss of this model may be computed from its last hidden states and its head's weight.

    Others scale or cap their logits: they take the full logits.
    """
    config: Any = model.config
    return config.model_type in PLAIN_HEADS
