"""Work that takes some ranks much longer than others: ranks that have finished wait on the store, not in a collective.

A collective has a time-out, which a conversion of terabytes on one rank would exceed. The store where the ranks met has
none. While it works, each rank counts its progress there; rank 0 logs the sum, and ends the wait when a rank no longer
reports.
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
"""Interval at which a rank reports progress and looks for failures."""
LOST_SECONDS = 120.0
"""A rank that has not reported for this long is lost."""

_calls = itertools.count()


class Interrupted(Exception):
    """Raised in a rank's work when another rank has failed."""


class _Watch:
    """Progress and failures of all ranks in the store; a thread keeps them up to date."""

    def __init__(self, store: Any, progress: Progress, total: int) -> None:
        self._store, self._progress, self._total = store, progress, total
        self._done = self._sent = 0
        self._ended = threading.Event()
        self.failed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smp-train-long-work", daemon=True)
        self._beats: dict[int, tuple[bytes, float]] = {}

    def __enter__(self) -> _Watch:
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

    def fail(self, reason: str) -> None:
        """Tell every rank that this rank has failed; an empty reason is one that `gather` reports."""
        with suppress(RuntimeError):
            self._store.set("failed", reason)
        self.failed.set()

    def wait(self) -> None:
        """Return when all ranks have finished, or one has failed. Raises `LostPeerError` when one is lost."""
        self._store.add("finished", 1)
        pause = 0.01
        while not self.failed.is_set() and self._store.add("finished", 0) < world_size():
            self.failed.wait(pause)
            pause = min(0.5, 1.5 * pause)

    def raise_lost(self) -> None:
        """Raise `LostPeerError` where a rank is lost: collectives would wait for that rank."""
        reason = self._store.get("failed").decode() if self._store.check(["failed"]) else ""
        if reason:
            raise LostPeerError(reason)

    def _run(self) -> None:
        while not self._ended.wait(REPORT_SECONDS):
            # A slow store is asked again; a dead one fails in `wait`, or in the next collective.
            with suppress(RuntimeError):
                done = self._done
                total = self._store.add("done", done - self._sent)
                self._sent = done
                self._store.add(f"beat/{rank()}", 1)
                if rank() == 0:
                    self._progress.at(total, self._total)
                    self._look_for_lost_ranks()
                if self._store.check(["failed"]):
                    self.failed.set()

    def _look_for_lost_ranks(self) -> None:
        now = time.monotonic()
        for peer in range(world_size()):
            beat = self._store.get(f"beat/{peer}") if self._store.check([f"beat/{peer}"]) else b""
            last, since = self._beats.get(peer, (None, now))
            self._beats[peer] = (beat, now if beat != last else since)
            if now - self._beats[peer][1] > LOST_SECONDS:
                self.fail(f"rank {peer} has not reported for {LOST_SECONDS:g} s, as seen on {socket.gethostname()}")


def finish_together(
    what: str, work: Callable[[Callable[[int], None]], T], *, progress: Progress, total: int = 0
) -> list[T]:
    """Run ``work`` on every rank, however long it takes, and return what each rank returned; collective.

    Args:
        what: for messages of failures, as in `gather`.
        work: called with a function to report progress: call it often with the units done since its last call. It
            raises an exception to end this rank's work when another rank has failed. The work holds no collective.
        progress: shows the units of all ranks, on rank 0.
        total: number of these units.

    A failure on one rank is a failure on all within seconds, as in `gather`.
    """
    met = meeting()
    if is_alone() or world_size() == 1 or met is None:
        return gather(what, partial(work, progress.update))
    import torch.distributed as dist

    store = dist.PrefixStore(f"long/{next(_calls)}", met.store)
    value: Any = None
    failure: Exception | None = None
    with _Watch(store, progress, total) as watch:
        try:
            value = work(watch.report)
        except Interrupted:
            pass
        except Exception as problem:
            failure = problem
            watch.fail("")
        watch.wait()
    watch.raise_lost()
    return gather(what, partial(unless, failure, value))
