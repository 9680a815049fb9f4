"""Files of single ranks of the SMP v2 sample: nothing in them runs, and what is not whole is refused."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from smp_train.checkpoints import rank_files
from smp_train.errors import CheckpointError


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_nothing_in_a_file_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    content = {"model": {"a": torch.arange(4.0)}, "optimizer": {}, "model_config": Runs(marker), "total_steps": 3,
               "cli_args": {"lr": 0.1, "odd": Path("x")}}  # fmt: skip
    torch.save(content, tmp_path / "0.pt")
    found = rank_files.read(tmp_path / "0.pt")
    assert not marker.exists()
    assert torch.equal(found["model"]["a"], torch.arange(4.0))
    assert rank_files.plain_values(found) == {"total_steps": 3, "cli_args.lr": 0.1}


def test_no_object_of_the_program_is_changed(tmp_path: Path) -> None:
    class Build:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor_v2, (), {"__doc__": "changed"}

    torch.save({"model": {}, "optimizer": {}, "other": Build()}, tmp_path / "0.pt", pickle_protocol=2)
    with pytest.raises(CheckpointError):  # the call lacks its arguments
        rank_files.read(tmp_path / "0.pt")
    raw = b"ctorch._utils\n_rebuild_tensor_v2\n}U\x06markerU\x01xsb."
    rank_files._Unpickler(io.BytesIO(raw)).load()
    assert not hasattr(torch._utils._rebuild_tensor_v2, "marker")


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
    found = rank_files.tensors(ranks, "llama", shapes)
    for name, shape in shapes.items():
        assert torch.equal(found[f"model.{name}"][...], whole[name].view(shape))
        assert torch.equal(found[f"optimizer.state.{name}.exp_avg_sq"][...], whole[name].view(shape) + 2)
        assert found[f"optimizer.state.{name}.step"] == 7
    with pytest.raises(CheckpointError):
        rank_files.tensors(ranks[:1], "llama", shapes)
    with pytest.raises(CheckpointError):
        rank_files.read(tmp_path)
