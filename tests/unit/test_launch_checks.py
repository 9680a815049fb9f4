"""What launchers find out about a run before it has a GPU, and what the cluster's own words mean for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from smp_train import cli
from smp_train.arguments import parse
from smp_train.errors import ConfigError
from smp_train.launch import cluster, images, instances, planned, preflight, slurm, timing
from smp_train.launch.instances import Machines, find
from smp_train.launch.options import split
from smp_train.launch.spec import build
from smp_train.models.families import FAMILIES
from smp_train.models.resolve import presets
from smp_train.models.state_memory import fewest_parameters
from smp_train.planning.options import machine, options

HOUR = 3600
LLAMA_70B = ["--model_type", "llama_v2", "--model_size", "70b"]
LLAMA_7B = ["--model_type", "llama_v2", "--model_size", "7b"]


def check(words: list[str], instance: str, nodes: int) -> None:
    preflight.check(parse(words, {}), Machines(find(instance) if instance else None, nodes, 8))


@pytest.mark.parametrize(
    ("words", "instance", "nodes", "complaint"),
    [
        (LLAMA_70B, "p4d.24xlarge", 1, "take 128.5 GiB on each A100 of p4d.24xlarge, which has at most 40.0 GiB"),
        ([*LLAMA_70B, "--hybrid_shard_degree", "8"], "p5.48xlarge", 8, "a larger --hybrid_shard_degree,"),
        ([*LLAMA_70B, "--sharding_strategy", "no_shard"], "p5.48xlarge", 8, "take 1027.8 GiB"),
        ([*LLAMA_70B, "--sharding_strategy", "hybrid_shard"], "p5.48xlarge", 16, "spread over 8 of 128 processes"),
        (["--fp8", "1"], "g5.48xlarge", 1, "the A10G of g5.48xlarge has no FP8"),
        (LLAMA_70B, "p5.48xlarge", 8, ""),
        ([*LLAMA_70B, "--hybrid_shard_degree", "2", "--tensor_parallel_degree=8"], "p5.48xlarge", 8, ""),
        # On SMP, which this may come to, tensor parallelism shards over all nodes.
        ([*LLAMA_70B, "--sharding_strategy", "hybrid_shard", "--tensor_parallel_degree=8"], "p5.48xlarge", 8, ""),
        ([*LLAMA_70B, "--cpu_offload", "1"], "p4d.24xlarge", 1, ""),
        ([*LLAMA_70B, "--memory_check", "0"], "p4d.24xlarge", 1, ""),
        ([*LLAMA_70B, "--num_layers", "2"], "p4d.24xlarge", 1, ""),
        (["--hf_model", "some/model", "--tensor_parallel_degree=2"], "p4d.24xlarge", 8, ""),
    ],
)
def test_a_run_against_its_gpus(words: list[str], instance: str, nodes: int, complaint: str) -> None:
    check(words, "", nodes)
    if not complaint:
        check(words, instance, nodes)
        return
    with pytest.raises(ConfigError) as refused:
        check(words, instance, nodes)
    assert complaint in str(refused.value)


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
        (["--tensor_parallel_degree=8", *LLAMA_70B], ""),
        (["--context_parallel_degree=4", *LLAMA_70B], ""),
    ],
)
def test_degrees_against_the_model(words: list[str], complaint: str, backend: str) -> None:
    words = [*words, f"--backend={backend}"]
    if not complaint or (backend == "smp" and "tokens" in complaint):  # how SMP splits tokens is not known
        check(words, "", 8)
        return
    with pytest.raises(ConfigError) as refused:
        check(words, "", 10)
    assert complaint in str(refused.value)


def test_data_of_a_run_is_there(tmp_path: Path) -> None:
    for name in ("a", "b", "c:1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.json").touch()
    words = ["--training_dir", f"{tmp_path}/a:0.3", f"{tmp_path}/c:1", "s3://x/y:0.7", "--test_dir", f"{tmp_path}/b"]
    args = parse(words, {}).args
    assert [path for _, path in preflight.data_folders(args)] == [f"{tmp_path}/{name}" for name in ("a", "c:1", "b")]
    preflight.check_data(args)
    (tmp_path / "b/0.json").unlink()
    with pytest.raises(ConfigError, match=r"--test_dir .*/b: "):
        preflight.check_data(args)


def test_gated_model_without_a_token(tmp_path: Path) -> None:
    gated, home = parse(["--hf_model", "meta-llama/Llama-2-7b-hf"], {}), {"HOME": str(tmp_path)}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub/token").touch()
    hub = {"HF_HOME": str(tmp_path / "hub")}
    assert "meta-llama/Llama-2-7b-hf is gated and there is no" in preflight.missing_token(gated, home)[0]
    assert preflight.missing_token(gated, hub) == preflight.missing_token(gated, {**home, "HF_TOKEN": "x"}) == []
    assert preflight.missing_token(parse(["--hf_model", "gpt2"], {}), home) == []
    assert "a container sees no login of this home folder" in preflight.missing_token(gated, hub, home=False)[0]


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
    folders = ["--run_dir", str(tmp_path), "--checkpoint_dir", str(tmp_path)]
    small, large = parse([*LLAMA_7B, *folders], {}), parse([*LLAMA_70B, *folders], {})
    assert preflight.disk_warnings(small, 1) == []
    (line,) = preflight.disk_warnings(large, 1)
    assert f"{tmp_path}: 1000 GB are free, and two checkpoints of this model take 1655 GB" in line
    monkeypatch.setattr(preflight, "LOCAL_DISKS", ("", preflight.file_system(tmp_path)))
    (image := tmp_path / "x.sqsh").touch()
    (line,) = preflight.disk_warnings(small, 2, [str(image)])
    assert line.startswith(f"{tmp_path}, {image}: on a local disk (")
    assert preflight.disk_warnings(small, 1, [str(image)]) == []


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
        words = ["--model_type", preset.model_type, "--model_size", preset.model_size]
        assert fewest_parameters(parse(words, {}).args) == preset.parameters
        shallow = fewest_parameters(parse([*words, "--num_layers", "1"], {}).args)
        assert 0 < shallow <= of_folder < preset.parameters, preset
        assert of_folder > 0.35 * preset.parameters or kind in ("falcon", "gpt2"), preset
    ladder, synonym = ["--model_size=7B"], ["--model_type=llama3", "--model_size=8b"]
    for flags, name in ((ladder, ("scratch", "7b")), (synonym, ("llama_v3", "8b"))):
        assert fewest_parameters(parse(flags, {}).args) == presets()[name].parameters


def test_the_memory_of_a_gpu_is_that_of_a_plan() -> None:
    gpus = find("g5.48xlarge")
    (line,) = preflight.memory(parse(LLAMA_7B, {}), Machines(gpus, 1, 8))
    assert "12.55 of the 22.35 GiB of each A10G" in line
    assert machine(options().parse_args(["--instance_type", "g5.48xlarge"]))[2] == gpus.gpu_bytes


SMP = "658645717510.dkr.ecr.us-west-2.amazonaws.com/smdistributed-modelparallel:{}"
AWS = "763104351884.dkr.ecr.us-west-2.amazonaws.com/pytorch-training{}:2.8.0-gpu-py312"


@pytest.mark.parametrize(
    ("instance", "image", "backend", "complaint"),
    [
        ("p5.48xlarge", SMP.format("2.5.1-gpu-py311-cu124"), "smp", ""),
        ("p5.48xlarge", SMP.format("2.4.1-gpu-py311-cu121"), "auto", ""),
        ("p6-b200.48xlarge", "/fsx/image-without-a-word.sqsh", "native", ""),
        ("p6e-gb200.36xlarge", AWS.format("-arm64"), "native", ""),
        ("p5.48xlarge", "registry/charm64x:1", "native", ""),
        ("p6-b200.48xlarge", SMP.format("2.5.1-gpu-py311-cu124"), "smp", "CUDA 12.4 does not know the B200 of p6-b200"),
        ("p6e-gb200.36xlarge", AWS.format(""), "native", "is for x86_64, and p6e-gb200.36xlarge has aarch64"),
        ("p5.48xlarge", AWS.format("-arm64"), "native", "is for aarch64, and p5.48xlarge has x86_64"),
        ("p5.48xlarge", SMP.format("2.2.0-gpu-py310-cu121"), "smp", "torch 2.4.1 and 2.5.1"),
        ("p5.48xlarge", SMP.format("2.5.1-gpu-py311-cu124"), "native", "has torch 2.5.1, and --backend native needs"),
        ("p5.48xlarge", AWS.format("").replace("2.8.0", "2.7.1"), "auto", "has torch 2.7.1, and --backend native"),
    ],
)
def test_image_against_instance_and_backend(instance: str, image: str, backend: str, complaint: str) -> None:
    if not complaint:
        images.check_image(find(instance), image, backend)
        images.check_image(None, image, backend)
        return
    with pytest.raises(ConfigError) as refused:
        images.check_image(find(instance), image, backend)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:15", 1815), ("2:30:15", 9015), ("1-2", 93600), ("1-2:30", 95400), ("2-00:00:01", 172801),
        ("UNLIMITED", None), ("", None), (None, None),
    ],
)  # fmt: skip
def test_times_as_slurm_writes_them(text: str | None, seconds: int | None) -> None:
    assert timing.slurm_seconds(text) == seconds


def test_limit_without_time_to_train() -> None:
    with pytest.raises(ConfigError, match=r"--time 6: .*6 min.* 5 min"):
        timing.check_limit(360, 300, "--time 6")
    timing.check_limit(361, 300, "--time 6:01")
    timing.check_limit(None, 300, "--time")


def save_warnings(
    tmp_path: Path, *words: str, limit: float | None = 48 * HOUR, margin: float = 300, nodes: int = 8
) -> str:
    resolved, machines = parse([*words, "--run_dir", str(tmp_path)], {}), Machines(find("p5.48xlarge"), nodes, 8)
    return "\n".join(timing.save_warnings(resolved, machines, limit, margin, "--save_before"))


def test_time_for_the_last_checkpoint(tmp_path: Path) -> None:
    often = "--checkpoint_freq=10"
    assert save_warnings(tmp_path, *LLAMA_7B, often) == save_warnings(tmp_path, *LLAMA_70B, often) == ""
    line = save_warnings(tmp_path, *LLAMA_70B, often, margin=60)
    assert all(part in line for part in ("has 828 GB, and there are 60 s to save one", "13.8 GB/s"))
    assert "raise --save_before" in save_warnings(tmp_path, *LLAMA_70B, often, nodes=1)


def test_interval_against_the_limit(tmp_path: Path) -> None:
    often = ["--hf_model", "some/model", "--checkpoint_freq", "500", "1000"]
    assert save_warnings(tmp_path, *often, limit=HOUR) == "", "unknown"
    lines = [{"event": "start", "step": 0}, *({"step": step, "step_sec": 20.0} for step in range(1, 6))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{torn\n")
    line = save_warnings(tmp_path, *often, limit=HOUR)
    assert "that takes 2.8 h (20 s a step, as measured in this run folder), and the time limit is 60 min" in line
    assert "--checkpoint_freq 41 would save some four times" in line
    for more, limit in ((["--max_steps=100"], HOUR), ([], None), ([], 8 * HOUR)):
        assert save_warnings(tmp_path, *often, *more, limit=limit) == "", "enough"


LLAMA = [*LLAMA_7B, "--max_context_width=4096"]
LARGE = ["--train_batch_size=8", "--activation_checkpointing=none"]


def plan(*words: str) -> list[str]:
    run, machines = parse([*LLAMA, *words], {}), Machines(find("p5.48xlarge"), 1, 8)
    preflight.check(run, machines)  # the state alone fits
    return planned.check(run, [*LLAMA, *words], machines)


PLATFORMS = {
    "slurm": ["--use_synthetic_data=1"],
    "k8s": ["--use_synthetic_data=1", "--image=i", "--claims=c:/fsx", "--run_dir=/fsx/a"],
    "sagemaker": ["--role=arn:aws:iam::123456789012:role/a", "--train=s3://bucket/a"],
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_dry_run_says_that_it_plans_nothing(platform: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [platform, *PLATFORMS[platform], *LLAMA, "--dry_run", "--instance_type=p5.48xlarge"]
    for more, line in (
        ([], "not planned in this dry run; --check does"),
        (["--auto"], "not searched (--auto) in this dry run; --check does"),
        (["--memory_check=0"], ""),  # --check would not plan it either
    ):
        assert cli.main(["launch", *words, *more]) == 0
        err = capsys.readouterr().err
        assert (line in err, "--check" in err) == (True, bool(line))


@pytest.mark.slow
def test_a_run_that_is_planned_not_to_fit_is_warned_of_and_refused_where_nothing_can_help() -> None:
    assert plan("--train_batch_size=1") == []
    (line,) = plan("--backend=native", *LARGE)  # compiled layers may take less
    assert all(part in line for part in ("does not fit", "each of 8 devices", "--activation_checkpointing full"))
    with pytest.raises(ConfigError, match=r"does not fit.*--memory_check 0"):
        plan("--backend=native", "--use_torch_compile=0", *LARGE)


FITS_NOT = json.dumps({"best": []}) + "\nsmp-train: error: nothing fits 8 devices of 74.51 GiB"
NO_PLAN = "smp-train: error: --fp8 1: needs a GPU that has it, so there is no plan"


@pytest.mark.parametrize(
    ("words", "answer", "result"),
    [
        (LARGE, (2, NO_PLAN), []),
        (["--auto"], (0, json.dumps({"best": [{"words": "--hybrid_shard_degree 2"}]})), []),
        (["--auto"], (2, FITS_NOT), "--auto.*nothing fits 8 devices"),
        (["--auto"], (2, NO_PLAN), "--auto: --fp8 1"),
        (["--auto"], (124, "late"), ["--auto was not planned here (exit code 124); the run will plan when it starts"]),
        *(([*LARGE, word], None, []) for word in ("--memory_check=0", "--evaluate_only=1", "--trust_remote_code=1")),
    ],
)
def test_what_a_plan_says(
    words: list[str], answer: Any, result: list[str] | str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With --auto what would be chosen is printed or refused; ``answer`` None: nothing is planned."""
    monkeypatch.setattr(planned, "ask", lambda *_, **__: answer)
    if isinstance(result, str):
        with pytest.raises(ConfigError, match=result):
            plan(*words)
        return
    assert plan(*words) == result
    said = capsys.readouterr().err
    assert ("searching settings for 8 GPUs (--auto)" in said) is ("--auto" in words)
    assert ("--hybrid_shard_degree 2" in said) is (answer is not None and answer[0] == 0)


