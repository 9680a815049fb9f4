"""One job at a time writes a run's checkpoints: the job that claimed the highest generation.

Each start of a job claims a generation, one above the highest in the run's folders, by a file ``.owner-<generation>``
that no other job overwrites. The highest claim owns the run. The owner lists the claims before and after it puts
COMMITTED, so a job learns that another overtook it. An overtaken job's late commit stays, since a checkpoint of an
older generation never counts as the newest. Only if the attempt was swept does its writer withdraw COMMITTED.

A second job is refused while the owner lives. On the owner's machine the kernel knows whether the owner's process
lives. On other machines the claim's age decides, as the owner touches its claim every few seconds. The storage's clock
measures the age, so machines' clocks need not agree. A restart of the owner's own job takes over at once.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from smp_train.checkpoints.folder import Committed, RunFolder
from smp_train.distributed.job import Job, identity, is_alive
from smp_train.errors import CheckpointError

logger = logging.getLogger(__name__)

CLAIM = re.compile(r"\.owner-(\d+)")
claim_file = ".owner-{}".format
"""The name of a generation's claim file."""
BEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
"""An owner on another machine counts as dead after this time without a sign of life."""
POLL_SECONDS = 1.0
ADVICE = "give another --run_name or --checkpoint_dir, or stop that job, or force it with --break_checkpoint_lock 1"


class InUse(CheckpointError):
    """Another job owns the run."""


