"""On a real Slurm of several nodes: what people submit trains to the end, and survives what clusters do.

Starting a process of training costs some seconds of a core, so the jobs here say several things each, and have two
processes in all where that is enough. A run that is to be met half-way waits there (rig/hold), so that nothing here
depends on how fast the machine is.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from smp_train import cli
from smp_train.telemetry.metrics import read_metrics
from tests.harness import as_torchrun
from tests.system.command import Ranks
from tests.system.rig import HERE, MISSING, ROOT, USABLE, Rig
from tests.training import TINY, read_checkpoint

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.timeout(2400),  # the longest job starts three times, and the machine may be busy
    pytest.mark.skipif(not USABLE, reason=f"needs root and Debian's slurm-wlm, munge, libslurm-dev (no {MISSING})"),
]
SCRIPTS = ROOT / "launchers/hyperpod_slurm"
ENROOT, CONDA = "launch_training_enroot.sh", "launch_training_conda.sh"
STEPS = 40
FLAGS = {**TINY, "num_layers": 1, "max_steps": STEPS, "checkpoint_freq": 5}


def words(**changes: Any) -> list[str]:
    return [f"--{name}={value}" for name, value in {**FLAGS, **changes}.items() if value is not None]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("rig") / "r") as cluster:
        yield cluster


def submit(rig: Rig, script: str, folder: Path, flags: list[str], *sbatch: str, **environ: str) -> tuple[str, Path]:
    """Submit a launcher as a user would, from ``folder``, for two nodes; return (job id, its output file)."""
    folder.mkdir(parents=True, exist_ok=True)
    environ = {"NPROC": "1", "PYTHON": sys.executable, "RUN_DIR": f"{folder}/run", "OMP_NUM_THREADS": "1", **environ}
    words = ["sbatch", "--parsable", "--nodes=2", *sbatch, str(SCRIPTS / script), *flags]
    job = rig.run(*words, cwd=folder, **environ).strip()
    return job, folder / f"slurm-{job}.out"


def records(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "run")


def steps(folder: Path) -> dict[int, float]:
    """Return loss by step; a step that was done again after a restart counts once, as it was last."""
    return {record["step"]: record["loss"] for record in records(folder) if "event" not in record}


def starts(folder: Path) -> list[dict[str, Any]]:
    """Return what the guard has written so far, by whole lines: it may be writing one."""
    path = folder / "run/launches.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def done(folder: Path) -> int:
    return int(json.loads((folder / "run/DONE").read_text())["step"])


def worker(rig: Rig, node: str) -> psutil.Process:
    """Return the first training process on a node."""
    wanted = {"SLURMD_NODENAME": node, "RIG": str(rig.folder), "LOCAL_RANK": "0"}.items()
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if wanted <= process.environ().items():
                found.append(process)
    return min(found, key=lambda process: process.create_time())  # the others are its children


def hold(folder: Path) -> dict[str, str]:
    """Return the variables of a run that waits half-way until `let_go`."""
    (folder / "hold").touch()
    return {"PYTHONPATH": str(HERE / "hold"), "RIG_HOLD": f"{folder}/hold"}


def meet(rig: Rig, folder: Path) -> None:
    """Wait until the run waits: it has committed step 5, and will not come further than to step 15."""
    rig.wait((folder / "hold-here").exists, "the run to be half-way")


def let_go(folder: Path) -> None:
    (folder / "hold").unlink()


def same_end(first: Path, second: Path) -> None:
    import torch

    assert steps(first) == steps(second)
    one, two = (read_checkpoint(folder / f"checkpoints/run/llama_v2-{STEPS}steps") for folder in (first, second))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name], name


@pytest.fixture(scope="module")
def container(rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a container, 2 nodes x 2 processes, that nothing happened to."""
    folder = tmp_path_factory.mktemp("container")
    (folder / "smpv2.sqsh").touch()
    chosen = {"IMAGE": f"{folder}/smpv2.sqsh", "NPROC": "2", "PREFLIGHT": "900"}
    # An image with variables of its own: with this PYTHONPATH nothing would run.
    chosen["PYXIS_DOUBLE_IMAGE_ENV"] = "PYTHONPATH=/baked OMP_NUM_THREADS=9 HF_HOME=/baked"
    job, log = submit(rig, ENROOT, folder, words(), "--time=60", **chosen)
    assert rig.wait_for_end(job, log) == "COMPLETED", log.read_text()
    return folder


