"""Started as other launchers than torchrun start it: the ranks find each other and train."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.command import Ranks
from tests.training import flags

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


@pytest.mark.parametrize(("launcher", "name"), [(openmpi, "openmpi"), (mpich, "mpich"), (srun, "srun")])
def test_two_ranks_train(launcher: Callable[[int, int, int], dict[str, str]], name: str, tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "train", *flags(tmp_path, max_steps=2), launcher=launcher) as ranks:
        assert ranks.codes() == [0, 0], ranks.err
        assert f"started by {name}" in ranks[0].out
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["mesh"]["world_size"] == 2
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == 2
