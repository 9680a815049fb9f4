"""What each launcher's variables mean, and what is said when they are missing or contradict each other."""

from __future__ import annotations

import os
import resource
from contextlib import nullcontext

import pytest

from smp_train.distributed import detect, expand_hostlist, host
from smp_train.errors import ConfigError
from smp_train.launch.node import Node

TORCHRUN = {
    "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "7",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "2", "SLURM_NNODES": "4", "SLURM_STEP_TASKS_PER_NODE": "4,3", "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "ip-10-1-[3,7-9]", "SLURM_JOB_NODELIST": "ip-10-1-[1-4]", "SLURM_JOB_ID": "12",
}  # fmt: skip
BATCH_SHELL = {
    "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {
    "PALS_RANKID": "5", "PALS_NODEID": "1", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "5", "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4", "MASTER_ADDR": "x1",
}  # fmt: skip
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "MASTER_ADDR": "algo-1"}

ON_NODES = {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "n1"}
DEALT_OUT = {**ON_NODES, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
COPIES = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "7", "MASTER_ADDR": "ip-10-1-3", "MASTER_PORT": "61012"}
ONE_TASK = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
BY_HAND = {k: v for k, v in TORCHRUN.items() if not k.startswith(("GROUP", "TORCHELASTIC"))}
MVAPICH2 = {name.replace("OMPI", "MV2"): value for name, value in OPENMPI.items()}
ALONE, TORCHRUNS = (0, 1, 0, 1, 0, 1, "127.0.0.1"), (9, 16, 1, 8, 1, 2, "n1")
SRUNS, ON_ONE_NODE = (5, 7, 1, 3, 1, 2, "ip-10-1-3"), (3, 4, 3, 4, 0, 1, "127.0.0.1")

# launcher, and rank, world, local rank, local world, node, nodes, master
PLACES: dict[str, tuple[dict[str, str], str, tuple]] = {
    "python with a stray address": ({"MASTER_ADDR": "n1"}, "python", ALONE),
    "launch": (Node(8, 2, 1, "n1", 29500).environment(9, {}), "smp-train launch", TORCHRUNS),
    "torchrun inside srun on SageMaker": ({**SAGEMAKER, **SRUN, **TORCHRUN}, "torchrun", TORCHRUNS),
    "torchrun's variables by hand": (BY_HAND, "torchrun", TORCHRUNS),
    "Open MPI dealing ranks out": ({**OPENMPI, **DEALT_OUT}, "openmpi", (1, 4, 0, 2, 1, 2, "n1")),
    "Open MPI on two nodes of a Slurm job": (
        {**BATCH_SHELL, **OPENMPI, **ON_NODES}, "openmpi", (3, 4, 1, 2, 1, 2, "n1"),
    ),
    "MVAPICH2": (MVAPICH2, "mvapich2", ON_ONE_NODE),
    # Its proxies are Slurm tasks themselves.
    "MPICH inside a Slurm step": ({**SRUN, **HYDRA}, "mpich", (1, 2, 1, 2, 0, 1, "127.0.0.1")),
    "PALS, by MPICH's variables": (PALS, "mpich", (5, 8, 1, 4, 1, 2, "x1")),
    "srun --mpi=pmi2": ({**SRUN, "PMI_RANK": "5", "PMI_SIZE": "7"}, "srun", SRUNS),
    "srun with a container's copies": ({**SRUN, **COPIES}, "srun", SRUNS),
    "srun of one task": (ONE_TASK, "srun", ALONE),
    "interactive step": ({**BATCH_SHELL, "SLURM_STEP_ID": "4294967290"}, "python", ALONE),
    "SageMaker, one process per host": (SAGEMAKER, "python", (1, 2, 0, 1, 1, 2, "algo-1")),
}


@pytest.mark.parametrize("case", PLACES.values(), ids=PLACES)
def test_places(case: tuple[dict[str, str], str, tuple]) -> None:
    environ, *expected = case
    place = detect(environ)
    numbers = (
        place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank, place.num_nodes,
        place.master_addr,
    )  # fmt: skip
    assert [place.launcher, numbers] == expected
    assert place.sagemaker == ("SM_HOSTS" in environ)
    assert place.hostname
    assert place.is_main == (place.rank == 0)
    assert (place.master_port == 0) == (place.world_size == 1)


def without(environ: dict[str, str], *names: str, **changes: str) -> dict[str, str]:
    return {name: value for name, value in {**environ, **changes}.items() if name not in names}