def test_container_trains_to_done(container: Path) -> None:
    assert done(container) == STEPS
    assert sorted(steps(container)) == list(range(1, STEPS + 1))
    (start,) = starts(container)
    assert start["nodes"] == "n[1-2]"
    logs = container / "run/logs" / start["attempt"]
    assert {f"rank-{rank}.log" for rank in range(4)} <= {path.name for path in logs.iterdir()}
    (log,) = container.glob("slurm-*.out")
    assert f"smp-train: finished: {container}/run/DONE" in log.read_text()
    assert "preflight: 4 ranks on 2 nodes reach each other: all-reduce of 4 MiB at" in log.read_text()


def test_auto_resume_swaps_the_node(container: Path, tmp_path: Path) -> None:
    """In an environment of Python, 2 nodes x 2 processes: one is killed, and the node with it is replaced."""
    with Rig(tmp_path / "r", auto_resume=True) as rig:
        (rig.folder / "run/bad_nodes").write_text("n2\n")
        job, log = submit(rig, CONDA, tmp_path, words(), "--exclusive", NPROC="2", **hold(tmp_path))
        meet(rig, tmp_path)
        worker(rig, "n2").kill()
        let_go(tmp_path)
        assert rig.wait_for_end(job, log) == "COMPLETED", log.read_text()
    assert done(tmp_path) == STEPS
    first, second = starts(tmp_path)
    assert (first["nodes"], second["nodes"]) == ("n[1-2]", "n[1,3]")
    start = [one["attempt"].rpartition(".")[0] for one in (first, second)]
    assert start[0] == start[1], "the same start of the batch script"
    assert "cause=killed" in log.read_text()
    same_end(container, tmp_path)


def undisturbed(folder: Path, ranks: int) -> Ranks:
    """Start the same run on this machine, of processes that have their imports behind them."""
    place = {"run_name": "run", "run_dir": folder / "run", "checkpoint_dir": folder / "checkpoints"}
    return Ranks(folder, ranks, "train", *words(**place), launcher=as_torchrun)


def test_lost_node_is_replaced_and_nothing_changes(rig: Rig, tmp_path: Path) -> None:
    with undisturbed(tmp_path / "here", 2) as ranks:
        job, log = submit(rig, CONDA, tmp_path, words(), **hold(tmp_path))
        meet(rig, tmp_path)
        rig.crash("n2")
        let_go(tmp_path)
        try:
            assert rig.wait_for_end(job, log) == "COMPLETED", log.read_text()
        finally:
            rig.boot("n2")
        assert ranks.codes() == [0, 0], ranks.err
    first, second = starts(tmp_path)
    assert (first["nodes"], second["nodes"]) == ("n[1-2]", "n[1,3]")
    assert second["committed_step"] >= 5
    same_end(tmp_path / "here", tmp_path)
    rig.wait(lambda: rig.idle() == rig.nodes, "the node to come back")


