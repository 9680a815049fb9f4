"""Files of single ranks of the SMP v2 sample: nothing in them runs, and what is not whole is refused."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch._tensor import _rebuild_from_type_v2
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

from smp_train.checkpoints.aws import flat, local
from smp_train.checkpoints.aws.flat import FlatPart
from smp_train.checkpoints.dcp.pickled import Unpickler
from smp_train.checkpoints.dcp.storage import TreeReader
from smp_train.checkpoints.folder import open_folder
from smp_train.errors import CheckpointError

OPTIMIZER: dict[str, Any] = {"state": {}, "param_groups": []}


def saved(folder: Path, content: dict[str, Any], form: str = "file") -> dict[str, Any]:
    """Save what a rank holds, as a file or a tree, and return what is read of it."""
    if form == "file":
        torch.save(content, folder / "0.pt")
        return local.read_rank_file(folder / "0.pt")
    torch.distributed.checkpoint.save(content, checkpoint_id=folder / "tree", no_dist=True)
    opened = open_folder(folder)
    return local.rank_contents_of_tree(TreeReader(opened.storage, "tree", opened.sizes("tree")))


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


class Sharded:
    """Is pickled as torch's ShardedTensor is, with one shard, and runs a command too."""

    def __init__(self, tensor: torch.Tensor, offset: int, marker: Path) -> None:
        self.shard, self.more = Shard.from_tensor_and_offsets(tensor, [offset], 0), Runs(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        state = ([self.shard], self.more, None, None, None)
        return _rebuild_from_type_v2, (torch._utils._rebuild_wrapper_subclass, ShardedTensor, (ShardedTensor,), state)


def test_tensors_and_plain_values_are_read_and_nothing_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    content = {"model": {"a": torch.arange(4.0)}, "optimizer": OPTIMIZER, "model_config": Runs(marker),
               "total_steps": 3, "cli_args": {"lr": 0.1, "odd": Path("x")}}  # fmt: skip
    assert list(saved(tmp_path, content, "tree")["model"]) == ["a"]
    content["model"]["_flat_param"] = Sharded(torch.arange(3.0), 4, marker)
    found = saved(tmp_path, content)
    assert torch.equal(found["model"]["a"], torch.arange(4.0))
    assert local.plain_values(found) == {"total_steps": 3, "cli_args.lr": 0.1}
    assert found["model"]["_flat_param"].offset == 4
    assert torch.equal(found["model"]["_flat_param"].tensor, torch.arange(3.0))
    assert not marker.exists()


def test_no_object_of_the_program_is_changed(tmp_path: Path) -> None:
    raw = b"ctorch._utils\n_rebuild_tensor_v2\n}U\x06markerU\x01xsb."
    local._Unpickler(io.BytesIO(raw)).load()
    assert not hasattr(torch._utils._rebuild_tensor_v2, "marker")


@pytest.mark.parametrize("unpickler", [local._Unpickler, Unpickler])
def test_no_memory_is_taken_for_what_is_not_there(unpickler: Any) -> None:
    """An opcode that allocates whatever length it is given, before it reads as much."""
    with pytest.raises(KeyError):
        unpickler(io.BytesIO(pickle.dumps(bytearray(3), protocol=5))).load()


@pytest.mark.parametrize("lacking", ["model", "optimizer", "state", "param_groups"])
def test_a_rank_file_without_a_part_is_refused_by_the_parts_name(lacking: str, tmp_path: Path) -> None:
    optimizer = {key: value for key, value in OPTIMIZER.items() if key != lacking}
    content = {key: value for key, value in {"model": {}, "optimizer": optimizer}.items() if key != lacking}
    with pytest.raises(CheckpointError, match=rf"0\.pt.* lacks .*{lacking}"):
        saved(tmp_path, content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        local.read_rank_file(tmp_path)


# --- the pieces of ranks, joined


def whole_of(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor[tuple(slice(0, length) for length in tensor.size())]
    return whole


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.rand(shape) for name, shape in shapes.items()}


def moments(weights: torch.Tensor) -> dict[str, Any]:
    return {"exp_avg": weights + 1, "exp_avg_sq": weights + 2, "step": torch.tensor(7.0 if len(weights) else 0)}


def groups(*numbers: list[int]) -> list[dict[str, list[int]]]:
    return [{"params": group} for group in numbers]


def check(joined: dict[str, Any], whole: dict[str, torch.Tensor]) -> None:
    """Check that weights and moments are those of a whole model."""
    assert len(joined) == 4 * len(whole)
    for name, value in whole.items():
        assert torch.equal(whole_of(joined[f"model.{name}"]), value)
        assert torch.equal(whole_of(joined[f"optimizer.state.{name}.exp_avg"]), value + 1)
        assert torch.equal(whole_of(joined[f"optimizer.state.{name}.exp_avg_sq"]), value + 2)
        assert joined[f"optimizer.state.{name}.step"] == 7


def test_any_block_of_joined_slices() -> None:
    whole = torch.arange(60.0)
    joined, view = flat.JoinedTensor(list(whole.split(7)), (5, 4, 2), 10), whole[10:50].view(5, 4, 2)
    every = slice(0, 4), slice(0, 2)
    for index in ((slice(2, 4), *every), (slice(1, 2), slice(1, 3), slice(0, 2)), (slice(3, 3), *every)):
        assert torch.equal(joined[index], view[index])


SLICED: dict[str, tuple[dict[str, tuple[int, ...]], list[int]]] = {
    "llama": ({"model.a.weight": (2, 3), "model.norm.weight": (2,)}, [0, 1]),
    "gpt2": (  # whose norms have no decay
        {"transformer.wte.weight": (3, 2), "transformer.h.0.ln_1.weight": (2,), "transformer.h.0.ln_1.bias": (2,),
         "transformer.h.0.attn.c_attn.weight": (2, 6)}, [0, 2, 3, 1],
    ),
}  # fmt: skip
"""Shapes, and the numbers of the parameters in the optimizer; the first half of them decays."""


@pytest.mark.parametrize("kind", SLICED)
def test_slices_of_two_groups_of_two_ranks_are_joined(kind: str) -> None:
    shapes, numbers = SLICED[kind]
    whole, half = drawn(shapes), len(numbers) // 2
    ranks = []
    for take in (lambda all_of: all_of[: len(all_of) // 6 * 4], lambda all_of: all_of[len(all_of) // 6 * 4 :]) * 2:
        model = {name: take(value.flatten()) for name, value in whole.items()}
        state = {number: moments(part) for number, part in zip(numbers, model.values(), strict=True)}
        decay = groups([*range(half)], [*range(half, 2 * half)])
        ranks.append({"model": model, "optimizer": {"state": state, "param_groups": decay}})
    check(flat.joined_tensors(ranks, kind, shapes), whole)
    with pytest.raises(CheckpointError):
        flat.joined_tensors(ranks[:1], kind, shapes)


LLAMA = {
    "model.embed_tokens.weight": (3, 2),
    "model.layers.0.self_attn.q_proj.weight": (2, 2),
    "model.layers.0.input_layernorm.weight": (1,),
    "model.norm.weight": (2,),
    "lm_head.weight": (3, 2),
}
UNITS = {
    "_flat_param": ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"],
    "model.layers.0._flat_param": ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.input_layernorm.weight"],
}
NESTED = {
    "_flat_param": ["model.norm.weight"],
    "model.embed_tokens._flat_param": ["model.embed_tokens.weight"],
    "model.layers.0._flat_param": ["model.layers.0.input_layernorm.weight"],
    "model.layers.0.self_attn._flat_param": ["model.layers.0.self_attn.q_proj.weight"],
    "lm_head._flat_param": ["lm_head.weight"],
}


def flat_ranks(
    units: dict[str, list[str]], shards: int, padded: bool = False
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return a model, and what the ranks of a shard group hold of it, by the rules of FSDP1's flat parameters."""
    whole = drawn(LLAMA)
    decay = groups([*range(len(units))], [])
    ranks: list[dict[str, Any]] = [{"model": {}, "optimizer": {"state": {}, "param_groups": decay}}
                                   for _ in range(shards)]  # fmt: skip
    for number, (unit, names) in enumerate(units.items()):
        flat = torch.cat([whole[name].flatten() for name in names])
        length = -(-len(flat) // shards)
        for rank, held in enumerate(ranks):
            part = flat[rank * length : rank * length + length]
            chunk = torch.nn.functional.pad(part, (0, length - len(part)))
            held["model"][unit] = chunk if padded else FlatPart(rank * length if len(part) else 0, part)
            held["optimizer"]["state"][number] = moments(chunk)
    return whole, ranks


@pytest.mark.parametrize("units", [UNITS, NESTED])
@pytest.mark.parametrize("shards", [1, 2, 4])  # four chunks of five numbers: the last rank holds padding alone
@pytest.mark.parametrize("padded", [False, True])
def test_flat_parameters_are_taken_apart(units: dict[str, list[str]], shards: int, padded: bool) -> None:
    whole, ranks = flat_ranks(units, shards, padded)
    if not padded:  # replicas need not follow one another
        ranks = [rank for rank in ranks for _ in range(2)]
    check(flat.joined_tensors(ranks, "llama", LLAMA), whole)


def test_flat_parameters_of_another_model_or_of_some_ranks_are_refused() -> None:
    _, ranks = flat_ranks(UNITS, 2)
    other = {**LLAMA, "model.layers.0.input_layernorm.weight": (2,)}
    more = {**LLAMA, "model.layers.1.input_layernorm.weight": (1,)}
    for held, kind, shapes in (
        (ranks[:1], "llama", LLAMA), (ranks[1:], "llama", LLAMA), (ranks, "llama", other), (ranks, "llama", more),
        (ranks, "qwen3", LLAMA),
    ):  # fmt: skip
        with pytest.raises(CheckpointError):
            flat.joined_tensors(held, kind, shapes)
    ranks[0]["optimizer"]["param_groups"] = groups([0], [])
    with pytest.raises(CheckpointError):
        flat.joined_tensors(ranks, "llama", LLAMA)


def test_slices_of_smps_own_implementation_are_refused() -> None:
    model = {"transformer.seq_layers.0.layernorm_mlp.fc1_weight": torch.arange(3.0)}
    with pytest.raises(CheckpointError, match="own implementation"):
        flat.joined_tensors([{"model": model, "optimizer": OPTIMIZER}], "llama", LLAMA)


EXPERTS = {
    "model.embed_tokens.weight": (3, 2),
    **{f"model.layers.0.block_sparse_moe.experts.{e}.w{w}.weight": (2, 2) for e in (0, 1) for w in (1, 2, 3)},
    "model.norm.weight": (2,),
}
CONFIGURATIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "transformers 4": ({"torch_dtype": torch.float32}, True),
    "transformers 4.57": ({"dtype": torch.float32, "rope_theta": 1e6, "transformers_version": None}, True),
    # Read by transformers 5 from a file of transformers 4.
    "transformers 5": ({"rope_parameters": {"rope_theta": 1e6}, "transformers_version": "4.36.0"}, False),
    "neither": ({"dtype": torch.float32}, False),
    "unknown": ({}, False),
}


@pytest.mark.parametrize("form", ["file", "tree"])
@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_flat_experts_are_read_in_the_order_of_transformers_4_alone(form: str, case: str, tmp_path: Path) -> None:
    """Those of transformers 5 are as many numbers, stacked by kind: a flat parameter does not show it."""
    config, readable = CONFIGURATIONS[case]
    outside = [name for name in EXPERTS if ".experts." not in name]
    units = {"_flat_param": outside, "model.layers.0._flat_param": [name for name in EXPERTS if name not in outside]}
    whole = drawn(EXPERTS)
    model = {unit: torch.cat([whole[name].flatten() for name in names]) for unit, names in units.items()}
    content: dict[str, Any] = {"model": model, "optimizer": {"state": {}, "param_groups": groups([0, 1])}}
    if config:
        content["model_config"] = SimpleNamespace(**config)
    held = saved(tmp_path, content, form)
    if readable:
        found = flat.joined_tensors([held], "mixtral", EXPERTS)
        assert all(torch.equal(whole_of(found[f"model.{name}"]), value) for name, value in whole.items())
    else:
        with pytest.raises(CheckpointError, match="transformers 5 stores experts in another order"):
            flat.joined_tensors([held], "mixtral", EXPERTS)
