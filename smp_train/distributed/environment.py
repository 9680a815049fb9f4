"""Which launcher started this process, which rank it is, where ranks meet; from the environment alone."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError

LOOPBACK = "127.0.0.1"
# The port SageMaker's own toolkit uses.
SAGEMAKER_PORT = 7777
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Runtime:
    """Where a process stands among the processes of the run.

    ``launcher`` is torchrun, python, openmpi, mpich, pals or srun. ``master_port`` is 0 in a world of one.
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
    """Tell whether this torch has SMP v2's ``torch.sagemaker``, without importing it or torch."""
    found = importlib.util.find_spec("torch")
    return found is not None and any(
        Path(place, "sagemaker").is_dir() for place in found.submodule_search_locations or ()
    )


def is_sagemaker(environ: Mapping[str, str]) -> bool:
    """Say whether SageMaker's training toolkit prepared this environment."""
    return any(name in environ for name in ("SM_CURRENT_HOST", "SM_HOSTS", "SM_TRAINING_ENV"))


def detect(environ: Mapping[str, str] | None = None) -> Runtime:
    """Return this process's place from the variables its launcher set.

    Launchers nest (torchrun inside srun, mpiexec inside a Slurm job), so the innermost is asked first. Raises
    `ConfigError` that names variables that are missing or contradict each other, and who should have set
    them.
    """
    environ = os.environ if environ is None else environ
    if _torch_variables(environ):
        place = _from_torchrun(environ)
    elif "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        place = _from_openmpi(environ)
    elif "PALS_RANKID" in environ:
        place = _from_pals(environ)
    elif _hydra(environ):
        place = _from_mpich(environ)
    elif _in_slurm_step(environ):
        place = _from_srun(environ)
    elif "PMI_RANK" in environ or "PMI_SIZE" in environ:
        place = _from_mpich(environ)
    else:
        place = _from_python(environ)
    return _checked(place)


def _runtime(environ: Mapping[str, str], **place: Any) -> Runtime:
    return Runtime(hostname=socket.gethostname(), sagemaker=is_sagemaker(environ), **place)


def _checked(place: Runtime) -> Runtime:
    """Refuse a place that cannot be, whoever said so."""
    for what, value, limit in (
        ("rank", place.rank, place.world_size),
        ("local rank", place.local_rank, place.local_world_size),
        ("number of local processes", place.local_world_size - 1, place.world_size),
        ("node rank", place.node_rank, place.num_nodes),
    ):
        if not 0 <= value < limit:
            raise ConfigError(
                f"{place.launcher} contradicts itself: {what} does not fit (rank {place.rank} of "
                f"{place.world_size}, "
                f"local rank {place.local_rank} of {place.local_world_size}, node {place.node_rank} of "
                f"{place.num_nodes}); "
                "unset leftover variables of another launcher, or start all processes with one launcher"
            )
    return place


def _integer(environ: Mapping[str, str], name: str, launcher: str) -> int:
    text = environ.get(name, "")
    if not text:
        raise ConfigError(
            f"{name} is not set, which {launcher} should have done; start the processes with it"
        )
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number, as {launcher} should have set it") from None


def _first_integer(environ: Mapping[str, str], names: tuple[str, ...], launcher: str) -> int:
    """Read the first variable of ``names`` that is set; if none is, all are named."""
    for name in names:
        if environ.get(name):
            return _integer(environ, name, launcher)
    raise ConfigError(
        f"{' or '.join(names)} is not set, which {launcher} should have done; start the processes with it"
    )


# --- torchrun, and anything else that sets its variables ------------------------------------------


