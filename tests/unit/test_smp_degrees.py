"""Reading what one tensor and expert rank of SMP holds out of trees of other degrees, without SMP."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from smp_train.checkpoints.dcp import Reader, load_state
from smp_train.checkpoints.translated import RankReader, TensorReader, TranslatedReader, Tree
from smp_train.errors import CheckpointError
from smp_train.models.smp_names import HubModel, Ranks
from tests.unit.test_smp_names import HEADS, HIDDEN, QKV, WIDE, llama

Tensors = dict[str, torch.Tensor]
LAYER = "transformer.seq_layers.0"


def gpt_neox() -> tuple[HubModel, dict[str, tuple[int, ...]], dict[str, int]]:
    """Return a GPT-NeoX's product of queries, keys and values, the whole shapes under SMP's names, and what is cut."""
    name = "gpt_neox.layers.0.attention.query_key_value"
    model = HubModel("gpt_neox", {f"{name}.weight": (3 * HIDDEN, HIDDEN), f"{name}.bias": (3 * HIDDEN,)}, heads=HEADS)
    theirs = {f"{QKV}.{part}_{kind}": (HIDDEN, HIDDEN) if kind == "weight" else (HIDDEN,)
              for part in ("query", "key", "value") for kind in ("weight", "bias")}  # fmt: skip
    return model, theirs, dict.fromkeys(theirs, 0)


def llama_shapes() -> tuple[HubModel, dict[str, tuple[int, ...]], dict[str, int]]:
    """Return a Llama, the whole shapes under SMP's names, and the dimension that is cut."""
    model, table = llama()
    shapes = {name: (sum(model.shapes[each][0] for each in hub), *model.shapes[hub[0]][1:])
              for name, (hub, _) in table.items()}  # fmt: skip
    return model, shapes, {name: dim for name, (_, dim) in table.items() if dim is not None}


def mixtral() -> tuple[HubModel, dict[str, tuple[int, ...]], dict[str, int]]:
    """Return a Mixtral's stacked experts; expert ranks cut the first dimension."""
    prefix = "model.layers.0.block_sparse_moe.experts"
    shapes = {f"{prefix}.{e}.{p}.weight": (HIDDEN, WIDE) if p == "w2" else (WIDE, HIDDEN)
              for e in range(4) for p in ("w1", "w2", "w3")}  # fmt: skip
    theirs = {f"{LAYER}.mlp.inwards": (4, 2 * WIDE, HIDDEN), f"{LAYER}.mlp.outwards": (4, HIDDEN, WIDE)}
    return HubModel("mixtral", shapes, heads=HEADS, experts=4), theirs, dict.fromkeys(theirs, 0)


def state_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state whose moments are told apart from the weights, and from each other's steps."""
    moments = {name: {"exp_avg": value * 2, "exp_avg_sq": value * 3, "step": torch.tensor(4.0)}
               for name, value in values.items()}  # fmt: skip
    return {"model": dict(values), "optim": {"state": moments}}


def flat(state: Mapping[str, Any]) -> Tensors:
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for name, values in state["optim"]["state"].items():
        found |= {f"optim.state.{name}.{what}": value for what, value in values.items()}
    return found


def read(reader: Reader, state: dict[str, Any]) -> dict[str, Any]:
    """Fill a state from what a reader reads."""
    load_state(state, reader, "trees")
    return state


