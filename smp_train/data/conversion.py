"""Shards into caches: fetched, parsed in one process or several, and stopped when a peer has met a bad line."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TYPE_CHECKING

from smp_train.data import s3
from smp_train.data.progress import Progress
from smp_train.data.utils import Shard

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from smp_train.data.index import Caches

LOOK_SECONDS = 1.0
"""Between looks at whether a peer has failed."""
SLACK_SECONDS = 60.0
"""How much earlier than this rank a peer may have begun."""
WORTH_BYTES = 32 << 20
"""Below this, starting processes takes longer than they save."""


def processes_for(asked: int | None, ranks_here: int) -> int:
    """Return how many processes a rank converts with: as asked, or its part of the cores."""
    return max(1, asked if asked is not None else len(os.sched_getaffinity(0)) // ranks_here)


def run(
    caches: Caches,
    shards: list[Shard],
    *,
    peers: list[Shard],
    processes: int = 1,
    shown: bool = False,
    what: str = "token cache",
    at_once: int = s3.AT_ONCE,
    apart: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Convert the shards that have no cache; return how many.

    Args:
        caches: where to.
        shards: this rank's, in the order in which they are wanted.
        peers: all ranks'; a failure in any of them stops this.
        processes: to parse in.
        shown: draw a progress bar.
        what: to call it.
        at_once: objects of S3 to fetch meanwhile.
        apart: parse a lot in another process even when in one: this one has something better to do.
        stop: asked every second whether to give up.

    Raises:
        DataError: this rank's own, or the one that a peer has met.
        InterruptedError: asked to give up.
    """
    if not shards:
        return 0
    from smp_train.data.index import clock

    since = clock(caches.folder) - SLACK_SECONDS
    caches.forget_failures(shards)
    processes = min(processes, len(shards)) if sum(shard.size for shard in shards) >= WORTH_BYTES else 0
    with Progress(what, sum(shard.size for shard in shards), "B", shown) as progress:
        watch = _Watch(caches, peers, since, progress.update, stop)
        wanted = (shard for shard in shards if caches.find(shard) is None)
        coming: Iterator[tuple[Shard, str | None]] = ((shard, None) for shard in wanted)
        if s3.is_s3(shards[0].path):
            coming = s3.staged(wanted, caches.copies, at_once=at_once, stop=stop)
        if processes > 1 or (apart and processes):
            return _spread(caches, coming, processes, watch)
        return sum(_write(caches, shard, copy, watch) for shard, copy in coming)


class _Watch:
    """Counts progress, and every second looks whether a peer has failed."""

    def __init__(
        self,
        caches: Caches,
        peers: list[Shard],
        since: float,
        advance: Callable[[int], None],
        stop: Callable[[], bool],
    ) -> None:
        self.caches, self.peers, self.since, self.advance, self.stop = caches, peers, since, advance, stop
        self._due = time.monotonic() + LOOK_SECONDS

    def __call__(self, done: int) -> None:
        self.advance(done)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + LOOK_SECONDS
            if self.stop():
                raise InterruptedError
            self.caches.raise_failure(self.peers, self.since)


def _write(caches: Caches, shard: Shard, copy: str | None, tick: Callable[[int], None]) -> int:
    try:
        caches.write(shard, tick, copy)
    finally:
        if copy is not None:
            # Where no parsing is needed, the copy has become the cache.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy)
    return 1


def _spread(
    caches: Caches, coming: Iterator[tuple[Shard, str | None]], processes: int, watch: Callable[[int], None]
) -> int:
    """Deal shards to processes as they come; a failure of one is raised here, the others stop by the word it leaves."""
    done = 0
    assert isinstance(watch, _Watch)
    # Spawned: a fork would take a copy of a process that may hold CUDA, threads and locks.
    context = multiprocessing.get_context("spawn")
    given_up = context.Event()
    given = (caches, watch.peers, watch.since, given_up)
    with ProcessPoolExecutor(processes, context, initializer=_start, initargs=given) as pool:
        pending: dict[Future[int], Shard] = {}
        try:
            for shard, copy in coming:
                pending[pool.submit(_work, shard, copy)] = shard
                while len(pending) > processes:
                    done += _collect(pending, watch)
            while pending:
                done += _collect(pending, watch)
        except BaseException:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done


def _collect(pending: dict[Future[int], Shard], watch: Callable[[int], None]) -> int:
    finished, _ = wait(pending, timeout=LOOK_SECONDS, return_when=FIRST_COMPLETED)
    done = 0
    for future in finished:
        shard = pending.pop(future)
        done += future.result()
        watch(shard.size)
    watch(0)
    return done


_worker: list[tuple[Caches, _Watch]] = []


def _start(caches: Caches, peers: list[Shard], since: float, given_up: Event) -> None:
    """Set a process up: it holds the caches, and ends with its parent."""
    _worker.append((caches, _Watch(caches, peers, since, lambda done: None, given_up.is_set)))
    follow_parent()


def follow_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(shard: Shard, copy: str | None) -> int:
    caches, watch = _worker[0]
    return _write(caches, shard, copy, watch)