def _torch_variables(environ: Mapping[str, str]) -> bool:
    """Say whether RANK and its like are set, by torchrun or by hand.

    Container hooks (enroot's for PyTorch images) copy srun's numbers into RANK, LOCAL_RANK and WORLD_SIZE
    without the rest: inside a step that agrees with them, srun is the launcher.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return True
    if not any(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return False
    copied = _in_slurm_step(environ) and "LOCAL_WORLD_SIZE" not in environ
    return not (copied and environ.get("RANK", "") == environ["SLURM_PROCID"])


def _from_torchrun(environ: Mapping[str, str]) -> Runtime:
    missing = [name for name in TORCHRUN_VARIABLES if not environ.get(name)]
    if missing:
        present = [name for name in TORCHRUN_VARIABLES if environ.get(name)]
        raise ConfigError(
            f"{', '.join(present) or 'TORCHELASTIC_RUN_ID'} set but not {', '.join(missing)}: torchrun "
            f"sets all of them; "
            "start with torchrun, or unset what is set for a run of one process"
        )
    number = {
        name: _integer(environ, name, "torchrun") for name in TORCHRUN_VARIABLES if name != "MASTER_ADDR"
    }
    world, local = number["WORLD_SIZE"], max(number["LOCAL_WORLD_SIZE"], 1)
    nodes = max(-(-world // local), 1)
    num_nodes = (
        _integer(environ, "GROUP_WORLD_SIZE", "torchrun") if environ.get("GROUP_WORLD_SIZE") else nodes
    )
    node = (
        _integer(environ, "GROUP_RANK", "torchrun") if environ.get("GROUP_RANK") else number["RANK"] // local
    )
    return _runtime(
        environ,
        launcher="torchrun",
        rank=number["RANK"],
        world_size=world,
        local_rank=number["LOCAL_RANK"],
        local_world_size=number["LOCAL_WORLD_SIZE"],
        node_rank=node,
        num_nodes=num_nodes,
        master_addr=environ["MASTER_ADDR"],
        master_port=number["MASTER_PORT"],
    )


# --- MPI ------------------------------------------------------------------------------------------


def _hydra(environ: Mapping[str, str]) -> bool:
    return "MPI_LOCALRANKID" in environ or "PMI_LOCAL_RANK" in environ


def _from_openmpi(environ: Mapping[str, str]) -> Runtime:
    launcher = "Open MPI's mpiexec"
    prefix = "OMPI_COMM_WORLD_"
    rank, world, local_rank, local = (
        _integer(environ, prefix + name, launcher) for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    return _from_mpi(environ, "openmpi", rank, world, local_rank, local)


def _from_mpich(environ: Mapping[str, str]) -> Runtime:
    launcher = "MPICH's mpiexec"
    rank = _integer(environ, "PMI_RANK", launcher)
    world = _integer(environ, "PMI_SIZE", launcher)
    local_rank = _first_integer(environ, ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), launcher)
    local = _first_integer(environ, ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"), launcher)
    return _from_mpi(environ, "mpich", rank, world, local_rank, local)


def _from_pals(environ: Mapping[str, str]) -> Runtime:
    launcher = "PALS' mpiexec"
    rank = _integer(environ, "PALS_RANKID", launcher)
    world = _first_integer(environ, ("PMI_SIZE", "PALS_SIZE"), launcher)
    local_rank = _first_integer(environ, ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"), launcher)
    local = _first_integer(environ, ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"), launcher)
    return _from_mpi(environ, "pals", rank, world, local_rank, local)


def _from_mpi(
    environ: Mapping[str, str], launcher: str, rank: int, world: int, local_rank: int, local: int
) -> Runtime:
    nodes = max(-(-world // max(local, 1)), 1)
    # mpiexec places ranks by blocks unless told to deal them out.
    by_block = local > 0 and rank % local == local_rank
    node = rank // local if by_block else rank % nodes
    if world > 1 and nodes > 1 and launcher == "pals" and environ.get("PALS_NODEID"):
        node = _integer(environ, "PALS_NODEID", "PALS' mpiexec")
    return _runtime(
        environ,
        launcher=launcher,
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local,
        node_rank=node,
        num_nodes=nodes,
        master_addr=_mpi_master(environ, nodes, world),
        master_port=_port(environ, world),
    )


def _mpi_master(environ: Mapping[str, str], nodes: int, world: int) -> str:
    """MPI tells no rank where rank 0 lives: MASTER_ADDR, or PBS' list of hosts, or this one node."""
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if nodes == 1:
        return LOOPBACK
    nodefile = environ.get("PBS_NODEFILE")
    if nodefile:
        try:
            hosts = Path(nodefile).read_text(encoding="utf-8").split()
        except OSError as problem:
            raise ConfigError(
                f"PBS_NODEFILE={nodefile}: {problem.strerror or problem}; set MASTER_ADDR"
            ) from None
        if hosts:
            return hosts[0]
    raise ConfigError(
        f"MASTER_ADDR is not set: mpiexec does not say on which of the {nodes} nodes rank 0 of {world} "
        f"runs; export "
        "MASTER_ADDR=<first host> and pass it on (mpiexec -x MASTER_ADDR, or -env)"
    )


