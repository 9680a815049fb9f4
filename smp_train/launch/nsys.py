"""Nsight Systems records a node from cudaProfilerStart to cudaProfilerStop, which the training calls."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

from smp_train.errors import ConfigError


def recording(nsys: str, report: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs ``arguments`` under ``nsys`` and writes ``report``.nsys-rep."""
    return [
        nsys, "profile", "--trace", "cuda,nvtx", "--sample", "none", "--capture-range", "cudaProfilerApi",
        "--capture-range-end", "stop", "--force-overwrite", "true", "--output", report, *arguments,
    ]  # fmt: skip


def command(report: Path, arguments: Sequence[str]) -> list[str]:
    """Return the command that records ``arguments`` on this machine; `ConfigError` if nsys is not installed."""
    target = "target-linux-sbsa-armv8" if platform.machine() == "aarch64" else "target-linux-x64"
    nsys_dir = os.environ.get("NSYS_DIR") or "/fsx/nsight-efa"
    paths = ["nsys", f"{nsys_dir}/nsys", f"{nsys_dir}/{target}/nsys", "/usr/local/cuda/bin/nsys"]
    for nsys in filter(None, map(shutil.which, paths)):
        return recording(nsys, str(report), arguments)
    raise ConfigError(f"there is no nsys ({', '.join(paths)}); install Nsight Systems, or mount it into the container")
