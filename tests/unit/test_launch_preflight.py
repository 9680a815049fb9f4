"""What launchers say of a run before it has a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from smp_train.arguments import parse
from smp_train.errors import ConfigError
from smp_train.launch import preflight
from smp_train.launch.instances import Machines, find
from smp_train.models.families import FAMILIES
from smp_train.models.resolve import presets
from smp_train.models.state_memory import fewest_parameters
from smp_train.planning.options import machine, options

LLAMA_70B = ["--model_type", "llama_v2", "--model_size", "70b"]


@pytest.mark.parametrize(
    ("words", "instance", "nodes", "complaint"),
    [
        (LLAMA_70B, "p4d.24xlarge", 1, "take 128.5 GiB on each A100 of p4d.24xlarge, which has at most 40.0 GiB"),
        ([*LLAMA_70B, "--hybrid_shard_degree", "8"], "p5.48xlarge", 8, "a larger --hybrid_shard_degree,"),
        ([*LLAMA_70B, "--sharding_strategy", "no_shard"], "p5.48xlarge", 8, "take 1027.8 GiB"),
        ([*LLAMA_70B, "--sharding_strategy", "hybrid_shard"], "p5.48xlarge", 16, "spread over 8 of 128 processes"),
        (["--fp8", "1"], "g5.48xlarge", 1, "the A10G of g5.48xlarge has no FP8"),
    ],
)
def test_refused(words: list[str], instance: str, nodes: int, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight.check(parse(words, {}), Machines(find(instance), nodes, 8))
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("words", "instance", "nodes"),
    [
        (LLAMA_70B, "p5.48xlarge", 8),
        ([*LLAMA_70B, "--hybrid_shard_degree", "16"], "p5.48xlarge", 8),
        ([*LLAMA_70B, "--hybrid_shard_degree", "2", "--tensor_parallel_degree=8"], "p5.48xlarge", 8),
        # On SMP, which this may come to, tensor parallelism shards over all nodes.
        ([*LLAMA_70B, "--sharding_strategy", "hybrid_shard", "--tensor_parallel_degree=8"], "p5.48xlarge", 8),
        ([*LLAMA_70B, "--cpu_offload", "1"], "p4d.24xlarge", 1),
        ([*LLAMA_70B, "--memory_check", "0"], "p4d.24xlarge", 1),
        ([*LLAMA_70B, "--num_layers", "2"], "p4d.24xlarge", 1),
        (["--hf_model", "some/model"], "p4d.24xlarge", 1),
        (["--hf_model", "some/model", "--tensor_parallel_degree=2"], "p4d.24xlarge", 8),
        (["--fp8", "1"], "p5.48xlarge", 1),
    ],
)
def test_not_refused(words: list[str], instance: str, nodes: int) -> None:
    preflight.check(parse(words, {}), Machines(find(instance), nodes, 8))
    preflight.check(parse(words, {}), Machines(None, nodes, 8))


def test_data(tmp_path: Path) -> None:
    for name in ("a", "b", "c:1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.json").touch()
    args = parse(
        ["--training_dir", f"{tmp_path}/a:0.3", f"{tmp_path}/c:1", "s3://x/y:0.7", "--test_dir", f"{tmp_path}/b"], {}
    ).args
    assert [place for _, place in preflight.data_folders(args)] == [f"{tmp_path}/{name}" for name in ("a", "c:1", "b")]
    preflight.check_data(args)
    (tmp_path / "b/0.json").unlink()
    with pytest.raises(ConfigError, match=r"--test_dir .*/b: "):
        preflight.check_data(args)
    (tmp_path / "a").rename(tmp_path / "z")
    with pytest.raises(ConfigError, match=r"--training_dir .*/a: "):
        preflight.check_data(args)


def test_gated_model_without_a_token(tmp_path: Path) -> None:
    gated = parse(["--hf_model", "meta-llama/Llama-2-7b-hf"], {})
    home = {"HOME": str(tmp_path)}
    assert "meta-llama/Llama-2-7b-hf is gated and there is no" in preflight.missing_token(gated, home)[0]
    assert preflight.missing_token(gated, {**home, "HF_TOKEN": "x"}) == []
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/token").touch()
    assert preflight.missing_token(gated, {"HF_HOME": str(tmp_path / "hub")}) == []
    assert preflight.missing_token(parse(["--hf_model", "gpt2"], {}), home) == []
    in_container = preflight.missing_token(gated, {"HF_HOME": str(tmp_path / "hub")}, home=False)
    assert "a container sees no login of this home folder: set HF_TOKEN" in in_container[0]
    assert preflight.missing_token(gated, {"HF_TOKEN": "x"}, home=False) == []


def test_plugin_of_nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "PLUGIN_PLACES", (str(tmp_path / "ofi"),))
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    (line,) = preflight.missing_plugin(find("p5.48xlarge"))
    assert "p5.48xlarge has 32 adapters, and nodes would reach each other through TCP" in line
    (tmp_path / "ofi/lib/x86_64-linux-gnu").mkdir(parents=True)
    (tmp_path / "ofi/lib/x86_64-linux-gnu/libnccl-net-ofi.so").touch()
    assert preflight.missing_plugin(find("p5.48xlarge")) == []


def test_disks_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, 1000e9))
    own = ["--run_dir", str(tmp_path), "--checkpoint_dir", str(tmp_path)]
    small, large = parse(["--model_type", "llama_v2", "--model_size", "7b", *own], {}), parse([*LLAMA_70B, *own], {})
    assert preflight.disk_warnings(small, 1) == []
    (line,) = preflight.disk_warnings(large, 1)
    assert f"{tmp_path}: 1000 GB are free, and two checkpoints of this model take 1655 GB" in line
    monkeypatch.setattr(preflight, "LOCAL_DISKS", ("", preflight.file_system(tmp_path)))
    (image := tmp_path / "x.sqsh").touch()
    (said,) = preflight.disk_warnings(small, 2, [str(image)])
    assert said.startswith(f"{tmp_path}, {image}: on a local disk (")
    assert preflight.disk_warnings(small, 1, [str(image)]) == []


@pytest.mark.parametrize("backend", ["auto", "smp", "native"])
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--tensor_parallel_degree=5", *LLAMA_70B], "5 does not divide the 64 attention heads"),
        (["--tensor_parallel_degree=16", *LLAMA_70B], "16 does not divide the 8 key-value heads"),
        (["--tensor_parallel_degree=2", "--vocab_size=50257"], "2 does not divide the 50257 tokens of vocabulary"),
        (["--tensor_parallel_degree=2", "--intermediate_size=127"], "2 does not divide the 127 columns"),
        (["--tensor_parallel_degree=4", "--max_context_width=1026"], "4 does not divide the 1026 tokens that a rank"),
        (["--context_parallel_degree=4", "--max_context_width=100"], "100 does not split into the 8 pieces"),
        (["--tensor_parallel_degree=4", "--num_heads=6", "--hidden_width=12"], "4 does not divide the 6 attention"),
    ],
)
def test_degrees_that_do_not_divide_the_model(words: list[str], complaint: str, backend: str) -> None:
    resolved = parse([*words, f"--backend={backend}"], {})
    if backend == "smp" and "tokens" in complaint:  # whether SMP splits vocabulary and sequence evenly is not known
        preflight.check(resolved, Machines(None, 10, 8))
    else:
        with pytest.raises(ConfigError) as refused:
            preflight.check(resolved, Machines(None, 10, 8))
        assert complaint in str(refused.value)
    for fitting in ("--tensor_parallel_degree=8", "--context_parallel_degree=4"):
        preflight.check(parse([fitting, *LLAMA_70B, f"--backend={backend}"], {}), Machines(None, 8, 8))


def test_degrees_that_do_not_divide_a_model_in_a_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 50257, "num_attention_heads": 8, "num_key_value_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["--hf_model", str(tmp_path), "--tensor_parallel_degree=2"]
    with pytest.raises(ConfigError, match=r"2 .* 50257 "):
        preflight.check(parse(words, {}), Machines(None, 1, 8))
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 50304}))
    preflight.check(parse(words, {}), Machines(None, 1, 8))
    (tmp_path / "config.json").write_text("[1]")  # the training says what is wrong with it
    preflight.check(parse(words, {}), Machines(None, 1, 8))


WITHOUT_TORCH = """
import sys
from smp_train import cli
code = cli.main(sys.argv[1:])
print(code, *{"torch", "transformers"} & set(sys.modules))
"""


@pytest.mark.parametrize("verb", [["train"], ["launch", "local", "--nproc", "1", "--check"]])
def test_a_model_far_too_large_for_this_machine_is_refused_before_torch_is_imported(verb: list[str]) -> None:
    words = [*verb, "--model_type=llama_v2", "--num_layers=99999", "--use_synthetic_data=1"]
    words += ["--distributed_backend=gloo", "--run_dir=unused"]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *words], capture_output=True, text=True, timeout=240)
    assert done.stdout.split() == ["2"]
    (line,) = done.stderr.splitlines()
    assert all(part in line for part in ("for the 1 process of", "--memory_check 0"))


def test_parameters_are_never_overestimated(tmp_path: Path) -> None:
    for preset in presets().values():
        kind = FAMILIES[preset.model_type].hf_model_type
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **preset.config}))
        of_folder = fewest_parameters(parse(["--hf_model", str(tmp_path)], {}).args)
        named = ["--model_type", preset.model_type, "--model_size", preset.model_size]
        assert fewest_parameters(parse(named, {}).args) == preset.parameters
        shallow = fewest_parameters(parse([*named, "--num_layers", "1"], {}).args)
        assert 0 < shallow <= of_folder < preset.parameters, preset
        assert of_folder > 0.35 * preset.parameters or kind in ("falcon", "gpt2"), preset
    ladder, synonym = ["--model_size=7B"], ["--model_type=llama3", "--model_size=8b"]
    for flags, name in ((ladder, ("scratch", "7b")), (synonym, ("llama_v3", "8b"))):
        assert fewest_parameters(parse(flags, {}).args) == presets()[name].parameters


def test_the_memory_of_a_gpu_is_that_of_a_plan() -> None:
    run, gpus = parse(["--model_type", "llama_v2", "--model_size", "7b"], {}), find("g5.48xlarge")
    (line,) = preflight.memory(run, Machines(gpus, 1, 8))
    assert "12.55 of the 22.35 GiB of each A10G" in line
    assert machine(options().parse_args(["--instance_type", "g5.48xlarge"]))[2] == gpus.gpu_bytes
