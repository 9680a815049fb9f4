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
from typing import Any

from smp_train.arguments import Resolved
from smp_train.distributed import expand_hostlist
from smp_train.distributed.group import RENDEZVOUS_SECONDS
from smp_train.distributed.host import free_port
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import container, environment, instances, network_check, nsys, preflight, supervisor, timing
from smp_train.launch import flags as launch_flags
from smp_train.launch.command import ask
from smp_train.launch.instances import Instance
from smp_train.launch.srun_step import INSIDE, node_name, say
from smp_train.launch.supervisor import Failure, Place, supervise

FIRST_PORT, PORTS = 20000, 10000  # below the range of ephemeral ports
GUARD = "launches.jsonl"
USR1_SECONDS = 300
"""How long before the time limit Slurm signals the batch scripts."""
ADAPTERS = Path("/sys/class/infiniband")
NSYS = "SMP_TRAIN_UNDER_NSYS"
"""Set in the environment of an agent that nsys started."""


class BadNodeError(SmpTrainError):
    """A node that is not what the run needs; another may be. ``node`` is its name where it is not this one."""

    exit_code = network_check.BAD_NODE
    cause = "node"

    def __init__(self, message: str, node: str | None = None) -> None:
        super().__init__(message)
        self.node = node


class CrashLoopError(SmpTrainError):
    """The run fails again and again without progress."""

    cause = "crash-loop"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options before ``--``."""
    options = argparse.ArgumentParser(prog="python -m smp_train.launch.node_agent", allow_abbrev=False)
    options.add_argument("--nproc", default="auto", help="processes on each node; auto: one per GPU, or one")
    options.add_argument("--instance_type", help="check this node against the table of instance types")
    options.add_argument("--failures", type=Path, help="folder for what failed where (default: logs of the run folder)")
    options.add_argument("--inside", action="store_true", help="insist on running inside the container")
    options.add_argument("--max_attempts", type=int, help="refuse to start after so many without a new checkpoint")
    options.add_argument("--preflight", type=float, default=0, help="seconds for all nodes to reach each other, first")
    options.add_argument("--time_left", help="until the time limit of the job, as Slurm writes it")
    options.add_argument("--nsys", action="store_true", help="record this node with Nsight Systems")
    return options


def find_place(environ: Mapping[str, str], processes: int) -> Place:
    """Return this node's rank and peers, from the step that srun started, or from NNODES and NODE_RANK set by hand.

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
        # Each step has two ports of its own, as those of the step before may still be in use.
        pair = (int(environ["SLURM_JOB_ID"]) * 7 + int(environ.get("SLURM_STEP_ID", "0"))) % (PORTS // 2)
        port = FIRST_PORT + 2 * pair
        return Place(processes, len(hosts), int(environ["SLURM_NODEID"]), hosts[0], port)

    def number(name: str, default: int) -> int:
        text = environ.get(name) or str(default)
        if not text.isdigit():
            raise ConfigError(f"{name}={text!r} is not a number")
        return int(text)

    nodes = number("NNODES", 1)
    if nodes == 1:
        return Place(processes, master_port=free_port())
    if not environ.get("NODE_RANK") or not environ.get("MASTER_ADDR"):
        raise ConfigError(
            f"NNODES={nodes} needs NODE_RANK (0 to {nodes - 1}, another on each node) and MASTER_ADDR (the name or "
            "address of node 0, the same on all)"
        )
    rank = number("NODE_RANK", 0)
    if rank >= nodes:
        raise ConfigError(f"NODE_RANK={rank} is not from 0 to {nodes - 1} (NNODES={nodes})")
    return Place(processes, nodes, rank, environ["MASTER_ADDR"], number("MASTER_PORT", 29500))


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


def check_node(instance: Instance | None, nproc: str, gpus: int, *, nodes: int = 1, given: bool = True) -> int:
    """Return how many processes to start, after comparing this node with what its instance type has.

    Not ``given``: the type is the machine's own, and a choice of GPUs, or no EFA at all, is accepted.

    Raises:
        BadNodeError: when GPUs or network adapters are missing.
    """
    here, machine = socket.gethostname(), platform.machine()
    wanted = None if nproc == "auto" else int(nproc)
    if instance is None:
        return wanted or gpus or 1
    if machine in ("x86_64", "aarch64") and machine != instance.arch:
        raise ConfigError(
            f"{here}: has {machine} processors, and a {instance.name} has {instance.arch}; give the instance type that "
            "the nodes have"
        )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus < (wanted or instance.gpus) and (given or (wanted is None and chosen is None)):
        # What the environment chose is no fault of the node's: every node would be called bad.
        raise (BadNodeError if chosen is None else ConfigError)(
            f"{here}: {gpus} of {wanted or instance.gpus} GPUs are visible on this {instance.name}"
            + (f" (CUDA_VISIBLE_DEVICES={chosen})" if chosen is not None else "")
            + "; in Slurm with GRES ask for them (--gpus-per-node), otherwise "
            + ("replace the node" if chosen is None else "unset it")
        )
    efa = count_efa()
    if 0 < efa < instance.efa or (not efa and instance.efa and nodes > 1 and given):
        raise BadNodeError(
            f"{here}: {efa} of {instance.efa} EFA adapters are there; replace the node"
            + ("" if efa else ", or leave the instance type out where nodes are to do without EFA")
        )
    return wanted or gpus or 1


def warn(resolved: Resolved, instance: Instance | None, place: Place, left: float | None) -> None:
    """Warn of what is missing on this node, and of a run that may not save before the job ends in ``left`` seconds."""
    found = environment.lint(os.environ)
    if left is not None:
        found += timing.save_warnings(
            resolved, limit=left, margin=USR1_SECONDS, instance=instance, nodes=place.nodes, processes=place.processes,
            setting="--signal=B:USR1@SECONDS (sbatch)",
        )  # fmt: skip
    found += preflight.missing_token(resolved, os.environ)
    if instance and instance.efa and place.nodes > 1 and resolved.args.distributed_backend != "gloo":
        found += preflight.missing_plugin(instance)
    for line in found:
        say(f"warning: {line}")


def attempt_name(environ: Mapping[str, str]) -> str:
    """Return the name of this start, the same on all nodes: job.restart.step, or the time for a start by hand."""
    if not environ.get("SLURM_JOB_ID"):
        return time.strftime("%Y%m%d-%H%M%S")
    return ".".join(environ.get(f"SLURM_{name}") or "0" for name in ("JOB_ID", "RESTART_COUNT", "STEP_ID"))


def guard(
    resolved: Resolved, environ: Mapping[str, str], limit: int | None, attempt: str, *, in_s3: bool = True
) -> None:
    """Record this start, and refuse it when the ``limit`` before it in this job brought no new checkpoint.

    Without ``limit`` (a person starts it, and watches) it is only recorded. Starts up to one that ended in `DONE` or
    `STOPPED` do not count.
    """
    job, run_dir = environ.get("SLURM_JOB_ID"), Path(resolved.args.run_dir)
    step = launch_flags.newest_step(resolved.args, in_s3=in_s3)
    path = run_dir / GUARD
    before: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            before.append(json.loads(line))
    if job and limit:
        ended = max(_time(run_dir / marker) for marker in ("DONE", "STOPPED"))
        in_vain = [
            one for one in before
            if one.get("job") == job and one.get("committed_step") == step and float(one.get("time", 0)) > ended
            and not (run_dir / "logs" / str(one.get("attempt")) / "ended-by-slurm").exists()
        ]  # fmt: skip
        if len(in_vain) >= limit:
            raise CrashLoopError(
                f"{len(in_vain)} starts of job {job} brought no checkpoint beyond step {step}: not trying again; the "
                f"first failing rank of each is named in {run_dir}/logs. Lower --checkpoint_freq if they needed longer"
            )
    start = {
        "attempt": attempt, "time": time.time(), "job": job, "committed_step": step,
        "nodes": environ.get("SLURM_STEP_NODELIST") or socket.gethostname(),
    }  # fmt: skip
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def _time(marker: Path) -> float:
    """Return the time that a marker contains; 0 without one."""
    with suppress(OSError, ValueError, TypeError):
        return float(json.loads(marker.read_text(encoding="utf-8"))["time"])
    return 0.0


def main(argv: Sequence[str] | None = None) -> int:
    """Check this node and run its processes; return the exit code, and record what failed first."""
    words = list(sys.argv[1:] if argv is None else argv)
    middle = words.index("--") if "--" in words else len(words)
    before, training = words[:middle], words[middle + 1 :]
    options = parser().parse_args(before)
    attempt = attempt_name(os.environ)
    node = int(os.environ.get("SLURM_NODEID") or os.environ.get("NODE_RANK") or 0)
    outside = options.inside and not os.path.exists(INSIDE)  # then packages that S3 needs may be missing, too
    failures, resolved = options.failures, None
    try:
        training, resolved = launch_flags.complete(training)
        logs = Path(resolved.args.run_dir) / "logs" / attempt
        failures = failures or logs.parent
        _make(logs)
        if node == 0 and NSYS not in os.environ:
            guard(resolved, os.environ, options.max_attempts, attempt, in_s3=not outside)
        if outside:
            raise BadNodeError(
                f"{socket.gethostname()}: srun was given --container-image, but this is not a container; pyxis is not "
                "installed on this compute node"
            )
        if options.inside:
            container.refuse_lost(resolved.args.checkpoint_dir)
        code, failure = start(options, before, training, resolved, logs)
    except SmpTrainError as error:
        say(f"error: {' '.join(str(error).split())}")
        code = error.exit_code
        cause = getattr(error, "cause", None) or supervisor.CAUSES.get(code, "error")
        failure = Failure(-1, getattr(error, "node", None) or node_name(), code, cause)
        say(failure.line())
    if failure is not None and failures is not None:
        record(failures / attempt, node, failure, resolved, in_s3=not outside)
    return code


def start(
    options: argparse.Namespace, before: Sequence[str], training: Sequence[str], resolved: Resolved, logs: Path
) -> tuple[int, Failure | None]:
    """Check this node's hardware against its type and the other nodes, then run its processes to their end."""
    given = bool(options.instance_type)
    instance = instances.find(options.instance_type) if given else instances.here()
    place = find_place(os.environ, 1)
    processes = check_node(instance, options.nproc, count_gpus(), nodes=place.nodes, given=given)
    place = replace(place, processes=processes)
    if given or options.nproc == "auto":
        preflight.check(resolved, instance, place.nodes, place.processes)
    if place.nodes > 1 and "SLURM_STEP_NODELIST" in os.environ:
        efa = count_efa() if options.nproc == "auto" else 0
        hosts = expand_hostlist(os.environ["SLURM_STEP_NODELIST"])
        try:
            odd, message = network_check.compare(logs, hosts, place.node_rank, processes, efa, RENDEZVOUS_SECONDS)
        except OSError as problem:
            here = node_name()
            odd, message = [here], f"{here}: cannot write {logs} ({problem.strerror}), as other nodes can"
        if odd:
            raise BadNodeError(message, ",".join(odd))
    if options.nsys and NSYS not in os.environ:
        profiles = logs.parents[1] / "profile"
        _make(profiles)
        again = [sys.executable, "-m", "smp_train.launch.node_agent", *before, "--", *training]
        again = nsys.command(profiles / f"{logs.name}_node{place.node_rank}_{socket.gethostname()}", again)
        os.execve(again[0], again, {**os.environ, NSYS: "1"})
    environ = {
        **environment.variables(instance),
        **environment.places(resolved.args.run_dir, str(logs), os.environ, inside=options.inside),
        **os.environ,
    }
    if place.node_rank == 0:
        warn(resolved, instance, place, timing.slurm_seconds(options.time_left))
    if options.preflight and place.nodes > 1:
        backend, efa = resolved.args.distributed_backend, instance.efa if instance else 0
        code, failure = network_check.run(place, options.preflight, backend, efa, environ, logs)
        if code:
            return code, failure
    return supervise([sys.executable, "-m", "smp_train", "train", *training], place, environ=environ, log_dir=logs)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        # The first node has made it, in the batch script. Room is short on all of them.
        if int(os.environ.get("SLURM_NODEID") or 0) > 0 and problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise BadNodeError(
                f"{node_name()}: cannot write {folder} ({problem.strerror}), as the first node can: is its file system "
                "mounted here?"
            ) from None
        raise ConfigError(f"{folder}: {problem.strerror}; set --run_dir to a folder that all nodes can write") from None


def record(folder: Path, node: int, failure: Failure, resolved: Resolved | None, *, in_s3: bool) -> None:
    """Record a failure for the batch script and for people, under a name that sorts by time.

    The first node also records the newest checkpoint in S3, where the batch script cannot look.
    """
    with suppress(OSError, SmpTrainError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"failed-{time.time():.3f}-node-{node}").write_text(failure.line() + "\n", encoding="utf-8")
        if node == 0 and resolved is not None and any("://" in place for place in resolved.args.checkpoint_dir):
            step = launch_flags.newest_step(resolved.args, in_s3=in_s3)
            (folder / "committed-step").write_text(f"{step}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
