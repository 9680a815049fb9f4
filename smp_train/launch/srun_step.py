"""The srun command of a Slurm job's step. Standard library only and Python 3.8 or newer, as the host runs it."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket

from smp_train.errors import ConfigError
from smp_train.launch.command import ask

SMP_CLUSTER_LOGS = "/var/log/aws/clusters"  # the SMP library recognizes HyperPod by this folder
INSIDE = "/.smp-train-inside"  # mounted into the container: the node agent checks with it that it is inside
# Variables that training reads and that images may set too; not GPUs and search paths, which differ inside.
CONTAINER_ENV = re.compile(
    "PYTHONPATH|PYTHONUNBUFFERED|NSYS_DIR|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|"
    "CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)|"
    "(AWS|FI|GLOO|HF|NCCL|OFI_NCCL|PYTORCH|SMP_TRAIN|TORCH|TORCHELASTIC|WANDB)_[A-Z0-9_]+"
)


@dataclasses.dataclass
class Job:
    """What a batch script runs; the script has these fields as JSON."""

    flags: list[str]
    """Training flags."""
    code_dir: str
    run_dir: str
    python: str
    agent: list[str] = dataclasses.field(default_factory=list)
    """Options of the node agent, such as --nproc=8."""
    in_place: bool = False
    """Ranks and nodes are replaced while the step goes on."""
    max_attempts: int = 3
    image: str = ""
    mounts: list[str] = dataclasses.field(default_factory=list)
    """Mounts in pyxis's form; the fields below are plain paths."""
    container_env: list[str] = dataclasses.field(default_factory=list)
    """Variables whose values here replace the image's."""
    read: list[str] = dataclasses.field(default_factory=list)
    """Files and folders that the run reads, to mount into the container."""
    written: list[str] = dataclasses.field(default_factory=list)
    """Folders that the run writes, to make and to mount into the container."""
    checkpoints: list[str] = dataclasses.field(default_factory=list)
    """The run's folders of checkpoints on a file system."""
    checkpoints_in_s3: bool = False


def srun_command(job: Job, *, dry_run: bool = False) -> list[str]:
    """Return the srun command of the job, and set the variables that its tasks need.

    Raises:
        ConfigError: srun has no pyxis. A dry run does not look.
    """
    nodes, srun_help = os.environ.get("SLURM_JOB_NUM_NODES"), ask("srun", "--help", survives=True)[1]
    survives = ["--kill-on-bad-exit=0", "--no-kill", "--wait=0"] if job.in_place else ["--kill-on-bad-exit=1"]
    srun = ["srun", *survives, "--ntasks-per-node=1", "--label"]
    srun += [f"--nodes={nodes}", f"--ntasks={nodes}"] if nodes else []  # salloc may have allocated more tasks
    if "--auto-resume" in srun_help:  # HyperPod's plugin swaps a bad node and runs the same srun again
        srun.append("--auto-resume=1")
    agent = [*job.agent, f"--max_attempts={job.max_attempts}", f"--failures={job.run_dir}/logs"]
    if not dry_run:
        code, left = ask("squeue", "--noheader", "--jobs", os.environ["SLURM_JOB_ID"], "--format", "%L", survives=True)
        agent += [f"--time_left={left.strip()}"] if left and not code else []
    # The packages on this shell's PYTHONPATH are not built for the Python in the image.
    packages = [] if job.image else os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([job.code_dir, *filter(None, packages)]))
    os.environ["PYTHONUNBUFFERED"] = "1"
    os.environ["NSYS_DIR"] = os.environ.get("NSYS_DIR") or "/fsx/nsight-efa"
    command = [job.python, "-m", "smp_train.launch.node_agent"]
    if job.image:
        if not dry_run:
            check_pyxis(srun_help)
        variables = {name for name in os.environ if CONTAINER_ENV.fullmatch(name)} | set(job.container_env)
        srun += [
            f"--container-image={job.image}", f"--container-mounts={','.join(mounts(job))}",
            "--no-container-mount-home", f"--container-workdir={os.getcwd()}",
            f"--container-env={','.join(sorted(variables))}",
        ]  # fmt: skip
        agent.append("--inside")
        # srun would look for the interpreter on this host; the image has another.
        command = ["/bin/bash", "-c", 'exec "$@"', "task", *command]
    return [*srun, *command, *agent, "--", *job.flags]


def check_pyxis(srun_help: str, subject: str = "this cluster's srun") -> None:
    """Raise `ConfigError` if srun's help has no option of pyxis."""
    if "--container-image" not in srun_help:
        raise ConfigError(f"{subject} knows no --container-image; install pyxis, or use --python instead of --image")


def check_start(job: Job) -> None:
    """Raise `ConfigError` if this host lacks the image or the interpreter of the job."""
    if job.image.startswith((".", "/")) and not os.path.exists(job.image):
        raise ConfigError(f"--image {job.image}: no such file; make it with docker_build.sh")
    if not job.image and not shutil.which(job.python):
        raise ConfigError(f"--python {job.python}: no such interpreter; make it with setup_conda_env.sh")


def mounts(job: Job) -> list[str]:
    """Return the mounts of the container, each once; `ConfigError` for paths that pyxis cannot mount."""
    for mount in job.mounts:
        if "," in mount or mount.count(":") > 2:
            raise ConfigError(
                f"--mounts {mount}: is not one mount, SOURCE or SOURCE:TARGET[:FLAGS]; pyxis cannot "
                "express a comma or a colon in a path"
            )
    nsys = os.environ.get("NSYS_DIR", "") if "--profile=nsys" in job.agent else ""
    of_host = [folder for folder in (SMP_CLUSTER_LOGS, nsys) if os.path.isdir(folder)]
    folders = [*job.read, os.getcwd(), job.code_dir, job.run_dir, *job.written, *of_host]
    for folder in folders:
        if "," in folder or ":" in folder:
            raise ConfigError(
                f"{folder}: pyxis cannot mount a path with a comma or a colon in it; rename it, or name it by a link "
                "that has none"
            )
    sources = [f"{job.code_dir}/smp_train/launch:{INSIDE}:ro", *job.mounts, *folders]
    return list(dict.fromkeys(os.path.join(os.getcwd(), source) for source in sources))


def make_folders(job: Job) -> None:
    """Make the folders that the run writes; `ConfigError` for a folder that cannot be made."""
    for folder in (*job.written, f"{job.run_dir}/logs"):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as problem:
            raise ConfigError(
                f"cannot write {folder} on {socket.gethostname()} ({problem.strerror}); RUN_DIR, CHECKPOINT_DIR and "
                "flags must name folders on a shared file system"
            ) from None
