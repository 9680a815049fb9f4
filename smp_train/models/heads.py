"""Which models' losses may be computed from their last hidden states and the weight of their head."""

from __future__ import annotations

from typing import Any

from torch import nn

PLAIN_HEADS = frozenset(
    {"falcon", "gpt2", "gpt_neox", "gptj", "llama", "mistral", "mixtral", "opt", "phi", "qwen2", "qwen3", "stablelm"}
)
"""Types of transformers whose logits are the head's product with the last hidden states and nothing more."""


def can_chunk(model: nn.Module) -> bool:
    """Tell whether the loss of this model may be computed from its last hidden states and its head's weight.

    Others scale or cap their logits, or add a loss of their own: they take the full logits.
    """
    config: Any = model.config
    return config.model_type in PLAIN_HEADS and not getattr(config, "output_router_logits", False)
