"""Counts against published ones, FLOPs against figures computed independently of our code."""


import pytest
import torch
from transformers import AutoModelForCausalLM

from smp_train.arguments import Arguments
from smp_train.models.flops import count_parameters, flops_per_token
from smp_train.models.resolve import Preset, presets, resolve


def config_of(name: str):  # type: ignore[no-untyped-def]
    family, size = name.rsplit("-", 1)
    return resolve(Arguments(model_type=family, model_size=size)).config


@pytest.mark.parametrize("preset", presets().values(), ids=lambda preset: preset.name)
def test_parameters_are_the_published_number(preset: Preset) -> None:
    """As the preset has it from a model card, a paper or a configuration table (its ``source``)."""
    assert count_parameters(config_of(preset.name)) == preset.parameters


@pytest.mark.parametrize(
    ("name", "seq_len", "gigaflops"),  # per token, from hidden sizes by hand
    [("llama_v2-7b", 4096, 46.1), ("llama_v2-70b", 4096, 444.5), ("llama_v3-8b", 8192, 57.9),
     ("mixtral-8x7b", 4096, 82.9), ("gpt_neox-20b", 2048, 128.1)],
)  # fmt: skip
def test_flops_per_token(name: str, seq_len: int, gigaflops: float) -> None:
    assert round(flops_per_token(config_of(name), seq_len) / 1e9, 1) == gigaflops


def test_a_tied_head_counts_once_and_positions_not() -> None:
    # GPT-2: 12 layers of 12 h^2 weights, and the head that is the embedding; h 768, 50257 tokens.
    matmul = 12 * 12 * 768**2 + 50257 * 768
    assert flops_per_token(config_of("gpt2-124m"), 1024) == 6 * matmul + 12 * 12 * 768 * 1024


def test_the_forward_half_agrees_with_what_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    flags = {"model_type": "llama_v2", "hidden_width": 64, "num_layers": 3, "num_heads": 4, "vocab_size": 96}
    config = resolve(Arguments(**flags)).config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.zeros(1, 32, dtype=torch.long))
    # transformers 5.17 computes the angles of the rotary embedding by a matrix product, too.
    assert counter.get_total_flops() == pytest.approx(flops_per_token(config, 32) * 32 / 3, rel=1e-4)
