"""Trees of SMP's own implementation: what each tensor and expert rank holds, read and written for any degrees."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from smp_train.checkpoints.aws.names import HubReader, RankReader, TensorReader, Tree
from smp_train.checkpoints.dcp.storage import Reader
from smp_train.checkpoints.dcp.trees import load_state
from smp_train.errors import CheckpointError
from smp_train.models.smp_names import HubModel, Ranks, blocks

Tensors = dict[str, torch.Tensor]
HIDDEN, WIDE, VOCAB, HEADS, KV, EXPERTS = 8, 12, 16, 4, 2, 4
LAYER = "transformer.seq_layers.0"
QKV, MLP = f"{LAYER}.self_attention.layernorm_qkv", f"{LAYER}.layernorm_mlp"
HUB = "model.layers.0."
LLAMA = {
    # SMP's name: the hub's tensors, one below the other, and the dimension that tensor ranks split
    "word_embedding.weight": (["model.embed_tokens.weight"], None),
    "transformer.layernorm.weight": (["model.norm.weight"], None),
    "lm_head.weight": (["lm_head.weight"], None),
    f"{QKV}.layer_norm_weight": ([f"{HUB}input_layernorm.weight"], None),
    f"{QKV}.query_weight": ([f"{HUB}self_attn.q_proj.weight"], 0),
    f"{QKV}.key_weight": ([f"{HUB}self_attn.k_proj.weight"], 0),
    f"{QKV}.value_weight": ([f"{HUB}self_attn.v_proj.weight"], 0),
    f"{LAYER}.self_attention.proj.weight": ([f"{HUB}self_attn.o_proj.weight"], 1),
    f"{MLP}.layer_norm_weight": ([f"{HUB}post_attention_layernorm.weight"], None),
    f"{MLP}.fc1_weight": ([f"{HUB}mlp.gate_proj.weight", f"{HUB}mlp.up_proj.weight"], 0),
    f"{MLP}.fc2_weight": ([f"{HUB}mlp.down_proj.weight"], 1),
}
SHAPES = {"embed_tokens": (VOCAB, HIDDEN), "lm_head": (VOCAB, HIDDEN), "k_proj": (HIDDEN // HEADS * KV, HIDDEN),
          "v_proj": (HIDDEN // HEADS * KV, HIDDEN), "q_proj": (HIDDEN, HIDDEN), "o_proj": (HIDDEN, HIDDEN),
          "gate_proj": (WIDE, HIDDEN), "up_proj": (WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}  # fmt: skip


def held_of_llama(hub: Tensors, ranks: Ranks) -> Tensors:
    """Return what a rank holds: Transformer Engine's rows and columns."""
    return {
        name: torch.cat([hub[n] if dim is None else hub[n].chunk(ranks.tensors, dim)[ranks.tensor] for n in names])
        for name, (names, dim) in LLAMA.items()
    }


NEOX = "gpt_neox.layers.0.attention.query_key_value"


def held_of_gpt_neox(hub: Tensors, ranks: Ranks) -> Tensors:
    """Return what a rank holds: queries, keys and values of its heads, which the hub interleaves head by head."""
    heads = {kind: hub[f"{NEOX}.{kind}"].unflatten(0, (HEADS, 3, -1)) for kind in ("weight", "bias")}
    return {
        f"{QKV}.{part}_{kind}": value.chunk(ranks.tensors)[ranks.tensor][:, number].flatten(0, 1)
        for kind, value in heads.items()
        for number, part in enumerate(("query", "key", "value"))
    }


def held_of_mixtral(hub: Tensors, ranks: Ranks) -> Tensors:
    """Return what a rank holds: its experts, stacked."""
    inwards, outwards = experts(hub, ranks)
    return {f"{LAYER}.mlp.inwards": torch.stack(inwards), f"{LAYER}.mlp.outwards": torch.stack(outwards)}


def held_of_megatron(hub: Tensors, ranks: Ranks) -> Tensors:
    """Return what a rank holds: its experts, one by one."""
    return {
        f"{LAYER}.mlp.experts.local_experts.{number}.linear_fc{fc}.weight": value
        for fc, values in enumerate(experts(hub, ranks), 1)
        for number, value in enumerate(values)
    }


def experts(hub: Tensors, ranks: Ranks) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    prefix, own = f"{HUB}block_sparse_moe.experts", EXPERTS // ranks.experts
    mine = range(ranks.expert * own, (ranks.expert + 1) * own)
    inwards = [torch.cat([hub[f"{prefix}.{e}.{part}.weight"] for part in ("w1", "w3")]) for e in mine]
    return inwards, [hub[f"{prefix}.{e}.w2.weight"] for e in mine]


Held = Callable[[Tensors, Ranks], Tensors]
MODELS: dict[str, tuple[str, dict[str, tuple[int, ...]], Held]] = {
    "llama": ("llama", {n: SHAPES.get(n.split(".")[-2], (HIDDEN,)) for each, _ in LLAMA.values() for n in each},
              held_of_llama),
    "gpt-neox": ("gpt_neox", {f"{NEOX}.weight": (3 * HIDDEN, HIDDEN), f"{NEOX}.bias": (3 * HIDDEN,)}, held_of_gpt_neox),
    **{name: ("mixtral", {f"{HUB}block_sparse_moe.experts.{e}.{p}.weight": (HIDDEN, WIDE) if p == "w2" else
                          (WIDE, HIDDEN) for e in range(EXPERTS) for p in ("w1", "w2", "w3")}, held)
       for name, held in (("mixtral", held_of_mixtral), ("experts one by one", held_of_megatron))},
}  # fmt: skip


