"""A file that is read by requests for ranges, and requests in threads, ahead of their consumer."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetched(work: Callable[[T], R], items: Iterable[T], at_once: int) -> Generator[R, None, None]:
    """Yield ``work(item)`` for each item, in order; at most ``at_once`` results are in work or waiting.

    Raises the errors of ``work``.
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
                future.cancel()


class RangeFile(io.RawIOBase):
    """A file in which every read is a new request, so that no connection idles between reads.

    Wrap it in `io.BufferedReader`, whose buffer size is then the size of a request.
    """

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        """``read(start, length)`` returns the bytes of a range of the file, which has ``size`` bytes."""
        self._size, self._read, self._position = size, read, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def readall(self) -> bytes:
        return self._next(self._size)

    def _next(self, most: int) -> bytes:
        start, length = self._position, max(0, min(most, self._size - self._position))
        self._position += length
        return self._read(start, length) if length else b""