def test_preempted_job_saves_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm sends USR1, as it does before the time limit. On a cluster with GRES: a process for each GPU asked for."""
    with Rig(tmp_path / "r", nodes=1, gpus=2) as rig, undisturbed(tmp_path / "here", 1) as ranks:
        asked = ["--nodes=1", "--gpus-per-node=1"]
        job, log = submit(rig, CONDA, tmp_path, words(), *asked, NPROC="auto", **hold(tmp_path))
        meet(rig, tmp_path)
        rig.run("sbatch", "--partition=prio", "--exclusive", "--output=/dev/null", "--wrap=true", cwd=tmp_path)
        rig.wait((tmp_path / "run/STOP").exists, "the request to stop")
        let_go(tmp_path)
        at(rig, tmp_path, monkeypatch)
        for more, warned in (([], True), (["--gpus_per_node", "2"], False)):
            assert launch("--check", *more) == 0
            assert ("this cluster has GRES: without --gpus_per_node" in capsys.readouterr().err) is warned
        assert rig.wait_for_end(job, log) == "COMPLETED", log.read_text()
        assert ranks.codes() == [0], ranks.err
        # Every node would have these eight: the choice of two is this job's.
        job, other = submit(
            rig, CONDA, tmp_path / "b", words(), "--nodes=1", "--gpus-per-node=2", NPROC="auto",
            INSTANCE_TYPE="p5.48xlarge",
        )  # fmt: skip
        assert rig.wait_for_end(job, other) == "FAILED"
    assert "2 of 8 GPUs are visible on this p5.48xlarge (CUDA_VISIBLE_DEVICES=0,1)" in other.read_text()
    assert "asked to stop by USR1" in log.read_text()
    assert [start["committed_step"] >= 10 for start in starts(tmp_path)] == [False, True]
    saved = starts(tmp_path)[1]["committed_step"]
    assert [one["step"] for one in records(tmp_path) if one.get("event") == "stop"] == [saved], "when it was asked"
    same_end(tmp_path / "here", tmp_path)


def test_cancelled_job_does_not_come_back(rig: Rig, tmp_path: Path) -> None:
    job, log = submit(rig, CONDA, tmp_path, words(max_steps=10**6), "--nodes=1")
    rig.wait(lambda: bool(starts(tmp_path)), "the start")
    rig.run("scancel", job)
    assert rig.wait_for_end(job, log) == "CANCELLED"
    rig.wait(lambda: rig.idle() == rig.nodes, "the job to be gone")
    assert len(starts(tmp_path)) == 1


def test_interrupt_of_srun_saves_and_stops(rig: Rig, tmp_path: Path) -> None:
    """Ranks that srun starts itself; without --disable-status a first ^C shows the status and a second one aborts."""
    run = ["--run_name=mine", f"--run_dir={tmp_path}/run", f"--checkpoint_dir={tmp_path}/checkpoints"]
    command = ["srun", "--disable-status", "--nodes=1", "--ntasks=2", sys.executable, "-m", "smp_train", "train"]
    with subprocess.Popen(
        [*command, *words(max_steps=10**6, checkpoint_freq=10**6), *run], env=rig.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as step:  # fmt: skip
        rig.wait(lambda: (tmp_path / "run/metrics.jsonl").exists() and bool(steps(tmp_path)), "the first step")
        step.send_signal(signal.SIGINT)
        said = step.communicate(timeout=600)[1]
    assert step.returncode == 0, said
    stopped = json.loads((tmp_path / "run/STOPPED").read_text())["step"]
    assert (tmp_path / f"checkpoints/mine/llama_v2-{stopped}steps/COMMITTED").exists()
    assert "Traceback" not in said


def test_data_is_prepared_and_trained_on_by_variables(rig: Rig, tmp_path: Path) -> None:
    """prepare_data.sh makes shards, launch_slurm.sh trains on them, profiled."""
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / f"text/{number}.txt").write_text(f"The {number} nodes of a cluster wait for each other. " * 20)
    made = ["--train_tokenizer=300", "--seq_len=16", f"--input={tmp_path}/text", f"--output={tmp_path}/data"]
    job, log = submit(rig, "prepare_data.sh", tmp_path, made, "--nodes=1")
    assert rig.wait_for_end(job, log) == "COMPLETED", log.read_text()
    assert (tmp_path / "data/_manifest.json").exists()
    flags = words(
        vocab_size=300, max_steps=3, profile_start=2, profile_steps=1, use_synthetic_data=None, train_batch_size=None
    )
    job, log = submit(
        rig, "launch_slurm.sh", tmp_path, flags, "--nodes=1", PROFILE="torch", BATCH_SIZE="2", GRAD_ACCUM_STEPS="2",
        TRAINING_DIR=f"{tmp_path}/data/train", TEST_DIR=f"{tmp_path}/data/test",
    )  # fmt: skip
    assert rig.wait_for_end(job, log) == "COMPLETED", log.read_text()
    assert done(tmp_path) == 3
    config = json.loads((tmp_path / "run/run.json").read_text())["config"]
    assert (config["train_batch_size"], config["gradient_accumulation_steps"]) == (2, 2)
    assert (tmp_path / "run/profile/trace-rank0.json.gz").exists()


def test_crash_loop_and_missing_data_end(rig: Rig, tmp_path: Path) -> None:
    flags = words(lr=1e30, max_steps=5000, checkpoint_freq=5000)
    crashing, crashed = submit(rig, CONDA, tmp_path / "loop", flags, "--nodes=1", MAX_ATTEMPTS="1")
    flags, no_data = words(use_synthetic_data=None), {"TRAINING_DIR": "/no/data"}
    refused, log = submit(rig, CONDA, tmp_path / "data", flags, "--nodes=1", **no_data)
    assert rig.wait_for_end(refused, log) == "FAILED", log.read_text()
    assert "--training_dir /no/data: no such" in log.read_text()
    assert rig.wait_for_end(crashing, crashed) == "FAILED", crashed.read_text()
    assert len(starts(tmp_path / "loop")) == 1
    text = crashed.read_text()
    (failure,) = [line for line in text.splitlines() if "first failure of this start: " in line and "loop" not in line]
    assert failure.endswith("rank=0 rc=1 cause=error")
    assert f"1 starts of job {crashing} brought no new checkpoint: not trying again" in text
    assert "putting the job back into the queue" not in text


def at(rig: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be on the head node, in ``folder``."""
    for name in ("SLURM_CONF", "RIG", "PYXIS_DOUBLE_IMAGE_PATHS"):
        monkeypatch.setenv(name, rig.environ[name])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(folder)


