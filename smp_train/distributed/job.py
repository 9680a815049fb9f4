"""The job that this process belongs to, and whether it is a job that was started again."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_train.distributed import generation
from smp_train.distributed.environment import LAUNCH

KUBERNETES_JOB = "SMP_TRAIN_JOB"
"""Set by our Kubernetes manifests: namespace and name of the job."""
UNIQUE_JOBS = {"TRAINING_JOB_NAME": "training job", KUBERNETES_JOB: "Kubernetes job"}
"""Variables with the name of a job that runs at most once at any time."""
SHARED_JOBS = {"SLURM_JOB_ID": "Slurm job", "PBS_JOBID": "PBS job"}
"""Variables with the id of an allocation, which may run several trainings."""


@dataclass(frozen=True)
class Job:
    """A job as its scheduler names it.

    Attributes:
        name: for example ``Slurm job 17``; empty for a process that was started by hand.
        restarts: number of times that the scheduler has restarted the job.
        agent: identifies the program that restarts the processes of this job when they have ended: a unique job, or the
            process and run id of torchrun or our supervisor. Empty without such a program.
        process: this process; a second training in the same process is not a restart of the first.
    """

    name: str = ""
    restarts: int = 0
    agent: str = ""
    process: str = ""

    @classmethod
    def current(cls, environ: Mapping[str, str] | None = None) -> Job:
        """Return this process's job, or the job of the process whose environment is passed."""
        process = identity(os.getpid()) if environ is None else ""
        environ = os.environ if environ is None else environ
        for variable, kind in UNIQUE_JOBS.items():
            if environ.get(variable):
                name = f"{kind} {environ[variable]}"
                return cls(name, agent=name, process=process)
        agent = ""
        if generation.member is not None:
            agent = generation.member.run
        elif "TORCHELASTIC_RUN_ID" in environ or environ.get("ROLE_NAME") == LAUNCH:
            agent = f"{identity(os.getppid())} {environ.get('TORCHELASTIC_RUN_ID', '')}"
        restarts = environ.get("SLURM_RESTART_COUNT") or "0"
        for variable, kind in SHARED_JOBS.items():
            if environ.get(variable):
                number = int(restarts) if restarts.isdigit() else 0
                return cls(f"{kind} {environ[variable]}", number, agent, process)
        return cls(agent=agent, process=process)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """Return the job from the result of `dataclasses.asdict`. Raises KeyError, TypeError or ValueError."""
        texts = (str(content[key]) for key in ("agent", "process"))
        return cls(str(content["name"]), int(content["restarts"]), *texts)

    def is_restart_of(self, earlier: Job) -> bool:
        """Return whether this is the job ``earlier``, started again; two steps of one allocation are different jobs."""
        if self.agent and self.agent == earlier.agent:
            return not self.process or self.process != earlier.process
        return bool(self.name) and self.name == earlier.name and self.restarts > earlier.restarts


def identity(pid: int) -> str:
    """Return the machine, id and start time of a process, separated by spaces; the time is empty if it has ended.

    The machine is the boot id with the namespace of process ids, as several containers may have the same host name.
    """
    try:
        machine = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # another system than Linux
        return f"{socket.gethostname()} {pid} "
    started = ""
    with contextlib.suppress(OSError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        started = "" if state in "ZX" else fields[18]
    return f"{machine} {pid} {started}"


def is_alive(process: str) -> bool | None:
    """Return whether the process with an `identity` lives; None if it is on another machine."""
    machine, _, numbers = process.partition(" ")
    pid, _, started = numbers.partition(" ")
    if not started or machine != identity(os.getpid()).partition(" ")[0]:
        return None
    return identity(int(pid)) == process
