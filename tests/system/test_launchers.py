"""Started as other launchers than torchrun start it, and by our scripts: the ranks find each other and train."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import free_port
from tests.system.command import ROOT, Ranks, environment
from tests.training import TINY, flags

pytestmark = [pytest.mark.system, pytest.mark.slow]


def openmpi(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world), "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(world), "MASTER_PORT": str(port),
    }  # fmt: skip


def mpich(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(world), "MPI_LOCALRANKID": str(rank), "MPI_LOCALNRANKS": str(world),
        "MASTER_PORT": str(port),
    }  # fmt: skip


def srun(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(world),
        "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_TASKS_PER_NODE": str(world), "SLURM_STEP_NODELIST": "localhost", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "name"), [(openmpi, "openmpi"), (mpich, "mpich"), pytest.param(srun, "srun", marks=pytest.mark.core)]
)
def test_two_ranks_train(launcher: Callable[[int, int, int], dict[str, str]], name: str, tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "train", *flags(tmp_path, max_steps=2), launcher=launcher) as ranks:
        assert ranks.codes() == [0, 0], ranks.err
        assert f"started by {name}" in ranks[0].out
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["mesh"]["world_size"] == 2
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == 2


def test_scripts_train_on_two_machines_by_hand(tmp_path: Path) -> None:
    """launch_multi_node.sh on each, which is launch_single_node.sh with a place; profiled."""
    tiny = {**TINY, "max_steps": 3, "profile_start": 2, "profile_steps": 1}
    words = [f"--{name}={value}" for name, value in tiny.items() if name != "train_batch_size"]
    common = {
        "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NPROC": "1", "PROFILE": "torch",
        "RUN_DIR": str(tmp_path / "run"), "PYTHON": sys.executable, "BATCH_SIZE": "2",
    }  # fmt: skip
    script = ROOT / "launchers/local/launch_multi_node.sh"
    nodes = [
        subprocess.Popen(
            [script, *words], cwd=tmp_path, env=environment(tmp_path, {**common, "NODE_RANK": rank}),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    said = [node.communicate(timeout=400)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert json.loads((tmp_path / "run/DONE").read_text())["step"] == 3
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert (run["mesh"]["world_size"], run["config"]["train_batch_size"]) == (2, 2)
    traces = [f"trace-rank{rank}.json.gz" for rank in "01"]
    operators = [f"operators-rank{rank}.txt" for rank in "01"]
    assert {path.name for path in (tmp_path / "run/profile").iterdir()} == {*traces, *operators, "verdict.txt"}
