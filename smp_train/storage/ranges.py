"""A seekable file whose reads are requests for ranges."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


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

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._size - self._position))
        if length:
            view[:length] = self._read(self._position, length)
            self._position += length
        return length

    def readall(self) -> bytes:
        start, self._position = self._position, max(self._position, self._size)
        return self._read(start, self._size - start) if start < self._size else b""
