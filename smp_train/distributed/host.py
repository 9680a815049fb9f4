"""What a process asks of its host before torch is used: releases, limits, allocators; a C compiler. No torch."""

from __future__ import annotations

import importlib.metadata
import os
import random
import resource
import shutil
import socket
import sysconfig
from contextlib import suppress
from pathlib import Path

from packaging.version import Version

from smp_train.errors import ConfigError

OPEN_FILES = 1 << 20
"""Open files that a process asks for at most; some containers allow a thousand times as many."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables of the settings of CUDA's allocator: since torch 2.9, and before."""


OLDEST = {"torch": "2.8", "transformers": "4.50"}
"""Oldest releases of the native backend; before torch 2.8, FSDP2 averages gradients of replicas that must be summed."""


def check_native_releases() -> None:
    """Raise `ConfigError` where torch or transformers is too old for the native backend; imports neither."""
    for package, oldest in OLDEST.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            if older(installed := importlib.metadata.version(package), oldest):
                raise ConfigError(
                    f"the native backend needs {package} {oldest} or newer, this is {installed}; upgrade {package}, or "
                    "use --backend smp inside the SMP container"
                )


def older(installed: str, oldest: str) -> bool:
    """Return whether a release is older than another; a build before a release (2.8.0a0) counts as that release."""
    return Version(installed).release < Version(oldest).release


def python_path() -> str:
    """Return PYTHONPATH of a process of this Python that is to import this package."""
    further = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, further)])


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare(*, one_queue: bool = False) -> None:
    """Set what runs need and the user has not set; before the first use of CUDA and of gloo.

    - Open files to the hard limit, as each gloo group may connect every rank with every other: 1,023 descriptors per
      rank and group at 1,024 ranks, where the usual soft limit is 1,024. And gloo connects two ranks when they first
      exchange something, not all at start.
    - CUDA memory in segments that grow: less is lost between blocks of different sizes.
    - One implementation of NCCL's groups on all versions of torch. The default one of torch 2.15 binds the group to the
      GPU that it derives from LOCAL_RANK or the rank, which is another one where srun deals ranks out by turns.

    Args:
        one_queue: Launch all kernels of a GPU in one hardware queue, as SMP's tensor parallelism needs (its overlap is
            Megatron's). With FSDP2 it would keep communication from running beside computation.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ.update(dict.fromkeys(ALLOCATOR, "expandable_segments:True"))
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    if one_queue:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def missing_for_kernels() -> str:
    """Return what is missing to compile kernels, as Triton and inductor do: a C compiler or Python's headers; or ""."""
    given = os.environ.get("CC")
    if not any(map(shutil.which, [given] if given else ["gcc", "clang", "cc"])):
        return f"CC={given} is not found" if given else "no C compiler (gcc or clang)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return f"no Python.h in {sysconfig.get_path('include')} (package python3-dev)"
    return ""


def free_port() -> int:
    """Return a TCP port that is free on this machine now, outside of the range of ephemeral ports.

    Rank 0 listens there seconds later: an ephemeral port (Linux: from 32768 on) may be taken by then.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
