"""Which launcher started this process, which rank it is, and where ranks meet; read from the environment alone."""

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

from smp_train.errors import ConfigError

LOOPBACK = "127.0.0.1"
SAGEMAKER_PORT = 7777
"""The port of SageMaker's own toolkit."""
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCH = "smp-train launch"
"""Gives its processes torchrun's variables, and this as their ROLE_NAME."""
JOB_VARIABLES = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "PALS_APID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
)  # fmt: skip
"""What all processes of a job have in common, and no other job on its nodes has."""


@dataclass(frozen=True)
class Runtime:
    """Where a process stands among the processes of the run.

    ``launcher`` is torchrun, `LAUNCH`, python, srun or one of `MPI`. ``master_port`` is 0 in a world of one.
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


MPI = {
    "openmpi": (
        "Open MPI's mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "pals": (
        "PALS' mpiexec", "PALS_RANKID", "PMI_SIZE PALS_SIZE",
        "PALS_LOCAL_RANKID PMI_LOCAL_RANK", "PALS_LOCAL_SIZE PMI_LOCAL_SIZE",
    ),
    "mvapich2": (
        "MVAPICH2's mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": (
        "MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID PMI_LOCAL_RANK", "MPI_LOCALNRANKS PMI_LOCAL_SIZE",
    ),
}  # fmt: skip
"""Kinds of ``mpiexec``: name, variables of rank, size, local rank and local size (of several the first that is set)."""


def smp_installed() -> bool:
    """Tell whether this torch has SMP v2's ``torch.sagemaker``, without importing it or torch."""
    found = importlib.util.find_spec("torch")
    return found is not None and any(
        Path(folder, "sagemaker").is_dir() for folder in found.submodule_search_locations or ()
    )


def is_sagemaker(environ: Mapping[str, str]) -> bool:
    """Tell whether SageMaker's training toolkit prepared this environment."""
    return any(name in environ for name in ("SM_CURRENT_HOST", "SM_HOSTS", "SM_TRAINING_ENV"))


def detect(environ: Mapping[str, str] | None = None) -> Runtime:
    """Return this process's place from the variables its launcher set.

    Launchers nest (torchrun inside srun, mpiexec inside a Slurm job), so the innermost is looked for first. Raises
    `ConfigError` that names variables that are missing or contradict each other, and who should have set them.
    """
    environ = os.environ if environ is None else environ
    if _has_torch_variables(environ):
        run = _from_torchrun(environ)
    elif "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        run = _from_mpi(environ, "openmpi")
    elif "MV2_COMM_WORLD_RANK" in environ or "MV2_COMM_WORLD_SIZE" in environ:
        run = _from_mpi(environ, "mvapich2")
    elif "PALS_RANKID" in environ:
        run = _from_mpi(environ, "pals")
    elif "MPI_LOCALRANKID" in environ or "PMI_LOCAL_RANK" in environ:
        run = _from_mpi(environ, "mpich")
    elif _in_slurm_step(environ):
        run = _from_srun(environ)
    elif "PMI_RANK" in environ or "PMI_SIZE" in environ:
        run = _from_mpi(environ, "mpich")
    else:
        run = _from_python(environ)
    for what, value, limit in (
        ("rank", run.rank, run.world_size),
        ("local rank", run.local_rank, run.local_world_size),
        ("number of local processes", run.local_world_size - 1, run.world_size),
        ("node rank", run.node_rank, run.num_nodes),
    ):
        if not 0 <= value < limit:
            raise ConfigError(
                f"{run.launcher} contradicts itself: {what} does not fit (rank {run.rank} of {run.world_size}, "
                f"local rank {run.local_rank} of {run.local_world_size}, node {run.node_rank} of {run.num_nodes}); "
                "unset leftover variables of another launcher, or start all processes with one launcher"
            )
    return run


def _runtime(environ: Mapping[str, str], launcher: str, numbers: tuple[int, ...], addr: str, port: int) -> Runtime:
    """``numbers``: rank, world size, local rank, local world size, node rank, number of nodes."""
    rank, world, local_rank, local, node, nodes = numbers
    host, sagemaker = socket.gethostname(), is_sagemaker(environ)
    return Runtime(launcher, rank, world, local_rank, local, node, nodes, addr, port, host, sagemaker)


def _number(environ: Mapping[str, str], launcher: str, *names: str) -> int:
    """Read the first variable of ``names`` that is set; ``launcher`` should have set it."""
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        missing = " or ".join(names)
        raise ConfigError(f"{missing} is not set, which {launcher} should have done; start the processes with it")
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"{name}={environ[name]!r} is not a number, as {launcher} should have set it") from None