def pieces(source: Reader, ranks: Ranks, model: HubModel, shapes: Mapping[str, Any], cut: Mapping[str, int]) -> Any:
    """Return what one rank reads under SMP's names."""
    empty = {}
    for name, shape in shapes.items():
        divided = ranks.tensors * ranks.experts
        own = [size // divided if dim == cut.get(name) else size for dim, size in enumerate(shape)]
        empty[name] = torch.full(own, torch.nan)
    state = state_of(empty)
    return read(RankReader(source, state, ranks, model), state)


def all_ranks(tensors: int, experts: int) -> list[Ranks]:
    return [Ranks(tensor, tensors, expert, experts) for tensor in range(tensors) for expert in range(experts)]


@pytest.mark.parametrize("make", [llama_shapes, gpt_neox, mixtral], ids=["llama", "gpt-neox", "mixtral"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
def test_other_degrees_give_the_same_numbers(make: Any, before: int, after: int) -> None:
    model, shapes, cut = make()
    hub = state_of({name: torch.randn(shape) for name, shape in model.shapes.items()})
    source = TranslatedReader([Tree(Ranks(), TensorReader(flat(hub)))], model)

    def degrees(degree: int) -> list[Ranks]:
        return all_ranks(1, degree) if make is mixtral else all_ranks(degree, 1)

    written = [Tree(ranks, TensorReader(flat(pieces(source, ranks, model, shapes, cut)))) for ranks in degrees(before)]
    again = TranslatedReader(written, model)
    for ranks in degrees(after):
        one, two = (flat(pieces(each, ranks, model, shapes, cut)) for each in (source, again))
        assert all(torch.equal(one[name], two[name]) and not one[name].isnan().any() for name in one)
    back = flat(read(again, state_of({name: torch.full(shape, torch.nan) for name, shape in model.shapes.items()})))
    assert all(torch.equal(back[name], value) for name, value in flat(hub).items())


class Counting(TensorReader):
    """Counts how often each saved chunk is asked for."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.requests: collections.Counter[str] = collections.Counter()

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.requests.update(item.storage_index.fqn for item in plan.items)
        return super().read_data(plan, planner)


@pytest.mark.parametrize("make", [llama_shapes, gpt_neox, mixtral], ids=["llama", "gpt-neox", "mixtral"])
def test_a_saved_chunk_is_read_once(make: Any) -> None:
    """Of a stack of experts or products by head, though many tensors of the hub lie in it."""
    model, shapes, cut = make()
    hub = state_of({name: torch.randn(shape) for name, shape in model.shapes.items()})
    source = TranslatedReader([Tree(Ranks(), TensorReader(flat(hub)))], model)
    tree = Counting(flat(pieces(source, Ranks(), model, shapes, cut)))
    back = flat(read(TranslatedReader([Tree(Ranks(), tree)], model), state_of(
        {name: torch.full(shape, torch.nan) for name, shape in model.shapes.items()})))  # fmt: skip
    assert all(torch.equal(back[name], value) for name, value in flat(hub).items())
    assert set(tree.requests.values()) == {1}
    again = TranslatedReader([Tree(Ranks(), tree)], model)
    half = Ranks(experts=2) if make is mixtral else Ranks(tensors=2)
    pieces(again, half, model, shapes, cut)
    assert {count for name, count in tree.requests.items() if not name.endswith("step")} == {2}


def test_a_rank_holds_the_rows_and_columns_that_transformer_engine_gives_it() -> None:
    model, shapes, cut = llama_shapes()
    hub = {name: torch.randn(shape) for name, shape in model.shapes.items()}
    source = TranslatedReader([Tree(Ranks(), TensorReader(flat(state_of(hub))))], model)
    _, table = llama()
    for ranks in all_ranks(2, 1):
        found = pieces(source, ranks, model, shapes, cut)
        for name, (names, dim) in table.items():
            parts = [hub[each] if dim is None else hub[each].chunk(2, dim)[ranks.tensor] for each in names]
            assert torch.equal(found["model"][name], torch.cat(parts))
            assert torch.equal(found["optim"]["state"][name]["exp_avg_sq"], 3 * torch.cat(parts))


def test_a_head_of_its_own_is_not_left_out_where_weights_are_tied() -> None:
    shapes = {"model.embed_tokens.weight": (8, HIDDEN)}
    model = HubModel("llama", shapes, tied=True)
    both = {name: torch.randn(8, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    empty = {name: torch.empty(shape) for name, shape in shapes.items()}
    one = flat(state_of({"model.embed_tokens.weight": both["model.embed_tokens.weight"]}))
    head = {"model.lm_head.weight": both["lm_head.weight"]}
    read(TranslatedReader([Tree(Ranks(), TensorReader(one | head))], model), state_of(empty))
    with pytest.raises(CheckpointError, match="--tie_word_embeddings"):
        read(TranslatedReader([Tree(Ranks(), TensorReader(flat(state_of(both))))], model), state_of(empty))


def test_names_that_are_not_known_and_tensors_that_are_not_there_are_refused() -> None:
    model, shapes, cut = llama_shapes()
    hub = state_of({name: torch.randn(shape) for name, shape in model.shapes.items()})
    source = TranslatedReader([Tree(Ranks(), TensorReader(flat(hub)))], model)
    with pytest.raises(CheckpointError, match=r"transformer\.pooler\.weight, of SMP's own llama here"):
        pieces(source, Ranks(), model, shapes | {"transformer.pooler.weight": (HIDDEN, HIDDEN)}, cut)
    del hub["model"]["model.norm.weight"], hub["optim"]["state"]["model.norm.weight"]
    lacking = TranslatedReader([Tree(Ranks(), TensorReader(flat(hub)))], model)
    with pytest.raises(CheckpointError, match=r"it lacks model\.transformer\.layernorm\.weight"):
        pieces(lacking, Ranks(), model, shapes, cut)
