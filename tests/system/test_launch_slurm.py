"""On a real Slurm of several nodes: what people submit trains to the end, and survives what clusters do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.rig import MISSING, ROOT, USABLE, Rig
from tests.training import TINY, read_checkpoint

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(not USABLE, reason=f"needs root and Debian's slurm-wlm, munge, libslurm-dev (no {MISSING})"),
]
SCRIPTS = ROOT / "launchers/hyperpod_slurm"
STEPS = 60
FLAGS = {**TINY, "num_layers": 1, "max_steps": STEPS, "checkpoint_freq": 10}


def words(**changes: Any) -> list[str]:
    return [f"--{name}={value}" for name, value in {**FLAGS, **changes}.items() if value is not None]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("rig") / "r") as cluster:
        yield cluster


def submit(rig: Rig, script: str, folder: Path, flags: list[str], *sbatch: str, **environ: str) -> tuple[str, Path]:
    """Submit a launcher as a user would, from ``folder``, and return (job id, its output file)."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {
        "NPROC": "2",
        "PYTHON": sys.executable,
        "RUN_DIR": str(folder / "run"),
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    job = rig.run(
        "sbatch", "--parsable", "--nodes=2", *sbatch, str(SCRIPTS / script), *flags, cwd=folder, **environ
    ).strip()
    return job, folder / f"slurm-{job}.out"


def steps(folder: Path) -> dict[int, float]:
    """Return loss by step; a step that was done again after a restart counts once, as it was last."""
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines) if "event" not in record}


def reached(folder: Path, step: int) -> bool:
    return (folder / "run/metrics.jsonl").exists() and max(steps(folder), default=0) >= step


def starts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run/launches.jsonl").read_text().splitlines()]


def done(folder: Path) -> int:
    return int(json.loads((folder / "run/DONE").read_text())["step"])


@pytest.fixture(scope="module")
def undisturbed(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in an environment of Python, 2 nodes x 2 processes, that nothing happened to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job, log = submit(rig, "launch_training_conda.sh", folder, words())
    assert rig.wait_for_end(job, 120, log) == "COMPLETED", log.read_text()
    return folder


def test_environment_trains_to_done(undisturbed: Path) -> None:
    assert done(undisturbed) == STEPS
    assert sorted(steps(undisturbed)) == list(range(1, STEPS + 1))
    (start,) = starts(undisturbed)
    assert start["nodes"] == "n[1-2]"
    logs = undisturbed / "run/logs" / start["attempt"]
    assert sorted(path.name for path in logs.glob("rank-*")) == [f"rank-{rank}.log" for rank in range(4)]


def test_container_trains_to_done(rig: Rig, tmp_path: Path) -> None:
    image = tmp_path / "smpv2.sqsh"
    image.touch()
    chosen = {"IMAGE": str(image), "NPROC": "1", "PREFLIGHT": "120"}
    job, log = submit(rig, "launch_training_enroot.sh", tmp_path, words(max_steps=4), "--time=10", **chosen)
    assert rig.wait_for_end(job, 120, log) == "COMPLETED", log.read_text()
    assert done(tmp_path) == 4
    assert f"smp-train: finished: {tmp_path}/run/DONE" in log.read_text()
    assert "preflight: 2 ranks on 2 nodes reach each other: all-reduce of 4 MiB at" in log.read_text()


def same_end(first: Path, second: Path) -> None:
    import torch

    assert steps(first) == steps(second)
    one, two = (read_checkpoint(folder / f"run/checkpoints/llama_v2-{STEPS}steps") for folder in (first, second))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name], name


def test_lost_node_is_replaced_and_nothing_changes(rig: Rig, undisturbed: Path, tmp_path: Path) -> None:
    job, log = submit(rig, "launch_training_conda.sh", tmp_path, words())
    rig.wait(lambda: reached(tmp_path, 25), 90, "step 25")
    nodes = starts(tmp_path)[0]["nodes"]
    rig.crash("n2")
    try:
        assert rig.wait_for_end(job, 120, log) == "COMPLETED", log.read_text()
    finally:
        rig.boot("n2")
    assert nodes == "n[1-2]"
    assert starts(tmp_path)[-1]["nodes"] == "n[1,3]"
    assert starts(tmp_path)[-1]["committed_step"] >= 20
    same_end(undisturbed, tmp_path)
    rig.wait(lambda: rig.idle() == rig.nodes, 30, "the node to come back")


