"""``python -m smp_train.launch.node_agent [options] -- <training flags>``: runs once on each node of a run.

Standard library only. Everything that depends on the node is determined here, at the last moment: a cluster may have
swapped a node since the job was submitted, or since its batch script started.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from smp_train.arguments import Resolved
from smp_train.distributed import expand_hostlist
from smp_train.distributed.group import RENDEZVOUS_SECONDS
from smp_train.distributed.host import free_port
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import environment, instances, network_check, nsys, preflight, supervisor, timing
from smp_train.launch import flags as launch_flags
from smp_train.launch.command import ask, node_name, say
from smp_train.launch.coordinator import Recovery
from smp_train.launch.instances import Instance, Machines
from smp_train.launch.node import Failure, Node
from smp_train.launch.options import LaunchParser
from smp_train.launch.spec import warn
from smp_train.launch.srun_step import INSIDE
from smp_train.launch.starts import BEGAN, ENDED, Starts
from smp_train.launch.supervisor import supervise

FIRST_PORT, PORTS = 20000, 10000  # below the range of ephemeral ports
HISTORY = "launches.jsonl"
USR1_SECONDS = 300
"""How long before the time limit Slurm signals the batch scripts."""
ADAPTERS = Path("/sys/class/infiniband")
PATIENCE_SECONDS = 300.0
"""How long the ranks wait for a lost node that a person or Kubernetes may start again; on Slurm they do not wait."""
NSYS = "SMP_TRAIN_UNDER_NSYS"
"""Set in the environment of an agent that nsys started."""


class BadNodeError(SmpTrainError):
    """A node does not meet the run's needs; another node may. ``node`` names it, if it is not this node."""

    exit_code = network_check.BAD_NODE
    cause = "node"

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


def parser() -> LaunchParser:
    """Return the parser of the options before ``--``."""
    options = LaunchParser("node_agent", "")
    options.share("nproc", "instance_type", "preflight", "max_attempts", "profile")
    options.set_defaults(max_attempts=None)  # no limit for a person who starts the agent by hand
    options.share("spare_nodes")
    options.add("failures", "folder for failures (default: logs of the run folder)")
    options.add("inside", "insist on running inside the container", bool)
    options.add("time_left", "time until the job's time limit, in Slurm's form")
    return options


def find_node(environ: Mapping[str, str], processes: int, spares: int = 0) -> Node:
    """Return this node's rank and peers, from srun's step, or from NNODES and NODE_RANK set by hand.

    In a step the last ``spares`` nodes are spare nodes; by hand they are as many beyond NNODES.

    Raises:
        ConfigError: naming the variables that are missing or contradict each other.
    """
    if "SLURM_STEP_NODELIST" in environ and environ.get("SLURM_STEP_NUM_TASKS"):
        hosts = expand_hostlist(environ["SLURM_STEP_NODELIST"])
        tasks = int(environ["SLURM_STEP_NUM_TASKS"])
        if tasks != len(hosts):
            raise ConfigError(
                f"srun started {tasks} tasks on {len(hosts)} nodes; it must be one per node: --ntasks-per-node=1"
            )
        # Each step has its own two ports: the previous step's ports may still be in use.
        pair = (int(environ["SLURM_JOB_ID"]) * 7 + int(environ.get("SLURM_STEP_ID", "0"))) % (PORTS // 2)
        port = FIRST_PORT + 2 * pair
        if spares >= len(hosts):
            raise ConfigError(f"--spare_nodes {spares}: the step has {len(hosts)} nodes; give fewer, or more nodes")
        return Node(processes, len(hosts) - spares, int(environ["SLURM_NODEID"]), hosts[0], port, spares)

    def number(name: str, default: int) -> int:
        text = environ.get(name) or str(default)
        if not text.isdigit():
            raise ConfigError(f"{name}={text!r} is not a number")
        return int(text)

    nodes = number("NNODES", 1)
    if nodes + spares == 1:
        return Node(processes, master_port=free_port())
    if not environ.get("NODE_RANK") or not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"NNODES={nodes} needs NODE_RANK (0 to {nodes + spares - 1}, another on each node) and MASTER_ADDR (the "
            "name or address of node 0, the same on all)"
        )
    rank = number("NODE_RANK", 0)
    if rank >= nodes + spares:
        raise ConfigError(f"NODE_RANK={rank} is not from 0 to {nodes + spares - 1} (NNODES={nodes})")
    return Node(processes, nodes, rank, environ["MASTER_ADDR"], number("MASTER_PORT", 29500), spares, PATIENCE_SECONDS)