def launch(*more: str) -> int:
    """Run `smp-train launch slurm` for a tiny run on one node."""
    return cli.main(["launch", "slurm", "--nproc", "1", *more, *words(max_steps=3)])


def test_command_checks_and_submits(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at(rig, tmp_path, monkeypatch)
    assert launch("--partition", "dev", "--check", "--probe") == 0
    assert "to start at" in capsys.readouterr().err, "sbatch says when it would"
    assert launch("--partition", "dev", "--run_dir", "here") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    job = lines["submitted"].removeprefix("job ")
    assert lines["log:"] == f"{tmp_path}/here/logs/slurm-{job}.out"
    assert rig.wait_for_end(job, Path(lines["log:"])) == "COMPLETED"
    assert json.loads((tmp_path / "here/DONE").read_text())["step"] == 3


@pytest.mark.parametrize(("nodes", "spares"), [(2, 1), (3, 0)], ids=["with a spare node", "without one"])
def test_a_job_that_loses_a_node_goes_on(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, spares: int
) -> None:
    """A process dies, then a node with all that runs on it: the job goes on without a second start."""
    at(rig, tmp_path, monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = {"run_name": "run", "run_dir": "run", "checkpoint_dir": "checkpoints"}
    endless = {"max_steps": 10**6, "checkpoint_freq": 10**6, "recovery": "in_place", "sharding_strategy": "no_shard"}
    endless["gradient_accumulation_steps"] = 2  # of three nodes; two of them make the same global batch with three
    options = [f"--nodes={nodes}", "--nproc=1", *([f"--spare_nodes={spares}"] if spares else [])]
    assert cli.main(["launch", "slurm", *options, *words(**place, **endless)]) == 0
    job = rig.run("squeue", "-h", "-o", "%i").strip()
    log = tmp_path / f"run/logs/slurm-{job}.out"

    def trains(recoveries: int) -> bool:
        found = records(tmp_path) if (tmp_path / "run/metrics.jsonl").exists() else []
        events = [0, *(number for number, record in enumerate(found) if record.get("event") == "recovery")]
        return len(events) == recoveries + 1 and any("event" not in record for record in found[events[-1] :])

    try:
        rig.wait(lambda: trains(0), "the first step")
        worker(rig, "n1").kill()
        rig.wait(lambda: trains(1), "the recovery of a process")
        rig.crash("n2")
        rig.wait(lambda: trains(2), "the recovery of a node")
        assert worker(rig, "n3").is_running()
        (tmp_path / "run/STOP").touch()
        assert rig.wait_for_end(job, log) == "COMPLETED", log.read_text()
    finally:
        rig.boot("n2")
    assert len(starts(tmp_path)) == 1
    assert (tmp_path / "run/STOPPED").exists()
    assert "generation 2: rank 0 on n1 was killed (SIGKILL)" in log.read_text()
    smaller = "" if spares else "; 2 ranks go on"
    assert f"generation 3: node 1 (n2) gave no sign of life for 5 s{smaller}\n" in log.read_text()
    rig.wait(lambda: rig.idle() == rig.nodes, "the node to come back")
