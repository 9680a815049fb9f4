"""The srun command of a Slurm job's step, and the job as a batch script's command line has it.

Standard library only and Python 3.8 or newer, as the host's own interpreter may run it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from typing import Any

from smp_train.errors import ConfigError

SMP_CLUSTER_LOGS = "/var/log/aws/clusters"  # the SMP library recognizes HyperPod by this folder
INSIDE = "/.smp-train-inside"  # mounted into the container, so that the node agent can tell that it is in one
# Variables that training reads and that images may set too; not GPUs and search paths, which differ inside.
HANDED_OVER = re.compile(
    "PYTHONPATH|PYTHONUNBUFFERED|NSYS_DIR|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|"
    "CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)|"
    "(AWS|FI|GLOO|HF|NCCL|OFI_NCCL|PYTORCH|SMP_TRAIN|TORCH|TORCHELASTIC|WANDB)_[A-Z0-9_]+"
)


@dataclasses.dataclass
class Job:
    """What a batch script runs. ``mounts`` are written as pyxis does, the other folders are plain paths."""

    flags: list[str]
    code_dir: str
    run_dir: str
    python: str
    image: str = ""
    mounts: list[str] = dataclasses.field(default_factory=list)
    folders: list[str] = dataclasses.field(default_factory=list)
    """Folders that are read: mounted into the container."""
    written: list[str] = dataclasses.field(default_factory=list)
    """Folders that are written: made, and mounted into the container."""
    checkpoints: list[str] = dataclasses.field(default_factory=list)
    """The run's own folders of checkpoints on a file system: a commit there shows that a start was not in vain."""
    container_env: str = ""
    checkpoints_in_s3: bool = False
    """Some checkpoints are where this script cannot look: the node agent reports those."""
    nproc: str = "auto"
    instance_type: str = ""
    preflight: str = ""
    nsys: bool = False
    max_attempts: int = 3


def say(line: str) -> None:
    """Print a line on stderr."""
    print(f"smp-train: {line}", file=sys.stderr, flush=True)


def node_name() -> str:
    """Return this node's name, as Slurm calls it where Slurm started this process."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def ignore_term() -> None:
    """In a child: survive SIGTERM, which Slurm sends to all that the script runs as it takes the job back."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def output(*command: str, stderr: int | None = subprocess.DEVNULL) -> str:
    """Return what a command prints, "" where it is not there."""
    try:
        done = subprocess.run(command, stdout=-1, stderr=stderr, text=True, check=False, preexec_fn=ignore_term)
    except OSError:
        return ""
    return done.stdout


def step(job: Job, *, dry_run: bool = False) -> list[str]:
    """Return the srun command of the job, and export what it hands on.

    Raises:
        ConfigError: for what is missing on this host; a dry run looks at no file.
    """
    here, nodes = socket.gethostname(), os.environ.get("SLURM_JOB_NUM_NODES")
    srun = ["srun", "--kill-on-bad-exit=1", "--ntasks-per-node=1", "--label"]
    srun += [f"--nodes={nodes}", f"--ntasks={nodes}"] if nodes else []  # an allocation of salloc may be for more tasks
    options = output("srun", "--help", stderr=subprocess.STDOUT)
    if "--auto-resume" in options:  # HyperPod's plugin swaps a bad node and runs the same srun again
        srun.append("--auto-resume=1")
    agent = ["--nproc", job.nproc or "auto", "--max_attempts", str(job.max_attempts)]
    left = "" if dry_run else output("squeue", "--noheader", "--jobs", os.environ["SLURM_JOB_ID"], "--format", "%L")
    for option, value in (
        ("failures", f"{job.run_dir}/logs"), ("instance_type", job.instance_type), ("preflight", job.preflight),
        ("time_left", left.strip()),
    ):  # fmt: skip
        agent += [f"--{option}", value] if value else []
    agent += ["--nsys"] if job.nsys else []
    # The image has a Python of its own, for which the packages on this shell's PYTHONPATH are not made.
    further = [] if job.image else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([job.code_dir, *filter(None, further)]))
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ["NSYS_DIR"] = os.environ.get("NSYS_DIR") or "/fsx/nsight-efa"
    command = [job.python, "-m", "smp_train.launch.node_agent"]
    if job.image:
        if not dry_run and "--container-image" not in options:
            raise ConfigError(
                "this cluster's srun knows no --container-image; install pyxis, or use launch_training_conda.sh"
            )
        if not dry_run and job.image.startswith(("./", "/")) and not os.path.exists(job.image):
            raise ConfigError(f"no image {job.image} on {here}; make it with docker_build.sh, or set IMAGE")
        handed = {name for name in os.environ if HANDED_OVER.fullmatch(name)} | set(job.container_env.split(",")) - {""}
        srun += [
            f"--container-image={job.image}", f"--container-mounts={','.join(mounts(job))}",
            "--no-container-mount-home", f"--container-workdir={os.getcwd()}",
            f"--container-env={','.join(sorted(handed))}",
        ]  # fmt: skip
        agent.append("--inside")
        # srun would look the interpreter up on this host; the image has its own.
        command = ["/bin/bash", "-c", 'exec "$@"', "task", *command]
    elif not dry_run and not shutil.which(job.python):
        raise ConfigError(f"no interpreter {job.python} on {here}; run setup_conda_env.sh, or set PYTHON")
    return [*srun, *command, *agent, "--", *job.flags]