def count_gpus() -> int:
    """Return how many GPUs this node offers to the run; 0 without a driver."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1", "NoDevFiles")])
    if not shutil.which("nvidia-smi"):
        return 0
    code, listed = ask("nvidia-smi", "-L")
    if code:
        raise BadNodeError(f"{socket.gethostname()}: nvidia-smi fails ({listed[:120]}); replace or reboot the node")
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def count_efa() -> int:
    """Return how many Elastic Fabric Adapters this node shows."""
    return len(list(ADAPTERS.glob("*")))


def check_node(
    instance: Instance | None, nproc: int | None, gpus: int, *, nodes: int = 1, stated: bool = True
) -> int:  # fmt: skip
    """Return how many processes to start, after comparing this node with its instance type.

    If the user has not ``stated`` a type, it is the machine's own; then fewer GPUs, or no EFA at all, are accepted.

    Raises:
        BadNodeError: GPUs or network adapters are missing.
    """
    processes = nproc or gpus or 1
    if instance is None:
        return processes
    host, machine = socket.gethostname(), platform.machine()
    if machine in ("x86_64", "aarch64") and machine != instance.arch:
        raise ConfigError(
            f"{host}: has {machine} processors, and a {instance.name} has {instance.arch}; give the instance type that "
            "the nodes have"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus < (nproc or instance.gpus) and (stated or (nproc is None and visible is None)):
        # The environment's choice is not the node's fault, and would make every node look bad.
        raise (BadNodeError if visible is None else ConfigError)(
            f"{host}: {gpus} of {nproc or instance.gpus} GPUs are visible on this {instance.name}"
            + (f" (CUDA_VISIBLE_DEVICES={visible})" if visible is not None else "")
            + "; in Slurm with GRES ask for them (--gpus-per-node), otherwise "
            + ("replace the node" if visible is None else "unset it")
        )
    efa = count_efa()
    if 0 < efa < instance.efa or (not efa and instance.efa and nodes > 1 and stated):
        raise BadNodeError(
            f"{host}: {efa} of {instance.efa} EFA adapters are there; replace the node"
            + ("" if efa else ", or leave the instance type out where nodes are to do without EFA")
        )
    return processes


def warn_of_node(resolved: Resolved, machines: Machines, seconds_left: float | None) -> None:
    """Warn of this node's environment, and of a run that may not save before the job ends."""
    warnings = environment.lint(os.environ)
    if seconds_left is not None:
        setting = "--signal=B:USR1@SECONDS (sbatch)"
        warnings += timing.save_warnings(resolved, machines, seconds_left, USR1_SECONDS, setting)
    warnings += preflight.missing_token(resolved, os.environ)
    instance = machines.instance
    if instance and instance.efa and machines.nodes > 1 and resolved.args.distributed_backend != "gloo":
        warnings += preflight.missing_plugin(instance)
    warn(warnings)


def attempt_name(environ: Mapping[str, str]) -> str:
    """Return the name of this start, the same on all nodes: job.restart.step, or the time for a start by hand."""
    if not environ.get("SLURM_JOB_ID"):
        return time.strftime("%Y%m%d-%H%M%S")
    return ".".join(environ.get(f"SLURM_{name}") or "0" for name in ("JOB_ID", "RESTART_COUNT", "STEP_ID"))


