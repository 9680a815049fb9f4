"""Counts against published ones, FLOPs against figures computed independently of our code."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from smp_train.models.flops import count_parameters, flops_per_token
from smp_train.models.resolve import presets, resolve

# As the model cards (safetensors totals), papers and configuration tables give them.
PUBLISHED = {
    "codellama-7b": 6738546688,
    "falcon-7b": 6921720704,
    "gpt2-124m": 124439808,
    "gpt2-355m": 354823168,
    "gpt2-774m": 774030080,
    "gpt2-1.5b": 1557611200,
    "gpt_neox-20b": 20554567680,
    "llama_v2-7b": 6738415616,
    "llama_v2-13b": 13015864320,
    "llama_v2-70b": 68976648192,
    "llama_v3-1b": 1235814400,
    "llama_v3-3b": 3212749824,
    "llama_v3-8b": 8030261248,
    "llama_v3-70b": 70553706496,
    "llama_v3-405b": 405853388800,
    "mathstral-7b": 7248023552,
    "mistral-7b": 7241732096,
    "mixtral-8x7b": 46702792704,
    "phi-2.7b": 2779683840,
    # The ladder's larger rungs have the shapes of Llama 2 and of Llama 30B.
    "scratch-7b": 6738415616,
    "scratch-13b": 13015864320,
    "scratch-30b": 32528943616,
    "scratch-70b": 68976648192,
}


def falcon_40b() -> int:
    """Embedding 65024 x 8192 (tied); a layer: attention with 128 + 2 x 8 heads of 64, MLP, two norms."""
    hidden, heads, kv_heads, size = 8192, 128, 8, 64
    layer = hidden * (heads + 2 * kv_heads) * size + hidden * hidden + 8 * hidden * hidden + 4 * hidden
    return 65024 * hidden + 60 * layer + 2 * hidden


def ladder(layers: int, hidden: int, width: int) -> int:
    """Llama with 32000 tokens, untied, as many key-value heads as heads."""
    return 2 * 32000 * hidden + hidden + layers * (4 * hidden * hidden + 3 * hidden * width + 2 * hidden)


CALCULATED = {
    "falcon-40b": falcon_40b(),
    "scratch-350m": ladder(24, 1024, 2816),
    "scratch-1b": ladder(24, 2048, 5632),
    "scratch-3b": ladder(28, 3072, 8192),
}


def config_of(name: str):  # type: ignore[no-untyped-def]
    family, size = name.rsplit("-", 1)
    return resolve(SimpleNamespace(model_type=family, model_size=size)).config


def test_every_preset_is_counted_here() -> None:
    assert {preset.name for preset in presets().values()} == PUBLISHED.keys() | CALCULATED.keys()


@pytest.mark.parametrize("name", sorted(PUBLISHED | CALCULATED))
def test_parameters_are_the_published_number(name: str) -> None:
    family, size = name.rsplit("-", 1)
    expected = (PUBLISHED | CALCULATED)[name]
    assert count_parameters(config_of(name)) == expected
    assert presets()[family, size].parameters == expected


# GFLOP per token (full attention matrix / causal half), from hidden sizes by hand.
FIGURES = [
    ("llama_v2-7b", 4096, 46.1, 42.9),
    ("llama_v2-13b", 4096, 87.2, 82.1),
    ("llama_v2-70b", 4096, 444.5, 428.4),
    ("llama_v3-8b", 8192, 57.9, 51.5),
    ("llama_v3-70b", 8192, 481.4, 449.2),
    ("mistral-7b", 4096, 49.1, 45.9),
    ("mixtral-8x7b", 4096, 82.9, 79.7),
    ("gpt_neox-20b", 2048, 128.1, 124.8),
]


@pytest.mark.parametrize(("name", "seq_len", "full", "causal"), FIGURES)
def test_flops_per_token(name: str, seq_len: int, full: float, causal: float) -> None:
    config = config_of(name)
    assert round(flops_per_token(config, seq_len) / 1e9, 1) == full
    assert round(flops_per_token(config, seq_len, causal=True) / 1e9, 1) == causal


def test_a_tied_head_counts_once_and_positions_not() -> None:
    # GPT-2: 12 layers of 12 h^2 weights, and the head that is the embedding; h 768, 50257 tokens.
    matmul = 12 * 12 * 768**2 + 50257 * 768
    assert flops_per_token(config_of("gpt2-124m"), 1024) == 6 * matmul + 12 * 12 * 768 * 1024


def test_the_forward_half_agrees_with_what_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    flags = {"model_type": "llama_v2", "hidden_width": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 96}
    config = resolve(SimpleNamespace(**flags)).config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, 32, dtype=torch.long))
    assert counter.get_total_flops() == flops_per_token(config, 32) * 32 / 3
