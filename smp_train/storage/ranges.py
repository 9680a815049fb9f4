"""What is read by ranges, as a file that can seek."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class RangeFile(io.RawIOBase):
    """A file of which every read is a request of its own, so that none waits on an idle connection.

    Read it through `io.BufferedReader`, whose buffer is then the size of a request.

    Args:
        size: bytes of it.
        read: called with (start, length): returns these bytes.
        rest: called with a start: returns all from there on; None where `read` does for that too.
    """

    def __init__(
        self, size: int, read: Callable[[int, int], bytes], rest: Callable[[int], bytes] | None = None
    ) -> None:
        self._size, self._read, self._rest = size, read, rest
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; nothing is requested by that."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill as much of a buffer as there is left."""
        view = memoryview(buffer).cast("B")
        length = max(0, min(len(view), self._size - self._at))
        if length:
            view[:length] = self._read(self._at, length)
            self._at += length
        return length

    def readall(self) -> bytes:
        """Return what is left."""
        if self._rest is None:
            return super().readall() or b""
        found = self._rest(self._at)
        self._at = max(self._at, self._size)
        return found
