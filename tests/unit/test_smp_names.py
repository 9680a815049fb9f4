"""The table of SMP's own names, and its geometry: every number of the hub's tensors comes from one place."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from smp_train.errors import CheckpointError
from smp_train.models.smp_names import HubModel, Ranks, blocks

HIDDEN, WIDE, VOCAB, HEADS, KV = 8, 12, 16, 4, 2
QKV = "transformer.seq_layers.0.self_attention.layernorm_qkv"
PROJ, MLP = "transformer.seq_layers.0.self_attention.proj", "transformer.seq_layers.0.layernorm_mlp"


def llama() -> tuple[HubModel, dict[str, Any]]:
    """Return a Llama's whole shapes, and SMP's names with the hub tensors of each, and the dimension that is cut."""
    layer, kv = "model.layers.0.", HIDDEN // HEADS * KV
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN),
        f"{layer}self_attn.q_proj.weight": (HIDDEN, HIDDEN), f"{layer}self_attn.k_proj.weight": (kv, HIDDEN),
        f"{layer}self_attn.v_proj.weight": (kv, HIDDEN), f"{layer}self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        f"{layer}mlp.gate_proj.weight": (WIDE, HIDDEN), f"{layer}mlp.up_proj.weight": (WIDE, HIDDEN),
        f"{layer}mlp.down_proj.weight": (HIDDEN, WIDE), f"{layer}input_layernorm.weight": (HIDDEN,),
        f"{layer}post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    theirs = {
        "word_embedding.weight": (["model.embed_tokens.weight"], None),
        "transformer.layernorm.weight": (["model.norm.weight"], None),
        "lm_head.weight": (["lm_head.weight"], None),
        f"{QKV}.layer_norm_weight": ([f"{layer}input_layernorm.weight"], None),
        f"{QKV}.query_weight": ([f"{layer}self_attn.q_proj.weight"], 0),
        f"{QKV}.key_weight": ([f"{layer}self_attn.k_proj.weight"], 0),
        f"{QKV}.value_weight": ([f"{layer}self_attn.v_proj.weight"], 0),
        f"{PROJ}.weight": ([f"{layer}self_attn.o_proj.weight"], 1),
        f"{MLP}.layer_norm_weight": ([f"{layer}post_attention_layernorm.weight"], None),
        f"{MLP}.fc1_weight": ([f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight"], 0),
        f"{MLP}.fc2_weight": ([f"{layer}mlp.down_proj.weight"], 1),
    }
    return HubModel("llama", shapes, heads=HEADS), theirs


@pytest.mark.parametrize("tensors", [1, 2])
def test_llama_of_transformer_engine(tensors: int) -> None:
    model, theirs = llama()
    generator = torch.Generator().manual_seed(0)
    hub = {name: torch.randn(shape, generator=generator) for name, shape in model.shapes.items()}
    found = {name: torch.full(shape, torch.nan) for name, shape in model.shapes.items()}
    for rank, (name, (names, dim)) in itertools.product(range(tensors), theirs.items()):
        parts = [hub[each] if dim is None else hub[each].chunk(tensors, dim)[rank] for each in names]
        take(found, name, torch.cat(parts) if len(parts) > 1 else parts[0], Ranks(tensor=rank, tensors=tensors), model)
    assert all(torch.equal(found[name], hub[name]) for name in hub)


@pytest.mark.parametrize("tensors", [1, 2])
def test_gpt_neox_product_is_put_together_head_by_head(tensors: int) -> None:
    name = "gpt_neox.layers.0.attention.query_key_value"
    model = HubModel("gpt_neox", {f"{name}.weight": (3 * HIDDEN, HIDDEN), f"{name}.bias": (3 * HIDDEN,)}, heads=HEADS)
    for kind, shape in (("weight", (3 * HIDDEN, HIDDEN)), ("bias", (3 * HIDDEN,))):
        whole = torch.randn(shape)
        heads = whole.view(HEADS, 3, HIDDEN // HEADS, *shape[1:])
        found = {f"{name}.{kind}": torch.full(shape, torch.nan)}
        for rank, (number, part) in itertools.product(range(tensors), enumerate(("query", "key", "value"))):
            own = heads.chunk(tensors)[rank][:, number].reshape(-1, *shape[1:])
            take(found, f"{QKV}.{part}_{kind}", own, Ranks(tensor=rank, tensors=tensors), model)
        assert torch.equal(found[f"{name}.{kind}"], whole)


@pytest.mark.parametrize("form", ["stacked", "one by one"])
def test_experts_of_expert_ranks(form: str) -> None:
    prefix = "model.layers.0.block_sparse_moe.experts"
    shapes = {f"{prefix}.{e}.{p}.weight": (HIDDEN, WIDE) if p == "w2" else (WIDE, HIDDEN)
              for e in range(4) for p in ("w1", "w2", "w3")}  # fmt: skip
    model = HubModel("mixtral", shapes, heads=HEADS, experts=4)
    hub = {name: torch.randn(shape) for name, shape in shapes.items()}
    found = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    layer = "transformer.seq_layers.0.mlp"
    for rank in range(2):
        ranks = Ranks(expert=rank, experts=2)
        inwards = [torch.cat([hub[f"{prefix}.{2 * rank + e}.{p}.weight"] for p in ("w1", "w3")]) for e in range(2)]
        outwards = [hub[f"{prefix}.{2 * rank + e}.w2.weight"] for e in range(2)]
        if form == "stacked":
            take(found, f"{layer}.inwards", torch.stack(inwards), ranks, model)
            take(found, f"{layer}.outwards", torch.stack(outwards), ranks, model)
        for expert in range(2) if form == "one by one" else ():
            take(found, f"{layer}.experts.local_experts.{expert}.linear_fc1.weight", inwards[expert], ranks, model)
            take(found, f"{layer}.experts.local_experts.{expert}.linear_fc2.weight", outwards[expert], ranks, model)
    assert all(torch.equal(found[name], hub[name]) for name in hub)


def test_what_is_not_in_the_table_is_not_guessed() -> None:
    model, _ = llama()
    assert blocks("transformer.seq_layers.0.self_attention.layernorm_qkv.weight", (24, 8), Ranks(), model) is None
    assert blocks("transformer.pooler.weight", (8, 8), Ranks(), model) is None
    assert blocks("transformer.seq_layers.7.self_attention.proj.weight", (8, 8), Ranks(), model) is None
    for shape in ((4, 8), (64,)):  # of a second rank that is not there; flat
        with pytest.raises(CheckpointError):
            blocks("lm.model.layers.0.self_attn.q_proj.weight", shape, Ranks(), model)


def take(found: dict[str, torch.Tensor], name: str, saved: torch.Tensor, ranks: Ranks, model: HubModel) -> None:
    """Copy what a saved tensor holds of the hub's tensors."""
    held = blocks(name, tuple(saved.shape), ranks, model)
    assert held, name
    for block in held:
        lead = len(block.start) - len(block.size)
        part = saved[tuple(block.start[:lead])]
        inside = tuple(slice(a, a + n) for a, n in zip(block.start[lead:], block.size, strict=True))
        there = tuple(slice(a, a + n) for a, n in zip(block.at, block.size, strict=True))
        found[block.name][there] = part[inside]
