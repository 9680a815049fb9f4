"""A limit on the time and memory that a piece of Python code may take, such as the rendering of a chat template."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

CHECK_SECONDS = 0.1
DELIVERY_SECONDS = 1.0


class LimitExceeded(Exception):
    """The code took too much time or memory."""


@dataclass
class _Run:
    """A running piece of code."""

    clock: int
    cpu_limit: float
    memory_limit: int
    resident_limit: int = 0
    """Set at the first check: reading the resident memory takes longer than most runs."""
    stopped: bool = False

    def exceeds(self) -> bool:
        self.resident_limit = self.resident_limit or _resident_bytes() + self.memory_limit
        return time.clock_gettime(self.clock) > self.cpu_limit or _resident_bytes() > self.resident_limit


_lock = threading.Lock()
_runs: dict[int, _Run] = {}
"""By the thread."""
_active = threading.Event()
_watchdogs: dict[int, threading.Thread] = {}
"""By the process: a forked child starts its own."""


@contextmanager
def limited(seconds: float, memory: int) -> Iterator[None]:
    """Raise `LimitExceeded` where the body takes more CPU seconds, or lets the process grow by more bytes of memory.

    The exception interrupts Python code; a single long operation, such as 10 ** 10 ** 9, is not interrupted.
    """
    thread = threading.get_ident()
    thread_clock: Any = getattr(time, "pthread_getcpuclockid", lambda _: time.CLOCK_MONOTONIC)
    clock = thread_clock(thread)
    run = _Run(clock, time.clock_gettime(clock) + seconds, memory)
    with _lock:
        _runs[thread] = run
        if os.getpid() not in _watchdogs:
            _watchdogs[os.getpid()] = threading.Thread(target=_watch, name="time-limit", daemon=True)
            _watchdogs[os.getpid()].start()
    _active.set()
    raised = False
    try:
        yield
    except LimitExceeded:
        raised = True
        raise
    finally:
        with _lock:
            del _runs[thread]
        # The exception is delivered some instructions later: wait for it here rather than let it hit the caller.
        with suppress(LimitExceeded):
            if run.stopped and not raised:
                end = time.monotonic() + DELIVERY_SECONDS
                while time.monotonic() < end:
                    time.sleep(0.001)


def _watch() -> None:
    while True:
        _active.wait()
        time.sleep(CHECK_SECONDS)
        with _lock:
            if not _runs:
                _active.clear()
            for thread, run in _runs.items():
                if not run.stopped and run.exceeds():
                    run.stopped = True
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(LimitExceeded))


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not report it."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