def mounts(job: Job) -> list[str]:
    """Return what pyxis is to mount, once each; `ConfigError` for what it cannot mount."""
    for mount in job.mounts:
        if "," in mount or mount.count(":") > 2:
            raise ConfigError(
                f"--mounts {mount}: is not one mount, SOURCE or SOURCE:TARGET[:FLAGS]; pyxis cannot "
                "express a comma or a colon in a path"
            )
    nsys = os.environ.get("NSYS_DIR", "") if job.nsys else ""
    own = [place for place in (SMP_CLUSTER_LOGS, nsys) if os.path.isdir(place)]
    folders = [*job.folders, os.getcwd(), job.code_dir, job.run_dir, *job.written, *own]
    for folder in folders:
        if "," in folder or ":" in folder:
            raise ConfigError(
                f"{folder}: pyxis cannot mount a path with a comma or a colon in it; rename it, or name it by a link "
                "that has none"
            )
    found = [f"{job.code_dir}/smp_train/launch:{INSIDE}:ro", *job.mounts, *folders]
    return list(dict.fromkeys(os.path.join(os.getcwd(), one) for one in found))


def make_folders(job: Job) -> None:
    """Make the folders that the run writes; `ConfigError` where that cannot be."""
    for folder in (*job.written, f"{job.run_dir}/logs"):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as problem:
            raise ConfigError(
                f"cannot write {folder} on {socket.gethostname()} ({problem.strerror}); RUN_DIR, CHECKPOINT_DIR and "
                "flags must name folders on a shared file system"
            ) from None


def command_line(job: Job) -> list[list[str]]:
    """Return the words that `read_command_line` reads a job from, in groups; a field without a value is left out."""
    groups = []
    for field in dataclasses.fields(job):
        value = getattr(job, field.name)
        if field.name != "flags" and value not in ("", [], False):
            words = value if isinstance(value, list) else [] if value is True else [str(value)]
            groups.append([f"--{field.name}", *words])
    return [*groups, ["--"], *([flag] for flag in job.flags)]


def read_command_line(words: list[str]) -> tuple[Job, str]:
    """Return (job, signal by which Slurm has asked to stop already)."""
    parser = argparse.ArgumentParser(prog="batch_job.py", allow_abbrev=False)
    parser.add_argument("--asked", default="")
    kinds: dict[str, Any] = {"int": {"type": int}, "bool": {"action": "store_true"}, "list[str]": {"nargs": "*"}}
    for field in dataclasses.fields(Job):
        if field.name != "flags":
            parser.add_argument(f"--{field.name}", default=argparse.SUPPRESS, **kinds.get(str(field.type), {}))
    here = words.index("--")
    options = vars(parser.parse_args(words[:here]))
    asked = options.pop("asked")
    return Job(flags=words[here + 1 :], **options), asked