# --- srun without torchrun ------------------------------------------------------------------------


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Say whether srun started this very process as a task.

    The shell of a batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS as well, but no step of its
    own (or one of the reserved numbers from 0xfffffff0 on: batch, extern, interactive): waiting for peers
    there would be for ever.
    """
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return step.isdigit() and int(step) < 0xFFFFFFF0


def _from_srun(environ: Mapping[str, str]) -> Runtime:
    rank = _integer(environ, "SLURM_PROCID", "srun")
    world = _first_integer(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"), "srun")
    local_rank = _integer(environ, "SLURM_LOCALID", "srun")
    node = _integer(environ, "SLURM_NODEID", "srun") if world > 1 else 0
    nodes = _first_integer(environ, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), "srun") if world > 1 else 1
    return _runtime(
        environ,
        launcher="srun",
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=_slurm_local_size(environ, world, node, nodes),
        node_rank=node,
        num_nodes=nodes,
        master_addr=_slurm_master(environ, world),
        master_port=_port(environ, world),
    )


def _slurm_local_size(environ: Mapping[str, str], world: int, node: int, nodes: int) -> int:
    """Read ``4(x2),3``: tasks on each node in order."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if nodes == 1:
        return world
    if not listed:
        raise ConfigError(
            "SLURM_STEP_TASKS_PER_NODE is not set, which srun should have done; start with srun"
        )
    counts: list[int] = []
    for part in listed.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not match:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={listed!r} is not of the form 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts) or sum(counts) != world:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={listed} does not fit {world} tasks with this one on node {node}; "
            "unset leftover SLURM_* variables or start with srun"
        )
    return counts[node]


def _slurm_master(environ: Mapping[str, str], world: int) -> str:
    """Return the first host of the step, which runs task 0.

    The step's list, not the job's: after a node was swapped the job's is out of date.
    """
    if world == 1:
        return LOOPBACK
    nodelist = environ.get("SLURM_STEP_NODELIST")
    if nodelist:
        return expand_hostlist(nodelist)[0]
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    raise ConfigError(
        "SLURM_STEP_NODELIST is not set, which srun should have done; start with srun or set MASTER_ADDR"
    )


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's ``n[1-3,07],login`` to host names, in order, as ``scontrol show hostnames`` does."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text.strip()):
        names = [""]
        for fixed, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            names = [
                name + part for name in names for part in ([fixed] if fixed else _expand_ranges(ranges, text))
            ]
        hosts += names
    if not hosts or not all(hosts):
        raise ConfigError(f"cannot read the list of hosts {text!r}")
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    parts: list[str] = []
    for piece in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", piece.strip())
        if not match:
            raise ConfigError(f"cannot read the list of hosts {text!r}: {piece!r} is not a number or a range")
        first, last = match[1], match[2] or match[1]
        parts += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return parts


# --- one process, or one per SageMaker host -------------------------------------------------------


def _from_python(environ: Mapping[str, str]) -> Runtime:
    hosts, current = _sagemaker_hosts(environ)
    world, rank = len(hosts), hosts.index(current)
    return _runtime(
        environ,
        launcher="python",
        rank=rank,
        world_size=world,
        local_rank=0,
        local_world_size=1,
        node_rank=rank,
        num_nodes=world,
        master_addr=hosts[0] if world > 1 else LOOPBACK,
        master_port=SAGEMAKER_PORT if world > 1 else 0,
    )


def _sagemaker_hosts(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """SageMaker without torchrun starts one process on each of SM_HOSTS; they form one world."""
    listed, current = environ.get("SM_HOSTS"), environ.get("SM_CURRENT_HOST")
    if not listed and not current:
        return ["localhost"], "localhost"
    if not listed or not current:
        missing = "SM_HOSTS" if not listed else "SM_CURRENT_HOST"
        raise ConfigError(f"{missing} is not set, which SageMaker's training toolkit should have done")
    try:
        hosts = json.loads(listed)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ConfigError(
            f"SM_HOSTS={listed!r} is not a JSON list of hosts, as SageMaker's toolkit should have set it"
        )
    if current not in hosts:
        raise ConfigError(f"SM_CURRENT_HOST={current} is not among SM_HOSTS={listed}")
    return hosts, current


def _port(environ: Mapping[str, str], world: int) -> int:
    """MASTER_PORT, or one that every process of the job derives alike and two jobs on a node rarely share."""
    if world == 1:
        return 0
    if environ.get("MASTER_PORT"):
        return _integer(environ, "MASTER_PORT", "the user")
    parts = [
        environ[name]
        for name in (
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
            "PBS_JOBID",
            "PALS_APID",
            "PMIX_NAMESPACE",
            "OMPI_MCA_ess_base_jobid",
        )
        if environ.get(name)
    ]
    # Below the range that operating systems hand out by themselves.
    return 20000 + zlib.crc32("/".join(parts).encode()) % 10000 if parts else 29500