# What the message must name.
REFUSED: dict[str, tuple[dict[str, str], list[str]]] = {
    "no LOCAL_RANK": (without(TORCHRUN, "LOCAL_RANK"), ["not LOCAL_RANK", "torchrun"]),
    "torchrun without its variables": ({"TORCHELASTIC_RUN_ID": "1"}, ["not RANK, WORLD_SIZE"]),
    "RANK is no number": (without(TORCHRUN, RANK="x"), ["RANK='x'"]),
    "rank outside the world": (without(TORCHRUN, RANK="16"), ["torchrun", "rank 16 of 16"]),
    "more local than all": (without(TORCHRUN, RANK="1", WORLD_SIZE="2"), ["rank 1 of 2, local rank 1 of 8"]),
    "Open MPI without rank": (without(OPENMPI, "OMPI_COMM_WORLD_RANK"), ["not OMPI_COMM_WORLD_RANK", "Open MPI"]),
    "Open MPI on nodes without address": (without({**OPENMPI, **ON_NODES}, "MASTER_ADDR"), ["MASTER_ADDR", "2 nodes"]),
    "bare PMI": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["not MPI_LOCALRANKID or PMI_LOCAL_RANK"]),
    "srun without nodelist": (without(SRUN, "SLURM_STEP_NODELIST"), ["MASTER_ADDR", "srun"]),
    "srun whose counts do not add up": (without(SRUN, SLURM_STEP_TASKS_PER_NODE="4(x2)"), ["4(x2)", "7 tasks"]),
    "SageMaker with hosts that are no list": (without(SAGEMAKER, SM_HOSTS="algo-1"), ["SM_HOSTS=algo-1", "JSON"]),
    "port is no number": (without(SRUN, MASTER_PORT="x"), ["MASTER_PORT='x'"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_refused(case: tuple[dict[str, str], list[str]]) -> None:
    environ, nouns = case
    with pytest.raises(ConfigError) as refused:
        detect(environ)
    assert [noun for noun in nouns if noun not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


def test_all_processes_of_a_job_derive_one_port() -> None:
    ports = {
        detect(without(SRUN, SLURM_PROCID=rank, SLURM_LOCALID=rank, SLURM_NODEID="0")).master_port for rank in "012"
    }
    assert len(ports) == 1
    assert 20000 <= ports.pop() < 30000
    assert detect(SRUN).master_port != detect(without(SRUN, SLURM_JOB_ID="13")).master_port
    assert detect(without(SRUN, MASTER_PORT="1234")).master_port == 1234
    assert detect(OPENMPI).master_port == 29500


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[001-003,7]", "n001 n002 n003 n7"), ("n[08-11]", "n08 n09 n10 n11"), ("a[1-2]b[1-2]", "a1b1 a1b2 a2b1 a2b2"),
        ("login,n[1-2]-x,m3.example.com", "login n1-x n2-x m3.example.com"), ("", ""), ("n[1-]", ""), ("n[a]", ""),
    ],
)  # fmt: skip
def test_hostlists(text: str, hosts: str) -> None:
    with nullcontext() if hosts else pytest.raises(ConfigError, match="cannot read the list of hosts"):
        assert expand_hostlist(text) == hosts.split()


def test_a_process_prepares_its_host_and_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"TORCH_GLOO_LAZY_INIT", "CUDA_DEVICE_MAX_CONNECTIONS", *host.ALLOCATOR}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def prepared(one_queue: bool = False, **given: str) -> dict[str, str]:
        for name in ours:
            monkeypatch.setenv(name, "")  # so that it is restored
            monkeypatch.delenv(name)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        host.prepare(one_queue=one_queue)
        return {name: os.environ[name] for name in sorted(ours) if name in os.environ}

    segments = dict.fromkeys(host.ALLOCATOR, "expandable_segments:True")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
        assert prepared() == {"TORCH_GLOO_LAZY_INIT": "1", **segments}
        most = host.OPEN_FILES if limits[1] == resource.RLIM_INFINITY else min(limits[1], host.OPEN_FILES)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert prepared(one_queue=True)["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    given = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "TORCH_GLOO_LAZY_INIT": "0"}
    assert prepared(**given) == given


@pytest.mark.parametrize(("backend", "degree", "expected"), [("native", 8, False), ("smp", 8, True), ("smp", 1, False)])
def test_one_hardware_queue_is_for_the_tensor_parallelism_of_smp(backend: str, degree: int, expected: bool) -> None:
    from smp_train import arguments, train_lib

    flags = ["--model_type", "llama_v2", "--backend", backend, "--tensor_parallel_degree", str(degree)]
    assert train_lib.group_settings(arguments.parse(flags, {}).args)["one_queue"] == expected