def _has_torch_variables(environ: Mapping[str, str]) -> bool:
    """Tell whether torchrun, or a user by hand, set RANK and the like.

    Container hooks (enroot's for PyTorch images) copy srun's numbers into RANK, LOCAL_RANK and WORLD_SIZE without the
    rest: inside a step that agrees with them, srun is the launcher.
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
            f"{', '.join(present) or 'TORCHELASTIC_RUN_ID'} set but not {', '.join(missing)}: torchrun sets all of "
            "them; start with torchrun, or unset what is set for a run of one process"
        )
    rank, world, local_rank, local, port = (
        _number(environ, "torchrun", name) for name in TORCHRUN_VARIABLES if name != "MASTER_ADDR"
    )
    node, nodes = rank // max(local, 1), max(-(-world // max(local, 1)), 1)
    if environ.get("GROUP_WORLD_SIZE"):
        nodes = _number(environ, "torchrun", "GROUP_WORLD_SIZE")
    if environ.get("GROUP_RANK"):
        node = _number(environ, "torchrun", "GROUP_RANK")
    launcher = LAUNCH if environ.get("ROLE_NAME") == LAUNCH else "torchrun"
    return _runtime(environ, launcher, (rank, world, local_rank, local, node, nodes), environ["MASTER_ADDR"], port)


def _from_mpi(environ: Mapping[str, str], launcher: str) -> Runtime:
    title, *variables = MPI[launcher]
    rank, world, local_rank, local = (_number(environ, title, *names.split()) for names in variables)
    nodes = max(-(-world // max(local, 1)), 1)
    # mpiexec fills one node after the other by default; otherwise it goes round all nodes.
    node = rank // local if local > 0 and rank % local == local_rank else rank % nodes
    if nodes > 1 and launcher == "pals" and environ.get("PALS_NODEID"):
        node = _number(environ, title, "PALS_NODEID")
    numbers = (rank, world, local_rank, local, node, nodes)
    return _runtime(environ, launcher, numbers, _mpi_master(environ, nodes, world), _port(environ, world))


def _mpi_master(environ: Mapping[str, str], nodes: int, world: int) -> str:
    """Return MASTER_ADDR, or PBS' first host, or this one node: mpiexec does not say where rank 0 runs."""
    if environ.get("MASTER_ADDR") or nodes == 1:
        return environ.get("MASTER_ADDR") or LOOPBACK
    nodefile = environ.get("PBS_NODEFILE")
    try:
        hosts = Path(nodefile).read_text(encoding="utf-8").split() if nodefile else []
    except OSError as problem:
        raise ConfigError(f"PBS_NODEFILE={nodefile}: {problem.strerror or problem}; set MASTER_ADDR") from None
    if hosts:
        return hosts[0]
    raise ConfigError(
        f"MASTER_ADDR is not set: mpiexec does not say on which of the {nodes} nodes rank 0 of {world} runs; export "
        "MASTER_ADDR=<first host> and pass it on (mpiexec -x MASTER_ADDR, or -env)"
    )


def _in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Tell whether srun started this very process as a task.

    The shell of a batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS as well, but no step of its own, or one of
    the reserved numbers from 0xfffffff0 on (batch, extern, interactive): it would wait for peers that never come.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return "SLURM_PROCID" in environ and step.isdigit() and int(step) < 0xFFFFFFF0


def _from_srun(environ: Mapping[str, str]) -> Runtime:
    rank = _number(environ, "srun", "SLURM_PROCID")
    world = _number(environ, "srun", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    local_rank = _number(environ, "srun", "SLURM_LOCALID")
    node, nodes, local, master = 0, 1, world, LOOPBACK
    if world > 1:
        node = _number(environ, "srun", "SLURM_NODEID")
        nodes = _number(environ, "srun", "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        local = world if nodes == 1 else _slurm_local_size(environ, world, node)
        master = _slurm_master(environ)
    return _runtime(environ, "srun", (rank, world, local_rank, local, node, nodes), master, _port(environ, world))


def _slurm_local_size(environ: Mapping[str, str], world: int, node: int) -> int:
    """Read ``4(x2),3``: the tasks of each node in order."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    if not listed:
        raise ConfigError("SLURM_STEP_TASKS_PER_NODE is not set, which srun should have done; start with srun")
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


def _slurm_master(environ: Mapping[str, str]) -> str:
    """Return the first host of the step, which runs task 0; the job's list is out of date once a node was swapped."""
    if environ.get("SLURM_STEP_NODELIST"):
        return expand_hostlist(environ["SLURM_STEP_NODELIST"])[0]
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    raise ConfigError("SLURM_STEP_NODELIST is not set, which srun should have done; start with srun or set MASTER_ADDR")


def expand_hostlist(text: str) -> list[str]:
    """Expand Slurm's ``n[1-3,07],login`` to host names, in order, as ``scontrol show hostnames`` does."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text.strip()):
        names = [""]
        for fixed, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            names = [name + part for name in names for part in ([fixed] if fixed else _expand_ranges(ranges, text))]
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


def _from_python(environ: Mapping[str, str]) -> Runtime:
    hosts, current = _sagemaker_hosts(environ)
    world, rank = len(hosts), hosts.index(current)
    addr, port = (hosts[0], SAGEMAKER_PORT) if world > 1 else (LOOPBACK, 0)
    return _runtime(environ, "python", (rank, world, 0, 1, rank, world), addr, port)


def _sagemaker_hosts(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Return SM_HOSTS and this one: SageMaker without torchrun starts one process on each; they form one world."""
    listed, current = environ.get("SM_HOSTS"), environ.get("SM_CURRENT_HOST")
    if not listed and not current:
        return ["localhost"], "localhost"
    if not listed or not current:
        missing = "SM_CURRENT_HOST" if listed else "SM_HOSTS"
        raise ConfigError(f"{missing} is not set, which SageMaker's training toolkit should have done")
    try:
        hosts = json.loads(listed)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise ConfigError(f"SM_HOSTS={listed!r} is not a JSON list of hosts, as SageMaker's toolkit should have set it")
    if current not in hosts:
        raise ConfigError(f"SM_CURRENT_HOST={current} is not among SM_HOSTS={listed}")
    return hosts, current


def _port(environ: Mapping[str, str], world: int) -> int:
    """Return MASTER_PORT, or a port that all processes of a job derive and two jobs on a node rarely share."""
    if world == 1:
        return 0
    if environ.get("MASTER_PORT"):
        return _number(environ, "the user", "MASTER_PORT")
    parts = [environ[name] for name in JOB_VARIABLES if environ.get(name)]
    # Below the range from which operating systems assign ports by themselves.
    return 20000 + zlib.crc32("/".join(parts).encode()) % 10000 if parts else 29500