def test_out_of_time_saves_and_goes_on(rig: Rig, undisturbed: Path, tmp_path: Path) -> None:
    job, log = submit(rig, "launch_training_conda.sh", tmp_path, words(checkpoint_freq=1000))
    rig.wait(lambda: reached(tmp_path, 20), 90, "step 20")
    rig.run("scancel", "--batch", "--signal=USR1", job)
    assert rig.wait_for_end(job, 120, log) == "COMPLETED", log.read_text()
    assert len(starts(tmp_path)) == 2
    assert starts(tmp_path)[1]["committed_step"] >= 20
    same_end(undisturbed, tmp_path)


def test_data_is_prepared_and_trained_on_by_variables(rig: Rig, tmp_path: Path) -> None:
    """prepare_data.sh makes shards, launch_slurm.sh trains on them, profiled."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / f"text/{number}.txt").write_text(f"The {number} nodes of a cluster wait for each other. " * 20)
    made = ["--train_tokenizer=300", "--seq_len=16", f"--input={tmp_path}/text", f"--output={tmp_path}/data"]
    job, log = submit(rig, "prepare_data.sh", tmp_path, made, "--nodes=1")
    assert rig.wait_for_end(job, 60, log) == "COMPLETED", log.read_text()
    assert (tmp_path / "data/_manifest.json").exists()
    flags = words(
        vocab_size=300, max_steps=3, profile_start=2, profile_steps=1, use_synthetic_data=None, train_batch_size=None
    )
    job, log = submit(
        rig, "launch_slurm.sh", tmp_path, flags, "--nodes=1", NPROC="1", PROFILE="torch", BATCH_SIZE="2",
        GRAD_ACCUM_STEPS="2", TRAINING_DIR=f"{tmp_path}/data/train", TEST_DIR=f"{tmp_path}/data/test",
    )  # fmt: skip
    assert rig.wait_for_end(job, 90, log) == "COMPLETED", log.read_text()
    assert done(tmp_path) == 3
    config = json.loads((tmp_path / "run/run.json").read_text())["config"]
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (2, 2)
    assert (tmp_path / "run/profile/trace-rank0.json.gz").exists()


def test_cancelled_job_does_not_come_back(rig: Rig, tmp_path: Path) -> None:
    job, _ = submit(rig, "launch_training_conda.sh", tmp_path, words(max_steps=100000), "--nodes=1", NPROC="1")
    rig.wait(lambda: reached(tmp_path, 3), 60, "step 3")
    rig.run("scancel", job)
    rig.wait(lambda: rig.state(job) == "CANCELLED" and rig.idle() == rig.nodes, 60, "the job to end")
    assert len(starts(tmp_path)) == 1


def test_crash_loop_stops(rig: Rig, tmp_path: Path) -> None:
    flags = words(lr=1e30, max_steps=5000)
    job, log = submit(rig, "launch_training_conda.sh", tmp_path, flags, "--nodes=1", NPROC="1", MAX_ATTEMPTS="2")
    assert rig.wait_for_end(job, 120, log) == "FAILED", log.read_text()
    text = log.read_text()
    assert len(starts(tmp_path)) == 2
    assert text.count("first failure of this start: LAUNCH-FAIL node=n1 rank=0 rc=1") == 2
    assert f"2 starts of job {job} brought no checkpoint beyond step 0: not trying again" in text


@pytest.mark.parametrize(
    ("script", "flags", "environ", "said"),
    [
        (
            "launch_training_enroot.sh",
            {},
            {"IMAGE": "/nowhere.sqsh"},
            "no image /nowhere.sqsh on n1; make it with docker_build.sh",
        ),
        (
            "launch_training_conda.sh",
            {},
            {"PYTHON": "/no/python"},
            "no interpreter /no/python on n1; run setup_conda_env.sh",
        ),
        (
            "launch_training_conda.sh",
            {"use_synthetic_data": None},
            {"TRAINING_DIR": "/no/data"},
            "no folder /no/data on n1",
        ),
        ("launch_training_conda.sh", {"max_stepz": 3}, {}, "unknown flag --max_stepz; did you mean --max_steps?"),
        (
            "launch_training_conda.sh",
            {},
            {"INSTANCE_TYPE": "p5.48xlarge", "NPROC": "auto"},
            "0 of 8 GPUs are visible on this p5.48xlarge",
        ),
    ],
    ids=["image", "interpreter", "data", "flag", "gpus"],
)
def test_refused_at_start(
    rig: Rig, tmp_path: Path, script: str, flags: dict[str, Any], environ: dict[str, str], said: str
) -> None:
    job, log = submit(rig, script, tmp_path, words(**flags), MAX_ATTEMPTS="1", **environ)
    assert rig.wait_for_end(job, 90, log) == "FAILED"
    assert said in log.read_text()
    again = "INSTANCE_TYPE" in environ  # another node may have what this one lacks
    assert ("putting the job back into the queue" in log.read_text()) is again


def test_missing_mount_is_refused(rig: Rig, tmp_path: Path) -> None:
    image = tmp_path / "x.sqsh"
    image.touch()
    job, log = submit(rig, "launch_training_enroot.sh", tmp_path, words(), IMAGE=str(image), TEST_DIR="/no/test")
    assert rig.wait_for_end(job, 90, log) == "FAILED"
    assert "no folder /no/test on n1" in log.read_text()


def worker_of(node: str, rig: Rig) -> int:
    """Return the process id of a training process on a node."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            wanted = {f"SLURMD_NODENAME={node}".encode(), f"RIG={rig.folder}".encode(), b"LOCAL_RANK=1"}
            if wanted <= set(environ):
                return int(entry.name)
    raise AssertionError(f"no training process on {node}")