def record_start(resolved: Resolved, attempt: str, limit: int | None, *, in_s3: bool) -> None:
    """Record this start in the run folder; raise `CrashLoopError` after ``limit`` starts without a checkpoint.

    The history is for people. ``limit`` is None if a person starts the run, and watches.
    """
    job, run_dir = os.environ.get("SLURM_JOB_ID"), Path(resolved.args.run_dir)
    step = launch_flags.newest_step(resolved.args, in_s3=in_s3)
    if job and limit:
        starts, start = Starts(run_dir, job), attempt.partition(".")[2]
        starts.add(start, BEGAN, step)
        starts.refuse_loop(limit, without=start)
    nodes = os.environ.get("SLURM_STEP_NODELIST") or socket.gethostname()
    row = {"attempt": attempt, "time": time.time(), "job": job, "committed_step": step, "nodes": nodes}
    with (run_dir / HISTORY).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def record_failure(folder: Path, node_rank: int, failure: Failure) -> None:
    """Record a failure for the batch script and for people, under a name that sorts by time."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"failed-{time.time():.3f}-node-{node_rank}").write_text(failure.line() + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node and run its processes; return the exit code, and record the first failure."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    middle = arguments.index("--") if "--" in arguments else len(arguments)
    option_arguments, training = arguments[:middle], arguments[middle + 1 :]
    options = parser().parse_args(option_arguments)
    attempt = attempt_name(os.environ)
    node_rank = int(os.environ.get("SLURM_NODEID") or os.environ.get("NODE_RANK") or 0)
    outside = options.inside and not os.path.exists(INSIDE)  # outside the container, packages for S3 may be missing
    is_first = node_rank == 0 and NSYS not in os.environ
    failures, resolved = Path(options.failures) if options.failures else None, None
    try:
        training, resolved = launch_flags.complete(training)
        logs = Path(resolved.args.run_dir) / "logs" / attempt
        failures = failures or logs.parent
        _make(logs)
        if is_first:
            record_start(resolved, attempt, options.max_attempts, in_s3=not outside)
        if outside:
            raise BadNodeError(
                f"{socket.gethostname()}: srun was given --container-image, but this is not a container; pyxis is not "
                "installed on this compute node"
            )
        code, failure = start(options, option_arguments, training, resolved, logs)
    except SmpTrainError as error:
        say(f"error: {' '.join(str(error).split())}")
        code = error.exit_code
        cause = getattr(error, "cause", None) or supervisor.CAUSES.get(code, "error")
        failure = Failure(-1, getattr(error, "node", None) or node_name(), code, cause)
        say(failure.line())
    if failure is not None and failures is not None:
        record_failure(failures / attempt, node_rank, failure)
    job = os.environ.get("SLURM_JOB_ID")
    if failure is not None and resolved is not None and node_rank == 0 and job and options.max_attempts:
        with suppress(SmpTrainError):
            step = launch_flags.newest_step(resolved.args, in_s3=not outside)
            Starts(resolved.args.run_dir, job).add(attempt.partition(".")[2], ENDED, step)
    return code


def start(
    options: argparse.Namespace,
    option_arguments: Sequence[str],
    training: Sequence[str],
    resolved: Resolved,
    logs: Path,
) -> tuple[int, Failure | None]:
    """Check this node's hardware against its type and the other nodes, then run its processes to their end."""
    stated = bool(options.instance_type)
    instance = instances.find(options.instance_type) if stated else instances.this_machine()
    node = find_node(os.environ, 1, options.spare_nodes or 0)
    processes = check_node(instance, options.nproc, count_gpus(), nodes=node.nodes, stated=stated)
    node, machines = replace(node, processes=processes), Machines(instance, node.nodes, processes)
    if stated or options.nproc is None:
        preflight.check(resolved, machines)
    if node.nodes > 1 and "SLURM_STEP_NODELIST" in os.environ:
        efa = count_efa() if options.nproc is None else 0
        hosts = expand_hostlist(os.environ["SLURM_STEP_NODELIST"])
        try:
            odd, message = network_check.compare(logs, hosts, node.node_rank, processes, efa, RENDEZVOUS_SECONDS)
        except OSError as problem:
            odd, message = [node_name()], f"{node_name()}: cannot write {logs} ({problem.strerror}), as other nodes can"
        if odd:
            raise BadNodeError(message, ",".join(odd))
    if options.profile == "nsys" and NSYS not in os.environ:
        profiles = logs.parents[1] / "profile"
        _make(profiles)
        again = [sys.executable, "-m", "smp_train.launch.node_agent", *option_arguments, "--", *training]
        again = nsys.command(profiles / f"{logs.name}_node{node.node_rank}_{socket.gethostname()}", again)
        os.execve(again[0], again, {**os.environ, NSYS: "1"})
    environ = {
        **environment.variables(instance),
        **environment.output_places(resolved.args.run_dir, str(logs), os.environ, inside=options.inside),
        **os.environ,
    }
    if node.node_rank == 0:
        warn_of_node(resolved, machines, timing.slurm_seconds(options.time_left))
    if options.preflight and node.nodes > 1 and node.node_rank < node.nodes:
        backend, efa = resolved.args.distributed_backend, instance.efa if instance else 0
        code, failure = network_check.run(node, options.preflight, backend, efa, environ, logs)
        if code:
            return code, failure
    command = [sys.executable, "-m", "smp_train", "train", *training]
    recovery = Recovery(node) if resolved.args.recovery == "in_place" else None
    return supervise(command, node, environ=environ, log_dir=logs, recovery=recovery)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        # The batch script made it on the first node. A full disk is full for all nodes.
        if int(os.environ.get("SLURM_NODEID") or 0) > 0 and problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise BadNodeError(
                f"{node_name()}: cannot write {folder} ({problem.strerror}), as the first node can: is its file system "
                "mounted here?"
            ) from None
        raise ConfigError(f"{folder}: {problem.strerror}; set --run_dir to a folder that all nodes can write") from None


if __name__ == "__main__":
    sys.exit(main())
