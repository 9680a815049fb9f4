"""A limit on the time and memory that a piece of Python code may take, such as the rendering of a chat template."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

CHECK_SECONDS = 0.1
DELIVERY_SECONDS = 1.0


class LimitExceeded(Exception):
    """The code took too much time or memory."""


@contextmanager
def limited(seconds: float, memory: int) -> Iterator[Callable[[], None]]:
    """Raise `LimitExceeded` where the body takes more CPU seconds, or lets the process grow by more bytes of memory.

    Yields a function that starts the count anew. The exception interrupts Python code, but not a single long
    operation, such as 10 ** 10 ** 9.
    """
    body, done, stopped = threading.get_ident(), threading.Event(), threading.Event()
    thread_clock: Any = getattr(time, "pthread_getcpuclockid", lambda _: time.CLOCK_MONOTONIC)
    clock = thread_clock(body)
    end, most = time.clock_gettime(clock) + seconds, 0

    def renew() -> None:
        nonlocal end, most
        end, most = time.clock_gettime(clock) + seconds, 0

    def watch() -> None:
        nonlocal most
        while not done.wait(CHECK_SECONDS):
            most = most or _resident_bytes() + memory
            if time.clock_gettime(clock) > end or _resident_bytes() > most:
                stopped.set()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(body), ctypes.py_object(LimitExceeded))
                return

    watchdog = threading.Thread(target=watch, name="time-limit", daemon=True)
    watchdog.start()
    try:
        yield renew
    except LimitExceeded:
        stopped.clear()
        raise
    finally:
        done.set()
        # An exception set just before the end of the body is delivered in this wait, rather than to the caller.
        with suppress(LimitExceeded):
            watchdog.join()
            if stopped.is_set():
                time.sleep(DELIVERY_SECONDS)


def _resident_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not report it."""
    with suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
