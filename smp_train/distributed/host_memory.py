"""How much memory of this host is still to be had: what the machine has free, and what its job may take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the host memory that is free or can be freed for this process, None where the system does not tell.

    A pod or a Slurm job may take less than what the machine has free: the limits are those of its control group and of
    all that this one is in. As the kernel does in ``MemAvailable``, files in the page cache count as free.
    """
    found = [free for free in (_of_machine(proc), *_of_groups(proc, cgroups)) if free is not None]
    return min(found, default=None)


def _of_machine(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int | None]:
    """Yield what each group that this process is in has left (https://docs.kernel.org/admin-guide/cgroup-v2.html)."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds and "memory" not in kinds.split(","):
            continue
        top = cgroups / "memory" if kinds else cgroups
        own = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, of which only the top is to be seen here.
        for group in (own, *own.parents):
            folder = top / group
            if kinds:
                yield _left(folder, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
            else:
                yield _left(folder, ("memory.max", "memory.high"), "memory.current", "")


def _left(folder: Path, limits: tuple[str, ...], usage: str, prefix: str) -> int | None:
    allowed = [limit for name in limits if (limit := _number(folder / name)) is not None]
    used = _number(folder / usage)
    if not allowed or used is None:
        return None
    cached = 0
    with contextlib.suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, size = line.partition(" ")
            if name in (f"{prefix}active_file", f"{prefix}inactive_file"):
                cached += int(size)
    return max(0, min(allowed) - used + cached)


def _number(file: Path) -> int | None:
    """Return what a file of a control group says; None where it is not there, or says ``max``: no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
