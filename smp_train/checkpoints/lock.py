"""One job at a time writes a run's checkpoints to a folder; what a dead one has left behind does not stop the next.

The lock is a small file that its holder stamps every few seconds. Whether a holder is alive is asked of the operating
system where it ran on this machine, and else told by its stamps, by the clock of the storage: clocks need not agree.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from smp_train.checkpoints.storage import Storage
from smp_train.errors import CheckpointError

logger = logging.getLogger(__name__)

LOCK = ".lock"
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
"""A lock of another machine that has not been stamped for so long belongs to nobody any more."""
POLL_SECONDS = 1.0
ADVICE = "give another --run_name or --checkpoint_dir, or stop that job, or force it with --break_checkpoint_lock 1"
JOBS = {"SLURM_JOB_ID": "Slurm job", "TRAINING_JOB_NAME": "training job", "PBS_JOBID": "PBS job"}


@dataclass(frozen=True)
class Holder:
    """Who holds a lock. ``machine`` is the boot and the process namespace in which ``pid`` and ``began`` count."""

    host: str
    pid: int
    job: str
    since: str
    machine: str
    began: str
    token: str

    @classmethod
    def this_process(cls) -> Holder:
        """Return this process as a holder."""
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            job=next((f"{kind} {os.environ[name]}" for name, kind in JOBS.items() if os.environ.get(name)), ""),
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            machine=_machine(),
            began=_began(os.getpid()),
            token=uuid.uuid4().hex,
        )

    @classmethod
    def parse(cls, data: bytes) -> Holder | None:
        """Return the holder that a lock names, None where it names none."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None

    def to_bytes(self) -> bytes:
        """Return the contents of the lock."""
        return (json.dumps(asdict(self)) + "\n").encode()

    def alive(self) -> bool | None:
        """Return whether the process runs; None where that cannot be told from here."""
        if not self.machine or self.machine != _machine():
            return None
        return _began(self.pid) == self.began

    def __str__(self) -> str:
        return f"{self.job or 'a job'} on {self.host} (process {self.pid}, since {self.since})"


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _began(pid: int) -> str:
    """Return when a process began, in ticks of its machine: numbers of processes are used again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "gone" if fields[0] in "ZX" else fields[19]  # dead, and its parent has not looked yet
    except (OSError, IndexError):
        return "gone"


class Lock:
    """The lock of one run in one folder; held from `acquire` until `release`, or until the process ends."""

    def __init__(self, storage: Storage, advice: str = ADVICE) -> None:
        """``advice`` says what to do where another job holds it."""
        self._storage, self._advice = storage, advice
        self._file = ".".join([LOCK, storage.run.key]) if storage.run.key else LOCK
        self._mine = Holder.this_process()
        self._ended = threading.Event()
        self._stamping = threading.Lock()

    def acquire(self, *, force: bool = False, wait: Callable[[float], object] = time.sleep) -> None:
        """Take the lock, from a holder that is dead at once, from one that may be after `STALE_SECONDS`.

        With ``force`` from any. Raises `CheckpointError` that names the holder where it is alive.
        """
        told = False
        before: float | None = None
        while not self._storage.swap(self._file, None, self._mine.to_bytes()):
            seen = self._storage.peek(self._file)
            if seen is None:
                continue
            data, age = seen
            holder = Holder.parse(data)
            alive = None if holder is None else holder.alive()
            if force or alive is False or (alive is None and age >= STALE_SECONDS):
                if self._storage.swap(self._file, data, self._mine.to_bytes()):
                    logger.warning("%s: took over the lock of %s", self._storage.location, holder or "an unknown job")
                    break
                continue
            if alive or (before is not None and age < before):  # stamped since
                run = f" of run {self._storage.run}" if self._storage.run.name else ""
                raise CheckpointError(
                    f"checkpoint folder {self._storage.location}{run} is in use by {holder or 'an unknown job'}; "
                    f"{self._advice}"
                )
            if not told:
                logger.warning(
                    "%s was in use by %s %.0f s ago; waiting up to %.0f s to see whether it still is",
                    self._storage.location, holder or "an unknown job", age, STALE_SECONDS - age,
                )  # fmt: skip
                told = True
            before = age
            wait(POLL_SECONDS)
        threading.Thread(target=self._stamp, name="smp-train-lock", daemon=True).start()
        atexit.register(self.release)

    def _stamp(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # What goes wrong here is found out by `check`, or does not matter.
            with self._stamping, contextlib.suppress(OSError, CheckpointError):
                if not self._ended.is_set() and self._is_mine():
                    self._storage.stamp(self._file, self._mine.to_bytes())

    def _is_mine(self) -> bool:
        seen = self._storage.peek(self._file)
        return seen is not None and seen[0] == self._mine.to_bytes()

    def check(self) -> None:
        """Raise `CheckpointError` where another job has taken the lock meanwhile, or it was given back."""
        if self._ended.is_set():
            raise CheckpointError(f"checkpoint folder {self._storage.location} has been let go; nothing is committed")
        seen = self._storage.peek(self._file)
        if seen is None:  # somebody has tidied up by hand
            if self._storage.swap(self._file, None, self._mine.to_bytes()):
                return
            seen = self._storage.peek(self._file)
        if seen is not None and seen[0] != self._mine.to_bytes():
            holder = Holder.parse(seen[0]) or "another job"
            raise CheckpointError(
                f"checkpoint folder {self._storage.location} was taken over by {holder}; this step is not committed"
            )

    def release(self) -> None:
        """Give the lock back, if it is still held."""
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.release)
        # In S3 a stamp is a new object: one that is on its way would bring the lock back.
        waited = self._stamping.acquire(timeout=BEAT_SECONDS)
        with contextlib.suppress(OSError, CheckpointError):
            if self._is_mine():
                self._storage.drop(self._file)
        if waited:
            self._stamping.release()
