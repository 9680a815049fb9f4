"""Which launcher started this process, which rank it has, and where ranks meet: all from environment variables."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

from smp_train.errors import ConfigError

LOOPBACK = "127.0.0.1"
SAGEMAKER_PORT = 7777
"""The port of SageMaker's own toolkit."""
LAUNCH = "smp-train launch"
"""ROLE_NAME of the processes of our launcher, which get torchrun's variables."""
GENERATION = "SMP_TRAIN_GENERATION"
"""Variable of our launcher's processes with --recovery in_place: the generation that the process joins first."""
JOB_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
)  # fmt: skip
"""Identify a job: equal for all its processes, different for other jobs on the same nodes."""


class Launcher(NamedTuple):
    """The variables of a launcher. Several names of one are separated by spaces; the first that is set counts.

    A process was started by the launcher if any of the variables in ``signs`` is set.
    """

    title: str
    signs: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str = ""
    node_rank: str = ""
    num_nodes: str = ""


LAUNCHERS = {
    "torchrun": Launcher(
        "torchrun", "", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    ),
    "openmpi": Launcher(
        "Open MPI's mpiexec", "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mvapich2": Launcher(
        "MVAPICH2's mpirun", "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": Launcher(
        "MPICH's mpiexec", "MPI_LOCALRANKID PMI_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK",
        "MPI_LOCALNRANKS PMI_LOCAL_SIZE",
    ),
    "srun": Launcher(  # the local world size is in a list, see `_tasks_of_node`
        "srun", "", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS SLURM_NTASKS SLURM_NPROCS", "SLURM_LOCALID", "",
        "SLURM_NODEID", "SLURM_STEP_NUM_NODES SLURM_NNODES",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Runtime:
    """A process's place among the processes of the run.

    ``launcher`` is a key of `LAUNCHERS`, `LAUNCH` or python. ``master_port`` is 0 in a world of one without torchrun.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    hostname: str
    sagemaker: bool

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0


def smp_installed() -> bool:
    """Return whether this torch has SMP v2's ``torch.sagemaker``, without importing torch."""
    spec = importlib.util.find_spec("torch")
    return spec is not None and any(
        Path(folder, "sagemaker").is_dir() for folder in spec.submodule_search_locations or ()
    )


def is_sagemaker(environ: Mapping[str, str]) -> bool:
    """Return whether SageMaker's training toolkit prepared this environment."""
    return any(name in environ for name in ("SM_CURRENT_HOST", "SM_HOSTS", "SM_TRAINING_ENV"))


def detect(environ: Mapping[str, str] | None = None) -> Runtime:
    """Return this process's place from its launcher's variables.

    Raises `ConfigError`, which names the launcher, if variables are missing or contradict each other.
    """
    environ = os.environ if environ is None else environ
    launcher = _launcher(environ)
    if launcher == "python":
        hosts, host = _sagemaker_hosts(environ)
        rank = node = hosts.index(host)
        world = nodes = len(hosts)
        local_rank, local, address, port = 0, 1, LOOPBACK, 0
        if world > 1:
            address, port = hosts[0], SAGEMAKER_PORT
    else:
        rank, world, local_rank, local, node, nodes = _numbers(environ, launcher)
        address, port = _address(environ, launcher, world, nodes), _port(environ, launcher, world)
    if launcher == "torchrun" and environ.get("ROLE_NAME") == LAUNCH:
        launcher = LAUNCH
    if not (0 <= rank < world and 0 <= local_rank < local <= world and 0 <= node < nodes):
        raise ConfigError(
            f"{launcher} contradicts itself: rank {rank} of {world}, local rank {local_rank} of {local}, node {node} "
            f"of {nodes}; unset leftover variables of another launcher, or start all processes with one launcher"
        )
    return Runtime(
        launcher, rank, world, local_rank, local, node, nodes, address, port, socket.gethostname(),
        is_sagemaker(environ),
    )  # fmt: skip


def _launcher(environ: Mapping[str, str]) -> str:
    """Return the innermost launcher: launchers nest, as torchrun inside srun or mpiexec inside a Slurm job."""
    if _has_torch_variables(environ):
        return "torchrun"
    signs = {name: environ.keys() & launcher.signs.split() for name, launcher in LAUNCHERS.items()}
    if inner := next((name for name in LAUNCHERS if signs[name]), None):
        return inner
    if _in_slurm_step(environ):
        return "srun"
    return "mpich" if environ.keys() & {"PMI_RANK", "PMI_SIZE"} else "python"


def _has_torch_variables(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun, or a user by hand, set RANK and the like.

    Container hooks (enroot's for PyTorch images) copy srun's numbers into RANK, LOCAL_RANK and WORLD_SIZE, but not into
    LOCAL_WORLD_SIZE. In a step with the same rank, srun is the launcher.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return True
    copied = _in_slurm_step(environ) and "LOCAL_WORLD_SIZE" not in environ
    if copied and environ.get("RANK", "") == environ["SLURM_PROCID"]:
        return False
    return any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this very process as a task.

    The shell of a batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS as well, but no step, or a step with a
    reserved number from 0xfffffff0 on (batch, extern, interactive). Taken for a task, the shell would wait for peers.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < 0xFFFFFFF0


def _numbers(environ: Mapping[str, str], launcher: str) -> tuple[int, int, int, int, int, int]:
    """Return rank, world size, local rank, local world size, node rank and number of nodes."""
    names = LAUNCHERS[launcher]
    required = [names.rank, names.world_size, names.local_rank, names.local_world_size]
    missing = [name.replace(" ", " or ") for name in required if name and not _first(environ, name)]
    if missing:
        present = ", ".join(filter(None, (_first(environ, name) for name in required))) or "TORCHELASTIC_RUN_ID"
        raise ConfigError(
            f"{present} is set, but not {', '.join(missing)}: {names.title} sets them all; start all processes with "
            f"{names.title}, or unset {present} for a run of one process"
        )
    rank, world, local_rank = (_number(environ, name) for name in (names.rank, names.world_size, names.local_rank))
    if launcher == "srun":
        nodes, node = _number(environ, names.num_nodes, 1), _number(environ, names.node_rank, 0)
        local = world if nodes == 1 else _tasks_of_node(environ, world, node)
        return rank, world, local_rank, local, node, nodes
    local = _number(environ, names.local_world_size)
    nodes = _number(environ, names.num_nodes, max(-(-world // max(local, 1)), 1))
    # By default, launchers fill one node after another; some can place consecutive ranks on the nodes in turn.
    node = rank // local if local > 0 and rank % local == local_rank else rank % nodes
    return rank, world, local_rank, local, _number(environ, names.node_rank, node), nodes


def _first(environ: Mapping[str, str], names: str) -> str | None:
    return next((name for name in names.split() if environ.get(name)), None)


def _number(environ: Mapping[str, str], names: str, default: int = 0) -> int:
    """Return the number in the first variable of ``names`` that is set. Raises `ConfigError`."""
    name = _first(environ, names)
    try:
        return default if name is None else int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ.get(name or '')!r} is not a number; unset it, or set a number") from None


def _tasks_of_node(environ: Mapping[str, str], world: int, node: int) -> int:
    """Return a node's number of tasks, from a list as ``4(x2),3``: two nodes with 4 tasks, then one with 3."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for part in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        counts += [int(match[1])] * int(match[2] or 1) if match else []
    if node >= len(counts) or sum(counts) != world:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={tasks} does not fit {world} tasks with this one on node {node}; "
            "unset leftover SLURM_* variables or start with srun"
        )
    return counts[node]


def _address(environ: Mapping[str, str], launcher: str, world: int, nodes: int) -> str:
    """Return the host of rank 0."""
    # Task 0 runs on the step's first host. MASTER_ADDR may name a node of the job that was replaced.
    if launcher == "srun" and world > 1 and environ.get("SLURM_STEP_NODELIST"):
        return expand_hostlist(environ["SLURM_STEP_NODELIST"])[0]
    if environ.get("MASTER_ADDR") or nodes == 1:
        return environ.get("MASTER_ADDR") or LOOPBACK
    raise ConfigError(
        f"MASTER_ADDR is not set, and {LAUNCHERS[launcher].title} does not report on which of the {nodes} nodes rank 0 "
        "runs; export MASTER_ADDR=<first host> (mpiexec: pass it on with -x MASTER_ADDR, or -env)"
    )


def _port(environ: Mapping[str, str], launcher: str, world: int) -> int:
    """Return MASTER_PORT, or a port that all processes of a job derive and two jobs on a node rarely share."""
    if world == 1 and launcher != "torchrun":
        return 0
    if environ.get("MASTER_PORT"):
        return _number(environ, "MASTER_PORT")
    parts = [environ[name] for name in JOB_VARIABLES if environ.get(name)]
    # Operating systems assign ports above 32768 to other programs.
    return 20000 + zlib.crc32("/".join(parts).encode()) % 10000 if parts else 29500


def _sagemaker_hosts(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Return SM_HOSTS and the current host; without torchrun, SageMaker starts one process per host of the world."""
    listed, current = environ.get("SM_HOSTS"), environ.get("SM_CURRENT_HOST", "")
    if not listed and not current:
        return ["localhost"], "localhost"
    try:
        hosts = json.loads(listed or "")
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts) or current not in hosts:
        raise ConfigError(
            f"SM_CURRENT_HOST={current} is not in the JSON list SM_HOSTS={listed}, which SageMaker's training toolkit "
            "sets; start with the toolkit, or unset both"
        )
    return hosts, current


def expand_hostlist(text: str) -> list[str]:
    """Return the host names in Slurm's ``n[1-3,07],login``, in order, as ``scontrol show hostnames`` does."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text.strip()):
        parts = re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item)
        hosts += map("".join, product(*([fixed] if fixed else _expand_ranges(ranges) for fixed, ranges in parts)))
    if not all(hosts) or not hosts:
        raise ConfigError(f"cannot read the list of hosts {text!r}")
    return hosts


def _expand_ranges(text: str) -> list[str]:
    """Expand the ranges of a host list, keeping leading zeros: ``1-3,07`` gives 1, 2, 3 and 07."""
    numbers: list[str] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if not match:
            raise ConfigError(f"cannot read the list of hosts: {piece!r} is not a number or a range")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
