"""What a container keeps: folders that are mounted into it. The rest goes away with it, without a word."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")


def kept_by_nobody(folders: Sequence[str]) -> list[str]:
    """Return those of ``folders`` that lie on the root file system of this process, on no mount of their own."""
    points: list[str] = []
    with suppress(OSError):
        # proc(5): the fifth field is the mount point, a space in it written in octal.
        points = [line.split()[4].replace("\\040", " ") for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    mounted = [point.rstrip("/") + "/" for point in points if point != "/"]
    if "/" not in points:
        return []  # not to be told
    return [folder for folder in folders if not (os.path.realpath(folder) + "/").startswith(tuple(mounted))]
