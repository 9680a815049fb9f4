"""Shards into token files: fetched from S3, then parsed in this process or several."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import TYPE_CHECKING

from smp_train.data import s3
from smp_train.data.shard import Shard
from smp_train.data.token_cache import Destination
from smp_train.distributed.host import cores
from smp_train.progress import Progress

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

Group = list[tuple[Shard, str | None]]
"""Shards of one token file, each with its local copy where it is in S3."""
WAIT_SECONDS = 1.0
"""Seconds between checks whether the conversion is to stop."""
FILE_BYTES = 64 << 20
"""Bytes of shards in one token file, which is synced at once; a kill loses at most this much work."""
WORTH_BYTES = 32 << 20
"""Below this, starting processes takes longer than they save."""


def processes_for(asked: int | None, ranks_here: int) -> int:
    """Return how many processes a rank converts with: as asked, or its part of the cores."""
    return max(1, asked if asked is not None else cores() // ranks_here)


def convert(
    to: Destination, shards: list[Shard], *, processes: int = 1, shown: bool = False, what: str = "token cache",
    file_bytes: int = FILE_BYTES, copies: str | None = None, at_once: int = s3.AT_ONCE, apart: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Generator[int, None, None]:  # fmt: skip
    """Convert shards, yielding now and then how many were done since; close it to give up.

    Args:
        to: where to.
        shards: in the order in which they are wanted.
        processes: to parse in.
        shown: draw a progress bar.
        what: to call it.
        file_bytes: shards share a token file up to so many bytes; 0: none does.
        copies: folder for objects of S3 on their way; default: that of ``to``.
        at_once: objects of S3 to fetch meanwhile.
        apart: parse much data in another process even where ``processes`` is 1, so that this one stays free.
        stop: asked often whether to give up.

    Raises DataError at the first malformed line, and InterruptedError when ``stop`` says so.
    """
    total = sum(shard.size for shard in shards)
    with Progress(what, total, "B", shown) as progress:
        coming: Iterator[tuple[Shard, str | None]] = ((shard, None) for shard in shards)
        if shards and s3.is_s3(shards[0].path):
            coming = s3.staged(shards, copies or to.folder, at_once=at_once, stop=stop)
        groups = _grouped(coming, file_bytes)
        if (processes > 1 or apart) and total >= WORTH_BYTES:
            yield from _in_processes(to, groups, min(processes, len(shards)), progress.update, stop)
            return

        def tick(done: int) -> None:
            progress.update(done)
            if stop():
                raise InterruptedError

        for group in groups:
            yield _write(to, group, tick)


def _grouped(coming: Iterator[tuple[Shard, str | None]], file_bytes: int) -> Iterator[Group]:
    """Put shards together up to ``file_bytes``."""
    group: Group = []
    size = 0
    try:
        for shard, copy in coming:
            group.append((shard, copy))
            size += shard.size
            if size >= file_bytes:
                yield group
                group, size = [], 0
        if group:
            yield group
            group = []
    finally:
        _remove_copies(group)


def _remove_copies(group: Group) -> None:
    for _, copy in group:
        if copy is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(copy)


def _write(to: Destination, group: Group, tick: Callable[[int], None]) -> int:
    try:
        to.write(group, tick)
    finally:
        _remove_copies(group)
    return len(group)


def _in_processes(
    to: Destination, groups: Iterator[Group], processes: int, update: Callable[[int], None], stop: Callable[[], bool]
) -> Generator[int, None, None]:
    # Spawned: a fork would take a copy of a process that may hold CUDA, threads and locks.
    context = multiprocessing.get_context("spawn")
    given_up = context.Event()
    pending: dict[Future[int], Group] = {}

    def collect(most: int) -> Generator[int, None, None]:
        while len(pending) > most:
            finished, _ = wait(pending, timeout=WAIT_SECONDS, return_when=FIRST_COMPLETED)
            if stop():
                raise InterruptedError
            for future in finished:
                done = future.result()
                update(sum(shard.size for shard, _ in pending.pop(future)))
                yield done
            yield 0

    with ProcessPoolExecutor(processes, context, initializer=_start, initargs=(to, given_up)) as pool:
        try:
            for group in groups:
                pending[pool.submit(_work, group)] = group
                yield from collect(processes)
            yield from collect(0)
        except BaseException:
            given_up.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for group in pending.values():
                _remove_copies(group)
            raise


_worker: list[tuple[Destination, Event]] = []
"""Of a process that converts: where to, and what is set when it is to stop."""


def _start(to: Destination, given_up: Event) -> None:
    """Set a process up that converts."""
    _worker.append((to, given_up))
    follow_parent()


def _work(group: Group) -> int:
    to, given_up = _worker[0]

    def tick(_: int) -> None:
        if given_up.is_set():
            raise InterruptedError

    return _write(to, group, tick)


def follow_parent() -> None:
    """Let this process end when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
