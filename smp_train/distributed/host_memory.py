"""The host memory that is free for this process, and the memory of page-locked buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def free_host_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Return the bytes of host memory that this process can get; None if the system does not report them.

    The control groups of a pod or a Slurm job may allow less than the machine has free. As in the kernel's
    ``MemAvailable``, files in the page cache count as free.
    """
    limits = [free for free in (_free_on_machine(proc), *_free_in_groups(proc, cgroups)) if free is not None]
    return min(limits, default=None)


def pinned_bytes(size: int) -> int:
    """Return the bytes that torch allocates for a page-locked tensor of ``size`` bytes: the next power of two.

    See ATen/core/CachingHostAllocator.h, `allocate`. ``pinned_max_round_threshold_mb`` in PYTORCH_ALLOC_CONF exempts
    larger tensors.
    """
    return 1 << (size - 1).bit_length() if size else 0


def pinned_blocks(size: int) -> list[int]:
    """Return at most four powers of two, which `pinned_bytes` does not round up, with a sum of at least ``size``.

    The sum exceeds ``size`` by at most an eighth, or by 511 bytes if that is more.
    """
    step = max(512, pinned_bytes(size + 1) // 16)
    rounded = -(-size // step) * step
    return [1 << bit for bit in reversed(range(rounded.bit_length())) if rounded >> bit & 1]


def _free_on_machine(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _free_in_groups(proc: Path, cgroups: Path) -> Iterator[int | None]:
    """Yield the bytes that each control group of this process has left, for versions 1 and 2 of control groups.

    See https://docs.kernel.org/admin-guide/cgroup-v2.html.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds and "memory" not in kinds.split(","):
            continue
        top = cgroups / "memory" if kinds else cgroups
        innermost = PurePosixPath(path.lstrip("/"))
        # In a container the path may be the host's, and only its top folder visible.
        for group in (innermost, *innermost.parents):
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
    """Return the number in a control group's file; None if the file is missing or has ``max``, which is no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
