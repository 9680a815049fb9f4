"""One job at a time writes a run's checkpoints to a folder: the one whose token stands in the owner file.

The owner reads its token back before every commit, so that a job whose folder was taken over commits nothing more. A
second job is refused while the owner lives. On this machine the owner holds a file lock, which the kernel releases
with the process. From other machines it is seen by a file that it writes every few seconds; its age is told by the
clock of the storage, so that clocks need not agree.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass

from smp_train.checkpoints.commit import CheckpointFolder
from smp_train.errors import CheckpointError, ConfigError
from smp_train.storage.paths import private_folder

logger = logging.getLogger(__name__)

OWNER = ".lock"
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
"""Without a sign of life for so long, an owner on another machine counts as dead."""
POLL_SECONDS = 1.0
ADVICE = "give another --run_name or --checkpoint_dir, or stop that job, or force it with --break_checkpoint_lock 1"
JOBS = {"SLURM_JOB_ID": "Slurm job", "TRAINING_JOB_NAME": "training job", "PBS_JOBID": "PBS job"}


@dataclass(frozen=True)
class Token:
    """Content of the owner file: the owning job, and a random number that no other job has."""

    host: str
    pid: int
    job: str
    since: str
    token: str

    @classmethod
    def fresh(cls) -> Token:
        """Return a token of this process."""
        job = next((f"{kind} {os.environ[name]}" for name, kind in JOBS.items() if os.environ.get(name)), "")
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(socket.gethostname(), os.getpid(), job, since, uuid.uuid4().hex)

    @classmethod
    def parse(cls, data: bytes) -> Token | None:
        """Return what an owner file says, None where it cannot be read."""
        try:
            content = json.loads(data)
            found = cls(**{name: content[name] for name in cls.__dataclass_fields__})
            return found if re.fullmatch("[0-9a-f]{32}", found.token) else None
        except (ValueError, TypeError, KeyError):
            return None

    def to_bytes(self) -> bytes:
        """Return the content of the owner file."""
        return (json.dumps(asdict(self)) + "\n").encode()

    def __str__(self) -> str:
        return f"{self.job or 'a job'} on {self.host} (process {self.pid}, since {self.since})"


_held: dict[str, int] = {}
"""Descriptors of the locked files of this process, by token."""


def _locked_file(token: str) -> str:
    # Not TMPDIR where possible, which a scheduler may remove with the job.
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return os.path.join(private_folder("smp-train-owners", parent), token)


def _hold(token: str) -> None:
    """Lock a file of this machine until the process ends; forked children do not inherit the lock."""
    with contextlib.suppress(OSError, ConfigError):  # then other jobs rely on the beat file
        descriptor = os.open(_locked_file(token), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held[token] = descriptor


def _let_go(token: str) -> None:
    if token in _held:
        with contextlib.suppress(OSError, ConfigError):
            os.unlink(_locked_file(token))
        os.close(_held.pop(token))


def _lives_here(token: str) -> bool | None:
    """Return whether the process that drew a token lives on this machine; None where it was on another."""
    if token in _held:  # to open and close the file would release its lock
        return True
    try:
        path = _locked_file(token)
        descriptor = os.open(path, os.O_RDWR)
    except (OSError, ConfigError):
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return False
    except OSError as error:
        return True if error.errno in (errno.EACCES, errno.EAGAIN) else None
    finally:
        os.close(descriptor)


class Owner:
    """Ownership of one run's checkpoints in a folder, from `acquire` until `release` or the end of the process."""

    def __init__(self, folder: CheckpointFolder, advice: str = ADVICE) -> None:
        """``advice`` says what to do where another job owns it."""
        self._folder, self._storage, self._advice = folder, folder.storage, advice
        self._file = ".".join([OWNER, folder.run.key]) if folder.run.key else OWNER
        self._mine = Token.fresh()
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None

    def _beat_file(self, token: Token) -> str:
        return f"{self._file}-{token.token}"

    def _read(self) -> bytes | None:
        try:
            return self._storage.read(self._file) if self._storage.exists(self._file) else None
        except FileNotFoundError:  # removed in between
            return None

    def _age(self, owner: Token | None) -> float:
        """Return the seconds since the owner was last seen."""
        files = [self._file, *([self._beat_file(owner)] if owner else [])]
        seen = [entry.modified for entry in map(self._storage.entry, files) if entry is not None]
        return self._storage.now() - max(seen) if seen else STALE_SECONDS

    def acquire(self, *, force: bool = False, wait: Callable[[float], object] = time.sleep) -> None:
        """Become the owner: in place of one that is dead at once, of one that may be dead after `STALE_SECONDS`.

        With ``force`` in place of any. Raises `CheckpointError` that names the owner where it is alive.
        """
        before: float | None = None
        _hold(self._mine.token)
        try:
            while not self._storage.put_if_absent(self._file, self._mine.to_bytes()):
                data = self._read()
                if data == self._mine.to_bytes():  # done by a first try, of which the file system lost the answer
                    break
                if data is None:
                    continue
                owner = Token.parse(data)
                alive = None if owner is None else _lives_here(owner.token)
                age = self._age(owner)
                if force or alive is False or (alive is None and age >= STALE_SECONDS):
                    if self._take_over(data, owner):
                        break
                    continue
                if alive or (before is not None and age < before):  # seen since
                    run = f" of run {self._folder.run}" if self._folder.run.name else ""
                    raise CheckpointError(
                        f"checkpoint folder {self._folder.location}{run} is in use by {owner or 'an unknown job'}; "
                        f"{self._advice}"
                    )
                if before is None:
                    logger.warning(
                        "%s was in use by %s %.0f s ago; waiting up to %.0f s to see whether it still is",
                        self._folder.location, owner or "an unknown job", age, STALE_SECONDS - age,
                    )  # fmt: skip
                before = age
                wait(POLL_SECONDS)
        except BaseException:
            _let_go(self._mine.token)
            raise
        self._beating = threading.Thread(target=self._beat, name="smp-train-owner", daemon=True)
        self._beating.start()
        atexit.register(self.release)

    def _take_over(self, data: bytes, owner: Token | None) -> bool:
        """Put the token in place of another; of two that do so in one moment the later is the owner."""
        if self._read() != data:
            return False
        self._storage.put(self._file, self._mine.to_bytes())
        if owner is not None:
            self._storage.delete(self._beat_file(owner))
        logger.warning("%s: took over the lock of %s", self._folder.location, owner or "an unknown job")
        return self._read() == self._mine.to_bytes()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # What goes wrong here is found out by `check`, or does not matter.
            with contextlib.suppress(OSError, CheckpointError):
                self._storage.put(self._beat_file(self._mine), b"")

    def check(self) -> None:
        """Raise `CheckpointError` where another job has become the owner meanwhile, or this one has given up."""
        if self._ended.is_set():
            raise CheckpointError(f"checkpoint folder {self._folder.location} was released; nothing is committed")
        if self._storage.put_if_absent(self._file, self._mine.to_bytes()):  # somebody has tidied up by hand
            return
        data = self._read()
        if data is not None and data != self._mine.to_bytes():
            raise CheckpointError(
                f"checkpoint folder {self._folder.location} was taken over by {Token.parse(data) or 'another job'}; "
                "this step is not committed"
            )

    def release(self) -> None:
        """Give the folder up, if it is still owned."""
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.release)
        if self._beating is not None:
            self._beating.join(BEAT_SECONDS)
        with contextlib.suppress(OSError, CheckpointError):
            self._storage.delete(self._beat_file(self._mine))
            if self._read() == self._mine.to_bytes():
                self._storage.delete(self._file)
        _let_go(self._mine.token)
