"""FSDP1's flat parameters: the order of what they hold."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

from smp_train.errors import CheckpointError
from smp_train.models.layouts import flat_order

TINY = {"num_hidden_layers": 11, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 4, "vocab_size": 32}
MORE = {"mixtral": {"num_local_experts": 11}, "llama": {"attention_bias": True, "mlp_bias": True}}


@pytest.mark.skipif(not transformers.__version__.startswith("4."), reason="the container has transformers 4")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mistral", "mixtral", "gpt_neox", "gpt2"])
def test_flat_order_is_the_order_of_registration(kind: str, tied: bool) -> None:
    heads = {} if kind in ("gpt_neox", "gpt2") else {"num_key_value_heads": 2}
    settings = {**TINY, **heads, **MORE.get(kind, {}), "tie_word_embeddings": tied}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **settings)
        names = [name for name, _ in transformers.AutoModelForCausalLM.from_config(config).named_parameters()]
    mixed = random.Random(0).sample(names, len(names))
    assert flat_order(kind, mixed) == names


def test_unknown_types_and_parameters_are_refused() -> None:
    with pytest.raises(CheckpointError, match="qwen3"):
        flat_order("qwen3", ["model.norm.weight"])
    with pytest.raises(CheckpointError, match="q_norm"):
        flat_order("llama", ["model.norm.weight", "model.layers.0.self_attn.q_norm.weight"])
