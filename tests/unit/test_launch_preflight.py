"""What launchers say of a run before it has a GPU."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from smp_train.arguments import parse
from smp_train.errors import ConfigError
from smp_train.launch import preflight
from smp_train.launch.instances import find

LLAMA_70B = ["--model_type", "llama_v2", "--model_size", "70b"]


@pytest.mark.parametrize(
    ("words", "instance", "processes", "complaint"),
    [
        (
            LLAMA_70B,
            "p4d.24xlarge",
            8,
            "take 138 GB on each GPU, spread over 8; the A100 of p4d.24xlarge has 40 GB: take",
        ),
        ([*LLAMA_70B, "--hybrid_shard_degree", "8"], "p5.48xlarge", 64, "has 80 GB: raise --hybrid_shard_degree"),
        ([*LLAMA_70B, "--sharding_strategy", "no_shard"], "p5.48xlarge", 64, "take 1104 GB"),
        (["--fp8", "1"], "g5.48xlarge", 8, "the A10G of g5.48xlarge has no FP8"),
    ],
)
def test_refused(words: list[str], instance: str, processes: int, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight.check(parse(words, {}), find(instance), processes)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("words", "instance", "processes"),
    [
        (LLAMA_70B, "p5.48xlarge", 64),
        ([*LLAMA_70B, "--hybrid_shard_degree", "16"], "p5.48xlarge", 64),
        ([*LLAMA_70B, "--hybrid_shard_degree", "2", "--tensor_parallel_degree=8"], "p5.48xlarge", 64),
        ([*LLAMA_70B, "--cpu_offload", "1"], "p4d.24xlarge", 8),
        ([*LLAMA_70B, "--num_layers", "2"], "p4d.24xlarge", 8),
        (["--hf_model", "some/model"], "p4d.24xlarge", 8),
        (["--fp8", "1"], "p5.48xlarge", 8),
    ],
)
def test_not_refused(words: list[str], instance: str, processes: int) -> None:
    preflight.check(parse(words, {}), find(instance), processes)
    preflight.check(parse(words, {}), None, processes)


def test_gated_model_without_a_token(tmp_path: Path) -> None:
    gated = parse(["--hf_model", "meta-llama/Llama-2-7b-hf"], {})
    home = {"HOME": str(tmp_path)}
    assert "meta-llama/Llama-2-7b-hf is gated and there is no Hugging Face token" in preflight.lacks(gated, home)[0]
    assert preflight.lacks(gated, {**home, "HF_TOKEN": "x"}) == []
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/token").touch()
    assert preflight.lacks(gated, {"HF_HOME": str(tmp_path / "hub")}) == []
    assert preflight.lacks(parse(["--hf_model", "gpt2"], {}), home) == []


def test_disk_of_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 1000e9))
    small, large = parse(["--model_type", "llama_v2", "--model_size", "7b"], {}), parse(LLAMA_70B, {})
    assert preflight.places(small, str(tmp_path), 1) == []
    assert (
        "1000 GB are free, and two checkpoints of this model take 1655 GB"
        in preflight.places(large, str(tmp_path), 1)[0]
    )
    monkeypatch.setattr(preflight, "LOCAL_DISKS", ("", preflight_kind(tmp_path)))
    assert "2 nodes need a file system that all of them mount" in preflight.places(small, str(tmp_path), 2)[0]


def preflight_kind(folder: Path) -> str:
    import subprocess

    return subprocess.run(
        ["stat", "--file-system", "--format=%T", folder], capture_output=True, text=True, check=True
    ).stdout.strip()