def test_auto_resume_swaps_the_node(undisturbed: Path, tmp_path: Path) -> None:
    with Rig(tmp_path / "r", auto_resume=True) as rig:
        job, log = submit(rig, "launch_training_conda.sh", tmp_path, words(), "--exclusive")
        rig.wait(lambda: reached(tmp_path, 25), 90, "step 25")
        (rig.folder / "run/bad_nodes").write_text("n2\n")
        os.kill(worker_of("n2", rig), signal.SIGKILL)
        assert rig.wait_for_end(job, 120, log) == "COMPLETED", log.read_text()
    first, second = starts(tmp_path)
    assert (first["nodes"], second["nodes"]) == ("n[1-2]", "n[1,3]")
    assert first["attempt"].rpartition(".")[0] == second["attempt"].rpartition(".")[0], (
        "the same start of the batch script"
    )
    assert "cause=killed" in log.read_text()
    same_end(undisturbed, tmp_path)


def command(rig: Rig, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run `smp-train launch slurm` for a tiny run on one node."""
    return subprocess.run(
        [sys.executable, "-m", "smp_train", "launch", "slurm", "--nproc", "1", *more, *words(max_steps=3)],
        cwd=folder, env={**rig.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_command_checks_and_submits(rig: Rig, tmp_path: Path) -> None:
    checked = command(rig, tmp_path, "--partition", "dev", "--check", "--probe")
    assert checked.returncode == 0, checked.stderr
    assert "to start at" in checked.stderr, "sbatch says when it would"
    submitted = command(rig, tmp_path, "--partition", "dev", "--run_dir", "here")
    assert submitted.returncode == 0, submitted.stderr
    lines = dict(line.split(maxsplit=1) for line in submitted.stdout.splitlines())
    job = lines["submitted"].removeprefix("job ")
    assert lines["log:"] == f"{tmp_path}/here/logs/slurm-{job}.out"
    assert rig.wait_for_end(job, 90, Path(lines["log:"])) == "COMPLETED"
    assert json.loads((tmp_path / "here/DONE").read_text())["step"] == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "moon"], "`sinfo` lists the partitions"),
        (["--nodes", "9"], "fewer --nodes"),
        (["--gpus_per_node", "8"], "leave --gpus_per_node out: this cluster has no GRES"),
        (["--image", "/nowhere.sqsh"], "--image /nowhere.sqsh: no such file; make it with docker_build.sh"),
        (["--image", "/dev/null", "--mounts", "/no/mount"], "--mounts /no/mount: /no/mount does not exist"),
        (["--python", "/no/python"], "--python /no/python: no such interpreter"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_command_refuses_before_it_submits(rig: Rig, tmp_path: Path, options: list[str], said: str) -> None:
    refused = command(rig, tmp_path, *options)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert rig.run("squeue", "-h", "-t", "PENDING") == ""
