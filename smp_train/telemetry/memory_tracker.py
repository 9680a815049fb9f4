"""Memory use in GiB, for the log line and for the table of ``--enable_memory_profiling``."""

from __future__ import annotations

import logging
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from smp_train.distributed import ALL_RANKS, heartbeat
from smp_train.distributed.host_memory import free_host_bytes

_GIB = 1024**3
FIRST_STEPS = 3
"""Steps after each start whose phases get a row; every save and validation gets one."""
HISTORY = 100_000
"""A snapshot keeps the stacks of at most this many allocations and releases."""

log = logging.getLogger("smp_train.memory")


class MemoryRows:
    """The table of ``--enable_memory_profiling``: the memory in use at the end of each phase."""

    def __init__(self, device: torch.device, folder: Path, rank: int, *, on: bool) -> None:
        """Log rows until the heartbeat ends, if ``on``, and write a snapshot of the first steps to ``folder``.

        The allocator then records the stack of every allocation. Not collective.
        """
        self._device, self._on, self._phase, self._steps = device, on, heartbeat.START, 0
        self._folder, self._rank = folder, rank
        if not on:
            return
        self.row("before the model")
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=HISTORY)
        heartbeat.listeners.append(self.mark)

    def row(self, title: str) -> None:
        """Log the memory in use now."""
        if self._on:
            log.info(memory_report(self._device, title))

    def mark(self, phase: int) -> None:
        """Log the row of the phase that ends as ``phase`` begins."""
        ended, self._phase = self._phase, phase
        self._steps += ended == heartbeat.DATA
        in_a_step = ended in heartbeat.IN_A_STEP
        if phase != ended and (not in_a_step or self._steps <= FIRST_STEPS):
            step = f"step {self._steps} of this start, " if in_a_step else ""
            self.row(f"{step}{heartbeat.PHASES[ended]}")
        if ended == heartbeat.DATA and self._steps == FIRST_STEPS + 1:
            dump(self._folder, self._rank)


def dump(folder: Path, rank: int) -> None:
    """Write a snapshot of the GPU's allocator and log its path; do nothing without a GPU."""
    path = folder / f"memory-rank{rank}.pickle"
    with suppress(Exception):  # a failed snapshot must not end the run or hide its error
        if torch.cuda.is_available():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
            log.warning("memory snapshot for https://pytorch.org/memory_viz: %s", path, extra=ALL_RANKS)


def memory_gib(device: torch.device) -> float:
    """Return a GPU allocator's peak since the last call and reset it; on a CPU, return the resident memory."""
    if device.type != "cuda":
        return rss_gib()
    peak = torch.cuda.max_memory_allocated(device) / _GIB
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def memory_report(device: torch.device, title: str) -> str:
    """Return one row of the memory table, of constant width.

    ``peak`` is the allocator's peak since the last `memory_gib`. Without a GPU the device's columns are empty. The
    allocator's statistics are on the host, so the device is not synchronized.
    """
    used: list[float | None] = [None, None, None]
    if device.type == "cuda":
        counts = (torch.cuda.memory_allocated, torch.cuda.memory_reserved, torch.cuda.max_memory_allocated)
        used = [count(device) / _GIB for count in counts]
    free = free_host_bytes()
    names = ("allocated", "reserved", "peak", "cpu rss", "cpu available")
    columns = zip(names, [*used, rss_gib(), None if free is None else free / _GIB], strict=True)
    cells = (f"{name} {'-' if value is None else format(value, '.2f'):>8}" for name, value in columns)
    return " | ".join([f"memory GiB | {title:<44}", *cells])


def rss_gib() -> float:
    """Return the resident memory of this process; without ``/proc``, its peak."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / _GIB
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / _GIB