def state_of(values: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return a state whose moments are told apart from the weights, and from each other's steps."""
    moments = {name: {"exp_avg": value * 2, "exp_avg_sq": value * 3, "step": torch.tensor(4.0)}
               for name, value in values.items()}  # fmt: skip
    return {"model": dict(values), "optim": {"state": moments}}


def flat(state: Mapping[str, Any]) -> Tensors:
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optim"]["state"].items():
        found |= {f"optim.state.{name}.{what}": value for what, value in values.items()}
    return found


def same(one: Tensors, two: Tensors) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], value) for name, value in two.items())


class Case:
    """A model, its weights and moments on the hub, and their reader."""

    def __init__(self, name: str) -> None:
        kind, shapes, self.held = MODELS[name]
        self.model = HubModel(kind, shapes, heads=HEADS, experts=EXPERTS if kind == "mixtral" else 0)
        self.hub = {name: torch.randn(shape) for name, shape in shapes.items()}
        self.source = self.trees([Tree(Ranks(), TensorReader(flat(state_of(self.hub))))])

    def trees(self, trees: list[Tree]) -> HubReader:
        return HubReader(trees, self.model)

    def all_ranks(self, degree: int) -> list[Ranks]:
        if self.model.kind == "mixtral":
            return [Ranks(expert=rank, experts=degree) for rank in range(degree)]
        return [Ranks(tensor=rank, tensors=degree) for rank in range(degree)]

    def read_by(self, ranks: Ranks, source: Reader | None = None) -> Tensors:
        """Return what a rank reads under SMP's names."""
        held = self.held(self.hub, ranks)
        state = state_of({name: torch.full_like(value, torch.nan) for name, value in held.items()})
        load_state(state, RankReader(source or self.source, state, ranks, self.model), "trees")
        return flat(state)

    def read_back(self, reader: Reader) -> Tensors:
        """Return what is read under the hub's names."""
        state = state_of({name: torch.full_like(value, torch.nan) for name, value in self.hub.items()})
        load_state(state, reader, "trees")
        return flat(state)


class Counting(TensorReader):
    """Counts how often each saved chunk is asked for."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.requests: collections.Counter[str] = collections.Counter()

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.requests.update(item.storage_index.fqn for item in plan.items)
        return super().read_data(plan, planner)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_other_degrees_give_the_same_numbers(name: str, before: int, after: int) -> None:
    """And a saved chunk is read once, though many tensors of the hub lie in a stack of experts or products by head."""
    case = Case(name)
    written: list[Any] = [Tree(ranks, Counting(case.read_by(ranks))) for ranks in case.all_ranks(before)]
    again = case.trees(written)
    for ranks in case.all_ranks(after):
        expected = flat(state_of(case.held(case.hub, ranks)))
        assert same(case.read_by(ranks), expected)
        for tree in written:
            tree.reader.requests.clear()
        assert same(case.read_by(ranks, again), expected)
        counts = [count for tree in written for key, count in tree.reader.requests.items() if not key.endswith("step")]
        assert set(counts) == {1}
    assert same(case.read_back(again), flat(state_of(case.hub)))


def test_a_head_of_its_own_is_not_left_out_where_weights_are_tied() -> None:
    model = HubModel("llama", {"model.embed_tokens.weight": (8, HIDDEN)}, tied=True)
    both = {name: torch.randn(8, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    one = {"model.embed_tokens.weight": both["model.embed_tokens.weight"]}

    def read(saved: Tensors) -> None:
        load_state(state_of(one), HubReader([Tree(Ranks(), TensorReader(saved))], model), "trees")

    read(flat(state_of(one)) | {"model.lm_head.weight": both["lm_head.weight"]})
    with pytest.raises(CheckpointError, match="--tie_word_embeddings"):
        read(flat(state_of(both)))


def test_unknown_names_and_missing_tensors_are_refused() -> None:
    case = Case("llama")
    state = {"model": {"transformer.pooler.weight": torch.zeros(HIDDEN, HIDDEN)}}
    with pytest.raises(CheckpointError, match=r"transformer\.pooler\.weight, of SMP's own llama here"):
        load_state(state, RankReader(case.source, state, Ranks(), case.model), "trees")
    rest = {name: value for name, value in case.hub.items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"it lacks model\.transformer\.layernorm\.weight"):
        case.read_by(Ranks(), case.trees([Tree(Ranks(), TensorReader(flat(state_of(rest))))]))
    for name in (f"{QKV}.weight", "transformer.pooler.weight", "transformer.seq_layers.7.self_attention.proj.weight"):
        assert blocks(name, (8, 8), Ranks(), case.model) is None
    for shape in ((4, 8), (64,)):  # of a second rank that is not there; flat
        with pytest.raises(CheckpointError):
            blocks("lm.model.layers.0.self_attn.q_proj.weight", shape, Ranks(), case.model)
