"""Memory of this host: what is left of it for this process, and what page-locked buffers take of it."""

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


def pinned_bytes(size: int) -> int:
    """Return what a page-locked tensor of ``size`` bytes takes: the next power of two.

    So torch allocates them, by either of CUDA's calls (ATen/core/CachingHostAllocator.h, `allocate`), unless
    ``pinned_max_round_threshold_mb`` of PYTORCH_ALLOC_CONF leaves larger ones as they are.
    """
    return 1 << (size - 1).bit_length() if size else 0


def pinned_blocks(size: int) -> list[int]:
    """Return sizes that `pinned_bytes` leaves as they are: at most four, and in all at most an eighth above ``size``.

    Or 511 bytes above it, where that is more.
    """
    step = max(512, pinned_bytes(size + 1) // 16)
    rounded = -(-size // step) * step
    return [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]


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