CONFIG = "TaskPlugin              = task/none\nPrologFlags             = (null)\nJobRequeue = 1\nPreemptType = x\n"
PARTITION = "PartitionName=dev Default=YES DefaultTime=NONE GraceTime=120 MaxTime=UNLIMITED PreemptMode=REQUEUE"


def doubles(folder: Path, monkeypatch: pytest.MonkeyPatch, **commands: str) -> None:
    """Put doubles of commands first in the path."""
    folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def of_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str, config: str = "", partition: str = PARTITION,
    srun: str = "", gres: str = "",
) -> list[str]:  # fmt: skip
    """Return the warnings on a cluster whose commands have these answers."""
    scontrol = f'case "$2" in config) cat <<E\n{CONFIG}{config}\nE\n;; *) echo "{partition}";; esac'
    doubles(tmp_path / "bin", monkeypatch, scontrol=scontrol, srun=f'echo "{srun}"', sinfo=f'echo "{gres}"')
    training = ["--use_synthetic_data", "1", "--run_dir", str(tmp_path / "run")]
    given, flags = split(["--nodes=2", "--nproc=1", *words, *training], slurm.parser())
    return cluster.warnings(build(flags, given), given)


@pytest.mark.parametrize(
    ("answers", "words", "expected"),
    [
        ({}, [], []),
        ({"config": "JobRequeue = 0"}, [], ["JobRequeue=0"]),
        ({"srun": "--auto-resume"}, [], []),
        ({"srun": "--auto-resume", "config": "TaskPlugin = task/cgroup"}, [], ["TaskPlugin=task/cgroup"]),
        ({"srun": "--auto-resume", "config": "PrologFlags = Alloc,NoHold"}, [], ["PrologFlags=Alloc,NoHold"]),
        ({"srun": "--auto-resume"}, ["--gpus_per_node", "8"], ["--gpus_per_node: Slurm does not swap nodes"]),
        ({"gres": "gpu:8"}, [], ["this cluster has GRES"]),
        ({"gres": "gpu:8"}, ["--gpus_per_node", "8"], []),
        ({"partition": PARTITION.replace("=120", "=0")}, [], ["partition dev: a preempted job is given 0 s"]),
        ({"partition": PARTITION.replace("=120", "=0"), "config": "PreemptType = preempt/none"}, [], []),
        ({"partition": PARTITION.replace("UNLIMITED", "0:05:00")}, [], r"partition dev: .*--time.* 5 min"),
        ({}, ["--image", "/x.sqsh"], "knows no --container-image"),
    ],
)
def test_a_clusters_configuration(
    answers: dict[str, str], words: list[str], expected: list[str] | str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            of_cluster(tmp_path, monkeypatch, *words, **answers)
        return
    lines = of_cluster(tmp_path, monkeypatch, *words, **answers)
    assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected


def test_default_time_of_the_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "step_sec": 100.0}\n')
    partition = PARTITION.replace("NONE", "1-00:00:00")
    (line,) = of_cluster(tmp_path, monkeypatch, partition=partition)
    assert line.startswith("--checkpoint_freq 1000: that takes 27.8 h")
    assert of_cluster(tmp_path, monkeypatch, "--time", "3-00:00:00", partition=partition) == []


