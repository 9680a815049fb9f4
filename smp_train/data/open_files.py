"""How many files stay open: opening one for each row would cost more than reading it."""

from __future__ import annotations

import contextlib
import resource
import threading
from collections import OrderedDict
from typing import Protocol

RESERVED = 512
"""Descriptors left to the rest of the process: sockets, libraries, checkpoints."""


class File(Protocol):
    """What can be open."""

    def open(self) -> None:
        """Open it, if it is not."""

    def close(self) -> None:
        """Close it; it can be opened again."""


class _Count:
    """How many files all data sets of this process keep open."""

    def __init__(self) -> None:
        self.kept = 0
        self.lock = threading.Lock()

    def take(self, more: int) -> bool:
        """Count one file more if the system allows it; ``more`` are wanted in the long run.

        The soft limit of descriptors (RLIMIT_NOFILE) is raised for them as far as the hard one allows.
        """
        with self.lock:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != resource.RLIM_INFINITY and soft < self.kept + more + RESERVED:
                raised = self.kept + more + RESERVED
                with contextlib.suppress(OSError, ValueError):
                    raised = raised if hard == resource.RLIM_INFINITY else min(raised, hard)
                    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
                    soft = raised
            # Where the limit is below what is reserved, half of it.
            free = soft == resource.RLIM_INFINITY or self.kept < max(soft - RESERVED, soft // 2)
            self.kept += free
            return free

    def give_back(self) -> None:
        with self.lock:
            self.kept -= 1


_count = _Count()


class OpenFiles:
    """Keeps the files of one data set open, all of them where the system allows that, else those used last.

    Args:
        most: so many files there are.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: OrderedDict[int, File] = OrderedDict()
        self._full = False

    def use(self, file: File) -> None:
        """Open a file if it is not, closing the one not used for longest when there are too many."""
        key = id(file)
        if key in self._open:
            if self._full:
                self._open.move_to_end(key)
            return
        while not _count.take(self._most - len(self._open)):
            self._full = True
            if not self._open:
                # One at least for every data set.
                _count.kept += 1
                break
            self._close_oldest()
        try:
            file.open()
        except BaseException:
            _count.give_back()
            raise
        self._open[key] = file

    def _close_oldest(self) -> None:
        self._open.popitem(last=False)[1].close()
        _count.give_back()

    def drop(self, file: File) -> None:
        """Close one of them."""
        if self._open.pop(id(file), None) is not None:
            file.close()
            _count.give_back()

    def close(self) -> None:
        """Close all."""
        while self._open:
            self._close_oldest()

    __del__ = close
