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


def tree_reader(folder: Path) -> TreeReader:
    """Return the reader of the tree in a sub-folder."""
    return TreeReader(open_folder(folder).storage, "tree", open_folder(folder).sizes("tree"))


OPTIMIZER: dict[str, Any] = {"state": {}, "param_groups": []}


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_nothing_in_a_file_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    content = {"model": {"a": torch.arange(4.0)}, "optimizer": OPTIMIZER, "model_config": Runs(marker),
               "total_steps": 3, "cli_args": {"lr": 0.1, "odd": Path("x")}}  # fmt: skip
    torch.save(content, tmp_path / "0.pt")
    found = local.read_rank_file(tmp_path / "0.pt")
    assert not marker.exists()
    assert torch.equal(found["model"]["a"], torch.arange(4.0))
    assert local.plain_values(found) == {"total_steps": 3, "cli_args.lr": 0.1}
    tree = {"model": content["model"], "model_config": content["model_config"]}
    torch.distributed.checkpoint.save(tree, checkpoint_id=tmp_path / "tree", no_dist=True)
    assert list(local.rank_contents_of_tree(tree_reader(tmp_path))["model"]) == ["a"]
    assert not marker.exists()


class Sharded:
    """Is pickled as torch's ShardedTensor is, with one shard; with ``marker``, runs a command too."""

    def __init__(self, tensor: torch.Tensor, offset: int, marker: Path | None = None) -> None:
        self.shard = Shard.from_tensor_and_offsets(tensor, [offset], 0)
        self.more = marker and Runs(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        state = ([self.shard], self.more, None, None, None)
        return _rebuild_from_type_v2, (torch._utils._rebuild_wrapper_subclass, ShardedTensor, (ShardedTensor,), state)


def test_the_shard_of_a_sharded_tensor_is_kept(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    content = {"model": {"_flat_param": Sharded(torch.arange(3.0), 4, marker)}, "optimizer": OPTIMIZER}
    torch.save(content, tmp_path / "0.pt")
    found = local.read_rank_file(tmp_path / "0.pt")["model"]["_flat_param"]
    assert found.offset == 4
    assert torch.equal(found.tensor, torch.arange(3.0))
    assert not marker.exists()


def test_no_object_of_the_program_is_changed(tmp_path: Path) -> None:
    class Build:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor_v2, (), {"__doc__": "changed"}

    torch.save({"model": {}, "optimizer": {}, "other": Build()}, tmp_path / "0.pt", pickle_protocol=2)
    with pytest.raises(CheckpointError):  # the call lacks its arguments
        local.read_rank_file(tmp_path / "0.pt")
    raw = b"ctorch._utils\n_rebuild_tensor_v2\n}U\x06markerU\x01xsb."
    local._Unpickler(io.BytesIO(raw)).load()
    assert not hasattr(torch._utils._rebuild_tensor_v2, "marker")


@pytest.mark.parametrize("unpickler", [local._Unpickler, Unpickler])
def test_no_memory_is_taken_for_what_is_not_there(unpickler: Any) -> None:
    """An opcode that allocates whatever length it is given, before it reads as much."""
    with pytest.raises(KeyError):
        unpickler(io.BytesIO(pickle.dumps(bytearray(3), protocol=5))).load()


def all_of(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor[tuple(slice(0, length) for length in tensor.size())]
    return whole


def test_any_block_of_joined_slices() -> None:
    whole = torch.arange(60.0)
    joined, view = flat.JoinedTensor(list(whole.split(7)), (5, 4, 2), 10), whole[10:50].view(5, 4, 2)
    every = slice(0, 4), slice(0, 2)
    for index in ((slice(2, 4), *every), (slice(1, 2), slice(1, 3), slice(0, 2)), (slice(3, 3), *every)):
        assert torch.equal(joined[index], view[index])


def test_slices_of_ranks_are_joined_and_moments_found(tmp_path: Path) -> None:
    shapes = {"model.a.weight": (2, 3), "model.norm.weight": (2,)}
    whole = {"model.a.weight": torch.arange(6.0), "model.norm.weight": torch.arange(2.0)}
    ranks = []
    for low, high, norm in ((0, 4, 0), (4, 6, 2), (0, 4, 0), (4, 6, 2)):  # two groups of two
        own = {
            "model.a.weight": whole["model.a.weight"][low:high],
            "model.norm.weight": whole["model.norm.weight"][:norm],
        }
        state = {
            number: {
                "exp_avg": own[name] + 1,
                "exp_avg_sq": own[name] + 2,
                "step": torch.tensor(7.0 if len(own[name]) else 0),
            }
            for number, name in enumerate(own)
        }
        ranks.append({"model": own, "optimizer": {"state": state, "param_groups": [{"params": [0]}, {"params": [1]}]}})
    found = flat.joined_tensors(ranks, "llama", shapes)
    for name, shape in shapes.items():
        assert torch.equal(all_of(found[f"model.{name}"]), whole[name].view(shape))
        assert torch.equal(all_of(found[f"optimizer.state.{name}.exp_avg_sq"]), whole[name].view(shape) + 2)
        assert found[f"optimizer.state.{name}.step"] == 7
    with pytest.raises(CheckpointError):
        flat.joined_tensors(ranks[:1], "llama", shapes)
    with pytest.raises(CheckpointError):
        local.read_rank_file(tmp_path)


@pytest.mark.parametrize("lacking", ["model", "optimizer", "state", "param_groups"])
def test_a_rank_file_without_a_part_is_refused_by_the_parts_name(lacking: str, tmp_path: Path) -> None:
    optimizer = {key: value for key, value in OPTIMIZER.items() if key != lacking}
    content = {"model": {}, "optimizer": optimizer}
    torch.save({key: value for key, value in content.items() if key != lacking}, tmp_path / "0.pt")
    with pytest.raises(CheckpointError, match=rf"0\.pt.* lacks .*{lacking}"):
        local.read_rank_file(tmp_path / "0.pt")


def test_norms_of_gpt2_have_no_decay() -> None:
    shapes = {"transformer.wte.weight": (3, 2), "transformer.h.0.ln_1.weight": (2,), "transformer.h.0.ln_1.bias": (2,),
              "transformer.h.0.attn.c_attn.weight": (2, 6)}  # fmt: skip
    decay = {"transformer.wte.weight": 0, "transformer.h.0.attn.c_attn.weight": 1}
    numbers = decay | {"transformer.h.0.ln_1.weight": 2, "transformer.h.0.ln_1.bias": 3}
    model = {name: torch.rand(shape).flatten() for name, shape in shapes.items()}
    state = {n: {"exp_avg": model[name] + 1, "exp_avg_sq": model[name] + 2, "step": 7} for name, n in numbers.items()}
    optimizer = {"state": state, "param_groups": [{"params": [0, 1]}, {"params": [2, 3]}]}
    found = flat.joined_tensors([{"model": model, "optimizer": optimizer}], "gpt2", shapes)
    for name, shape in shapes.items():
        assert torch.equal(all_of(found[f"optimizer.state.{name}.exp_avg"]), model[name].view(shape) + 1)


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
    units: dict[str, list[str]], shards: int, replicas: int = 1, padded: bool = False
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return a model, and what the ranks of its shard groups hold of it, by the rules of FSDP1's flat parameters."""
    whole = {name: torch.rand(shape) for name, shape in LLAMA.items()}
    ranks: list[dict[str, Any]] = [
        {"model": {}, "optimizer": {"state": {}, "param_groups": [{"params": list(range(len(units)))}, {"params": []}]}}
        for _ in range(shards * replicas)
    ]
    for number, (unit, names) in enumerate(units.items()):
        flat = torch.cat([whole[name].flatten() for name in names])
        length = -(-len(flat) // shards)
        for rank, held in enumerate(ranks):
            at = rank % shards * length
            part = flat[at : at + length]
            chunk = torch.nn.functional.pad(part, (0, length - len(part)))
            held["model"][unit] = chunk if padded else FlatPart(at if len(part) else 0, part)
            held["optimizer"]["state"][number] = {"exp_avg": chunk + 1, "exp_avg_sq": chunk + 2, "step": 7}
    return whole, ranks


@pytest.mark.parametrize("units", [UNITS, NESTED])
@pytest.mark.parametrize("shards", [1, 2, 4])  # four chunks of five numbers: the last rank holds padding alone
@pytest.mark.parametrize("padded", [False, True])
def test_flat_parameters_are_taken_apart(units: dict[str, list[str]], shards: int, padded: bool) -> None:
    whole, ranks = flat_ranks(units, shards, 1 if padded else 2, padded)
    if not padded:  # replicas need not follow one another
        ranks = [rank for pair in zip(ranks[:shards], ranks[shards:], strict=True) for rank in pair]
    found = flat.joined_tensors(ranks, "llama", LLAMA)
    for name, value in whole.items():
        assert torch.equal(all_of(found[f"model.{name}"]), value)
        assert torch.equal(all_of(found[f"optimizer.state.{name}.exp_avg"]), value + 1)
        assert torch.equal(all_of(found[f"optimizer.state.{name}.exp_avg_sq"]), value + 2)
        assert found[f"optimizer.state.{name}.step"] == 7
    assert len(found) == 4 * len(LLAMA)


def test_flat_parameters_of_another_model_or_of_some_ranks_are_refused() -> None:
    _, ranks = flat_ranks(UNITS, 2)
    other = {**LLAMA, "model.layers.0.input_layernorm.weight": (2,)}
    more = {**LLAMA, "model.layers.1.input_layernorm.weight": (1,)}
    for held, kind, shapes in (
        (ranks[:1], "llama", LLAMA),
        (ranks[1:], "llama", LLAMA),
        (ranks, "llama", other),
        (ranks, "llama", more),
        (ranks, "qwen3", LLAMA),
    ):
        with pytest.raises(CheckpointError):
            flat.joined_tensors(held, kind, shapes)
    del ranks[0]["optimizer"]["param_groups"][0]["params"][0]
    with pytest.raises(CheckpointError):
        flat.joined_tensors(ranks, "llama", LLAMA)


def test_slices_of_smps_own_implementation_are_refused() -> None:
    model = {"transformer.seq_layers.0.layernorm_mlp.fc1_weight": torch.arange(3.0)}
    optimizer = {"state": {}, "param_groups": [{"params": [0]}]}
    with pytest.raises(CheckpointError, match="own implementation"):
        flat.joined_tensors([{"model": model, "optimizer": optimizer}], "llama", LLAMA)


EXPERTS = {
    "model.embed_tokens.weight": (3, 2),
    **{f"model.layers.0.block_sparse_moe.experts.{e}.w{w}.weight": (2, 2) for e in (0, 1) for w in (1, 2, 3)},
    "model.norm.weight": (2,),
    "lm_head.weight": (3, 2),
}


@pytest.mark.parametrize("form", ["file", "tree"])
@pytest.mark.parametrize(
    ("config", "readable"),
    [
        ({"model_type": "mixtral", "torch_dtype": torch.float32}, True),
        ({"model_type": "mixtral", "dtype": torch.float32, "rope_theta": 1e6, "transformers_version": None}, True),
        # Read by transformers 5 from a file of transformers 4.
        ({"dtype": torch.float32, "rope_parameters": {"rope_theta": 1e6}, "transformers_version": "4.36.0"}, False),
        ({"model_type": "mixtral", "dtype": torch.float32}, False),
        ({}, False),
    ],
    ids=["transformers 4", "transformers 4.57", "transformers 5", "neither", "unknown"],
)
def test_flat_experts_are_read_in_the_order_of_transformers_4_alone(
    form: str, config: dict[str, Any], readable: bool, tmp_path: Path
) -> None:
    """Those of transformers 5 are as many numbers, stacked by kind: a flat parameter does not show it."""
    outside = [name for name in EXPERTS if ".experts." not in name]
    units = {"_flat_param": outside, "model.layers.0._flat_param": [name for name in EXPERTS if name not in outside]}
    whole = {name: torch.rand(shape) for name, shape in EXPERTS.items()}
    model = {unit: torch.cat([whole[name].flatten() for name in names]) for unit, names in units.items()}
    content: dict[str, Any] = {"model": model, "optimizer": {"state": {}, "param_groups": [{"params": [0, 1]}]}}
    if config:
        content["model_config"] = SimpleNamespace(**config)
    if form == "file":
        torch.save(content, tmp_path / "0.pt")
        held = local.read_rank_file(tmp_path / "0.pt")
    else:
        torch.distributed.checkpoint.save(content, checkpoint_id=tmp_path / "tree", no_dist=True)
        held = local.rank_contents_of_tree(tree_reader(tmp_path))
    if readable:
        found = flat.joined_tensors([held], "mixtral", EXPERTS)
        assert all(torch.equal(all_of(found[f"model.{name}"]), value) for name, value in whole.items())
    else:
        with pytest.raises(CheckpointError, match="transformers 5 stores experts in another order"):
            flat.joined_tensors([held], "mixtral", EXPERTS)