# What follows srun's own options is run here, as if this were the compute node.
NODE = 'case "$*" in --help) exit;; esac; while [ "$1" != bash ]; do shift; done; exec "$@"'


@pytest.mark.parametrize(
    ("srun", "words", "needed", "result"),
    [
        (NODE, [], ["/usr"], ""),
        (NODE, [], ["/usr", "/no/data", "/no/image.sqsh"], r"/no/data, /no/image\.sqsh"),
        (NODE, ["--image", "/usr"], ["/usr"], "--container-image"),
        (NODE.replace("--help) exit", "--help) echo --container-image; exit"), ["--image", "/usr"], ["/usr"], ""),
        ("echo 'srun: error: Requested nodes are busy' >&2; exit 1", [], [], "no compute node could be asked: srun: e"),
    ],
)
def test_probe_of_a_compute_node(
    srun: str, words: list[str], needed: list[str], result: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubles(tmp_path / "bin", monkeypatch, srun=srun)
    given: Any = split(words, slurm.parser())[0]
    if not result or "asked" in result:
        assert result in "".join(cluster.probe(given, needed))
        return
    with pytest.raises(ConfigError, match=result):
        cluster.probe(given, needed)


def test_instance_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for instance in instances.instances().values():
        assert instance.gpus in (1, 2, 4, 8)
        assert instance.efa >= 1 or not instance.rdma
    monkeypatch.setattr(instances, "PRODUCT", tmp_path / "product_name")
    assert instances.this_machine() is None
    (tmp_path / "product_name").write_text("p5.48xlarge\n")
    assert instances.this_machine() == find("p5.48xlarge")
