"""Work on items ahead of whoever takes the results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetched(
    work: Callable[[T], R], items: Iterable[T], at_once: int, discard: Callable[[R], object] = lambda result: None
) -> Generator[R, None, None]:
    """Yield ``work(item)`` in the order of the items, at most ``at_once`` being worked on or waiting to be taken.

    When the iterator is closed, those that nobody has taken go to ``discard``. Raises what ``work`` raised.
    """
    waiting: deque[Future[R]] = deque()
    coming = iter(items)
    with ThreadPoolExecutor(at_once, thread_name_prefix="smp-train-s3") as pool:
        try:
            while True:
                for item in coming:
                    waiting.append(pool.submit(work, item))
                    if len(waiting) >= at_once:
                        break
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                if not future.cancel() and future.exception() is None:
                    discard(future.result())
