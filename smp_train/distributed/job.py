"""The job that this process belongs to, and whether it is a job that was started again."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smp_train.distributed.environment import LAUNCH

KUBERNETES_JOB = "SMP_TRAIN_JOB"
"""Set by our Kubernetes manifests: namespace and name of the job."""
UNIQUE_JOBS = {"TRAINING_JOB_NAME": "training job", KUBERNETES_JOB: "Kubernetes job"}
"""Variables with the name of a job of which one start at most lives at any time."""
SHARED_JOBS = {"SLURM_JOB_ID": "Slurm job", "PBS_JOBID": "PBS job"}
"""Variables with the id of an allocation, which may run several trainings."""


@dataclass(frozen=True)
class Job:
    """A job as its scheduler names it.

    Attributes:
        name: such as ``Slurm job 17``; empty for a process that somebody started by hand.
        restarts: how often the scheduler has started the job again.
        agent: what starts the processes of this job again when they end, and only then: a unique job, or torchrun or
            our supervisor by process and run id. Empty where nothing does.
        process: the process itself; a second training of one program is no restart of the first.
    """

    name: str = ""
    restarts: int = 0
    agent: str = ""
    process: str = ""

    @classmethod
    def current(cls, environ: Mapping[str, str] | None = None) -> Job:
        """Return the job of this process from the environment, or of another process from its environment."""
        process = identity(os.getpid()) if environ is None else ""
        environ = os.environ if environ is None else environ
        for variable, kind in UNIQUE_JOBS.items():
            if environ.get(variable):
                name = f"{kind} {environ[variable]}"
                return cls(name, agent=name, process=process)
        agent = ""
        if "TORCHELASTIC_RUN_ID" in environ or environ.get("ROLE_NAME") == LAUNCH:
            agent = f"{identity(os.getppid())} {environ.get('TORCHELASTIC_RUN_ID', '')}"
        restarts = environ.get("SLURM_RESTART_COUNT") or "0"
        for variable, kind in SHARED_JOBS.items():
            if environ.get(variable):
                number = int(restarts) if restarts.isdigit() else 0
                return cls(f"{kind} {environ[variable]}", number, agent, process)
        return cls(agent=agent, process=process)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Job:
        """Return the job of `dataclasses.asdict`. Raises TypeError and ValueError."""
        texts = (str(content[key]) for key in ("agent", "process"))
        return cls(str(content["name"]), int(content["restarts"]), *texts)

    def is_restart_of(self, earlier: Job) -> bool:
        """Return whether this is ``earlier``, started again. Two steps of one allocation are not."""
        if self.agent and self.agent == earlier.agent:
            return not self.process or self.process != earlier.process
        return bool(self.name) and self.name == earlier.name and self.restarts > earlier.restarts


def identity(pid: int) -> str:
    """Return the machine, id and start time of a process; the time is empty if it has ended.

    The machine is this start of the system with its namespace of process ids: containers may share a host name.
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
    """Return whether a process, by its `identity`, lives on this machine; None if that cannot be known here."""
    machine, _, numbers = process.partition(" ")
    pid, _, started = numbers.partition(" ")
    if not started or machine != identity(os.getpid()).partition(" ")[0]:
        return None
    return identity(int(pid)) == process
