"""Number of parameters of a model, and floating-point operations per token."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from smp_train.models.hugging_face import model_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

EXPERT = re.compile(r"\.experts\.")


def count_parameters(config: PretrainedConfig) -> int:
    """Return the number of parameters; tied parameters are counted once."""
    return _counts(config)[0]


def flops_per_token(config: PretrainedConfig, seq_len: int, *, frozen: bool = False) -> float:
    """Return the model FLOPs of forward and backward for one token: ``6 N + 12 L H d S``.

    N: active parameters in matrix products (with the output head; without embedding look-ups, norms and biases); L
    layers, H heads, d head size, S ``seq_len``. Recomputation under activation checkpointing does not count. The
    formula is PaLM's (Chowdhery et al. 2022, appendix B); nanoGPT and torchtitan use it, too. Attention counts the full
    S x S matrix, also with a sliding window or several documents. ``frozen`` weights have no gradient: ``4 N``, and
    adapters do not count.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_dim * seq_len
    return float((4 if frozen else 6) * _counts(config)[1] + attention)


def _counts(config: PretrainedConfig) -> tuple[int, int]:
    """Return the number of parameters, and of the parameters that one token uses in matrix products."""
    config_class: Any = type(config)
    return _count(config_class, json.dumps(config.to_dict(), sort_keys=True, default=str))


@lru_cache(maxsize=64)
def _count(config_class: Any, config_json: str) -> tuple[int, int]:
    """Count the parameters of a model built on meta, which is exact for every model of transformers."""
    import torch
    from torch import nn

    from smp_train.models.traits import number_of_experts

    config = config_class.from_dict(json.loads(config_json))
    with torch.device("meta"):
        model = model_of(config)
    head = model.get_output_embeddings()
    looked_up = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if head is not None:
        looked_up.discard(id(head.weight))
    experts, per_token = number_of_experts(config), getattr(config, "num_experts_per_tok", None)
    share = per_token / experts if experts and per_token else 1.0  # a token is routed to some of the experts
    in_products = sum(
        param.numel() * (share if EXPERT.search(name) else 1.0)
        for name, param in model.named_parameters()
        if param.dim() > 1 and id(param) not in looked_up
    )
    return sum(param.numel() for param in model.parameters()), round(in_products)