@dataclass(frozen=True)
class Claim:
    """The content of a claim file: the job that owns a generation.

    Attributes:
        token: random digits that no other claim has.
        began: first generation of this job; restarts of the job claim higher generations.
        process: `identity` of the process that made the claim.
        released: whether the job has ended normally.
    """

    generation: int
    token: str
    began: int
    job: Job
    process: str
    host: str
    since: str
    released: bool = False

    @classmethod
    def fresh(cls, generation: int, job: Job, began: int) -> Claim:
        """Return a new claim of this process."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        token, process = uuid.uuid4().hex, identity(os.getpid())
        return cls(generation, token, began, job, process, socket.gethostname(), since)

    @classmethod
    def parse(cls, data: bytes | None) -> Claim | None:
        """Return the claim in a claim file's content, or None if it cannot be parsed."""
        try:
            content = json.loads(data or b"")
            return cls(**{**content, "job": Job.from_json(content["job"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None

    def to_bytes(self) -> bytes:
        """Return the content of the claim file."""
        return (json.dumps(asdict(self)) + "\n").encode()

    @property
    def file(self) -> str:
        """Name of the claim file."""
        return claim_file(self.generation)

    def __str__(self) -> str:
        return f"{self.job.name or 'a job'} on {self.host} (process {self.process.split()[1]}, since {self.since})"


def newest_claim(folder: RunFolder) -> tuple[int, Claim | None]:
    """Return the highest generation claimed in a folder (0 if none is) and its claim (None if it cannot be read)."""
    generation = max(claims_in(folder), default=0)
    data = folder.storage.read_if_there(claim_file(generation)) if generation else None
    return generation, Claim.parse(data)


def claims_in(folder: RunFolder) -> list[int]:
    """Return the generations that are claimed in a folder."""
    return [int(match[1]) for match in map(CLAIM.fullmatch, folder.storage.level()[0]) if match]


def _holds(folder: RunFolder, claim: Claim) -> bool:
    """Return whether the file of a claim is in a folder, and no other job has overwritten it."""
    present = Claim.parse(folder.storage.read_if_there(claim.file))
    return present is not None and present.token == claim.token


def owner_of(folders: Sequence[RunFolder]) -> Claim | None:
    """Return the newest readable claim in a run's folders."""
    claims = [claim for _, claim in map(newest_claim, folders) if claim is not None]
    return max(claims, key=lambda claim: claim.generation, default=None)


def look_at_owner(folder: RunFolder, job: Job) -> tuple[Claim | None, bool | None, float, float]:
    """Return a folder's newest claim, whether its owner keeps ``job`` out, and the claim's last change: time and age.

    The second value is None if it is not known, for example if the owner is on another machine and may still live.
    """
    generation, owner = newest_claim(folder)
    if not generation or (owner is not None and (owner.released or job.is_restart_of(owner.job))):
        return owner, False, 0.0, 0.0
    entry, now = folder.storage.entry(claim_file(generation)), folder.storage.now()
    touched = now - STALE_SECONDS if entry is None else entry.modified
    alive = None if owner is None else is_alive(owner.process)
    return owner, False if alive is None and now - touched >= STALE_SECONDS else alive, touched, now - touched


class Ownership:
    """Ownership of one run's checkpoints in all its folders, from `acquire` until `release` or the process' end."""

    def __init__(self, folders: Sequence[RunFolder], job: Job | None = None, advice: str = ADVICE) -> None:
        """``advice`` is the remedy in the message if another job owns the run."""
        self.folders, self.job, self._advice = folders, job or Job.current(), advice
        self.restarted = False
        """Whether the former owner was an earlier start of this job."""
        self.committed: list[list[Committed]] = []
        """The committed checkpoints of each folder at the time of `acquire`, newest first."""
        self._claim: Any = None
        """The `Claim`; None before `acquire`."""
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="smp-train-owner", daemon=True)

    @property
    def generation(self) -> int:
        """The claimed generation."""
        return int(self._claim.generation)

    @property
    def began(self) -> int:
        """The first generation of this job."""
        return int(self._claim.began)

    def acquire(self, *, force: bool = False, above: int = 0) -> None:
        """Claim the next generation: replace a dead owner at once, and a silent owner after `STALE_SECONDS`.

        ``force`` replaces any owner, whose later commits then fail. The generation is higher than ``above``. Raises
        `InUse`, which names the owner, if the owner lives.
        """
        while True:
            # Read the generations first, then the owner: if another job claims in between, this job's claim fails.
            known = [generation for folder in self.folders for generation in claims_in(folder)]
            self._wait_for_owner(force)
            former = owner_of(self.folders)
            self.restarted = former is not None and self.job.is_restart_of(former.job)
            generation = max([above, *known]) + 1
            began = former.began if former is not None and self.restarted else generation
            if self._put(Claim.fresh(generation, self.job, began)):
                break
        self.committed = [folder.committed() for folder in self.folders]
        newest = max((checkpoints[0].generation for checkpoints in self.committed if checkpoints), default=0)
        if newest >= self.generation:  # claims have been lost, for example in a copy without hidden files
            self._advance(newest + 1, self.began if self.restarted else newest + 1)
        if former is not None and not former.released:
            logger.warning("%s: took over from %s", self.folders[0].location, former)
        self._beating.start()
        atexit.register(self.release)

    def _put(self, claim: Claim) -> bool:
        """Put a claim into all folders; withdraw it and return False if another job was faster."""
        for folder in self.folders:
            folder.storage.put_if_absent(claim.file, claim.to_bytes())
            # Read the claim back: a server may ignore "if absent", and a network file system may lose the first answer.
            newest = newest_claim(folder)[1]
            if newest is None or newest.token != claim.token:
                for claimed in self.folders:
                    if _holds(claimed, claim):
                        claimed.storage.delete(claim.file)
                return False
        self._claim = claim
        for folder in self.folders:
            for generation in claims_in(folder):
                if generation < claim.generation:
                    folder.storage.delete(claim_file(generation))
        return True

    def advance(self) -> int:
        """Claim and return the next generation of this job. Raises `CheckpointError` if another job has taken over."""
        self.check()
        self._advance(self.generation + 1, self.began)
        return self.generation

    def _advance(self, generation: int, began: int) -> None:
        if not self._put(replace(self._claim, generation=generation, began=began)):
            raise CheckpointError(f"checkpoint folder {self.folders[0].location} was taken over by another job")

    def _wait_for_owner(self, force: bool) -> None:
        """Wait until a silent owner counts as dead; raise `InUse` if the owner lives. ``force`` returns at once."""
        for folder in self.folders:
            last_touched: float | None = None
            while not force:
                owner, alive, touched, age = look_at_owner(folder, self.job)
                if alive is False:
                    break
                if alive or (last_touched is not None and touched > last_touched):
                    raise InUse(
                        f"checkpoint folder {folder.location} is in use by {owner or 'an unknown job'}; {self._advice}"
                    )
                if last_touched is None:
                    logger.warning(
                        "%s was in use by %s %.0f s ago; waiting up to %.0f s to see whether it still is",
                        folder.location, owner or "an unknown job", age, STALE_SECONDS - age,
                    )  # fmt: skip
                last_touched = touched
                time.sleep(POLL_SECONDS)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # A failure here either shows up in `check` or does not matter.
            with contextlib.suppress(OSError, CheckpointError):
                self._touch()

    def _touch(self) -> None:
        """Rewrite the claim in the folders that still have it, so that its age is 0 again."""
        claim: Claim = self._claim
        for folder in self.folders:
            if _holds(folder, claim):
                folder.storage.put(claim.file, claim.to_bytes())

    def check(self) -> None:
        """Raise `CheckpointError` if another job has taken over, or if this job has released the run."""
        for folder in self.folders:
            if self._ended.is_set():
                raise CheckpointError(f"checkpoint folder {folder.location} was released; nothing is committed")
            generation, owner = newest_claim(folder)
            if not generation:  # somebody has deleted the claims by hand
                folder.storage.put(self._claim.file, self._claim.to_bytes())
            elif generation > self.generation or (owner is not None and owner.token != self._claim.token):
                raise CheckpointError(
                    f"checkpoint folder {folder.location} was taken over by {owner or 'another job'}; "
                    "this step does not count"
                )

    def release(self) -> None:
        """Give up the run, if this job still owns it. The claim file stays, so that the next generation is higher."""
        if self._claim is None or self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self.release)
        self._beating.join(BEAT_SECONDS)
        self._claim = replace(self._claim, released=True)
        with contextlib.suppress(OSError, CheckpointError):
            self._touch()
