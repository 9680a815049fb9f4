"""Folders that end with the container: only what is mounted into it is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from smp_train.arguments.training_flags import NODE_LOCAL
from smp_train.errors import ConfigError

MOUNTS = Path("/proc/self/mountinfo")


def refuse_lost(folders: Sequence[str]) -> None:
    """Refuse folders of checkpoints on the root file system of the container that this process runs in."""
    points: list[str] = []
    with suppress(OSError):
        # proc(5): the fifth field is the mount point, a space in it written in octal.
        points = [line.split()[4].replace("\\040", " ") for line in MOUNTS.read_text(encoding="utf-8").splitlines()]
    if "/" not in points:
        return  # unknown
    mounted = tuple(point.rstrip("/") + "/" for point in points if point != "/")
    for folder in folders:
        elsewhere = "://" in folder or folder.startswith(NODE_LOCAL)
        if not elsewhere and not (os.path.realpath(folder) + "/").startswith(mounted):
            raise ConfigError(
                f"--checkpoint_dir {folder} is in the container alone, and its checkpoints are lost with it; give a "
                "folder on a file system that all nodes mount (FSX_MOUNT of the scripts, --mounts)"
            )
