"""Work on coming items in threads, ahead of the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetched(
    work: Callable[[T], R], items: Iterable[T], at_once: int, discard: Callable[[R], object] = lambda result: None
) -> Generator[R, None, None]:
    """Yield ``work(item)`` for each item, in order; at most ``at_once`` results are in work or waiting.

    If the generator is closed early, ``discard`` gets the remaining results. Raises the errors of ``work``.
    """
    waiting: deque[Future[R]] = deque()
    coming = iter(items)
    with ThreadPoolExecutor(at_once, thread_name_prefix="smp-train-s3") as pool:
        try:
            while True:
                waiting.extend(pool.submit(work, item) for item in islice(coming, at_once - len(waiting)))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                if not future.cancel() and future.exception() is None:
                    discard(future.result())
