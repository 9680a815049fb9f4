"""Work that takes some ranks much longer than others, such as the conversion of terabytes on one rank.

A collective would time out, so ranks that have finished wait on the store where the ranks met, which has no time-out.
Each working rank writes its progress there. Rank 0 shows the sum, and ends the wait if a rank no longer reports.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from smp_train.distributed.agree import gather, is_alone, rank, unless, world_size
from smp_train.distributed.group import meeting
from smp_train.errors import LostPeerError
from smp_train.progress import Progress

T = TypeVar("T")

REPORT_SECONDS = 1.0
"""Interval at which a rank writes its progress and reads whether another rank has failed."""
LOST_SECONDS = 120.0
"""A rank that has not written for this long is lost."""

_calls = itertools.count()


class Interrupted(Exception):
    """Raised in a rank's work when another rank has failed."""


class _SharedProgress:
    """Progress and failures of all ranks, kept up to date by a thread in the body of its context."""

    def __init__(self, store: Any, progress: Progress, total: int) -> None:
        self._store, self._progress, self._total = store, progress, total
        self._done = self._sent = 0
        self._beats = dict.fromkeys(range(world_size()), (0, time.monotonic()))
        """Each rank's last beat, and when it came."""
        self.failed, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="smp-train-long-work", daemon=True)

    def __enter__(self) -> _SharedProgress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def report(self, done: int = 0) -> None:
        """Count progress. Raises `Interrupted` when another rank has failed."""
        self._done += done
        if self.failed.is_set():
            raise Interrupted

    def fail(self, lost: str = "") -> None:
        """Interrupt all ranks, because this rank has failed or because of a ``lost`` rank."""
        with suppress(RuntimeError):
            self._store.set("failed", lost)
        self.failed.set()

    def wait(self) -> None:
        """Return when all ranks have finished or one has failed. Raises `LostPeerError` if a rank is lost."""
        self._store.add("finished", 1)
        pause = 0.01
        while not self.failed.is_set() and self._store.add("finished", 0) < world_size():
            self.failed.wait(pause)
            pause = min(0.5, 1.5 * pause)
        if self._store.check(["failed"]) and (lost := self._store.get("failed").decode()):
            raise LostPeerError(lost)  # a collective would wait for the lost rank

    def _run(self) -> None:
        while not self._ended.wait(REPORT_SECONDS):
            # A slow store is asked again; if the store is gone, `wait` or the next collective fails.
            with suppress(RuntimeError):
                done = self._done
                total = self._store.add("done", done - self._sent)
                self._sent = done
                self._store.add(f"beat/{rank()}", 1)
                if rank() == 0:
                    self._progress.at(total, self._total)
                    self._look_for_lost_ranks(time.monotonic())
                if self._store.check(["failed"]):
                    self.failed.set()

    def _look_for_lost_ranks(self, now: float) -> None:
        for peer, (last_beat, since) in self._beats.items():
            beat = self._store.add(f"beat/{peer}", 0)
            if beat != last_beat:
                self._beats[peer] = beat, now
            elif now - since > LOST_SECONDS:
                self.fail(f"rank {peer} has not reported for {LOST_SECONDS:g} s, as seen on {socket.gethostname()}")


def finish_together(
    action: str, work: Callable[[Callable[[int], None]], T], *, progress: Progress, total: int = 0
) -> list[T]:
    """Run ``work`` on every rank, however long it takes, and return all results, by rank; collective.

    Args:
        action: for messages of failures, which reach all ranks within seconds, as in `gather`.
        work: called with a function to report progress: call it often with the units done since its last call. It
            raises an exception to end this rank's work when another rank has failed. The work holds no collective.
        progress: shows the units of all ranks, on rank 0.
        total: number of these units.
    """
    met = meeting()
    if is_alone() or world_size() == 1 or met is None:
        return gather(action, partial(work, progress.update))
    import torch.distributed as dist

    value: Any = None
    failure: Exception | None = None
    with _SharedProgress(dist.PrefixStore(f"long/{next(_calls)}", met.store), progress, total) as shared:
        try:
            value = work(shared.report)
        except Interrupted:
            pass
        except Exception as problem:
            failure = problem
            shared.fail()
        shared.wait()
    return gather(action, partial(unless, failure, value))
