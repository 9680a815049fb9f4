"""Which storage a file is on, as the kernel's table of mounts says."""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

MOUNTS = "/proc/self/mountinfo"
LOCAL = frozenset({
    "bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "squashfs",
    "tmpfs", "xfs", "zfs",
})  # fmt: skip
"""File systems that no other machine writes to. Any other, known or not, may be shared."""


@lru_cache(maxsize=4)
def _mounts(table: str) -> list[tuple[str, str]]:
    """Return (mount point, kind of file system), the deepest first, and of one place the latest first."""
    try:
        lines = Path(table).read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        before, _, after = line.partition(b" - ")
        # A space in a path is written as \040.
        point = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), before.split(b" ")[4])
        found.append((os.fsdecode(point), after.split(b" ")[0].decode()))
    found.reverse()
    return sorted(found, key=lambda mount: -len(mount[0]))


def is_local(path: str) -> bool:
    """Tell whether a file is on a file system of this machine alone; False when nobody knows."""
    real = os.path.realpath(path)
    for point, kind in _mounts(MOUNTS):
        if real == point or real.startswith(point.rstrip("/") + "/"):
            return kind in LOCAL
    return False
