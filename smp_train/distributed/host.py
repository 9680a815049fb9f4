"""The host's side of a process, without torch: releases, cores, limits, allocators, a C compiler, a free port."""

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

from smp_train.distributed.environment import GENERATION
from smp_train.errors import ConfigError

OPEN_FILES = 1 << 20
"""A process asks for at most this many open files; some containers allow a thousand times as many."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of CUDA's allocator: the first since torch 2.9, the second before."""

OLDEST = {"torch": "2.8", "transformers": "4.50"}
"""Oldest releases for the native backend. Before torch 2.8, FSDP2 averages gradients over replicas, which we sum."""


def check_native_releases() -> None:
    """Raise `ConfigError` if torch or transformers is too old for the native backend; imports neither."""
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
    """Return PYTHONPATH for a child process that imports this package."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, folders)])


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def prepare(*, one_queue: bool = False) -> None:
    """Set limits and variables that the user has not set, before the first use of CUDA and gloo.

    - Open files: the hard limit. Each gloo group may connect every rank with every rank, which takes 1,023 descriptors
      per rank and group at 1,024 ranks; the usual soft limit is 1,024.
    - gloo: connect two ranks when they first communicate, not all ranks at the start; but at the start if dead ranks
      are replaced, because a first communication with a dead rank may hang (gloo issue 520).
    - CUDA's allocator: expandable segments, which lose less memory between blocks of different sizes.
    - NCCL groups: the same implementation on all versions of torch. Torch 2.15 by default binds a group to the GPU that
      it derives from LOCAL_RANK or the rank, which is the wrong GPU if srun deals ranks out to the nodes in turn.

    Args:
        one_queue: Launch all kernels of a GPU in one hardware queue, which SMP's (Megatron's) tensor parallelism needs
            to overlap communication with computation. With one queue, FSDP2 could not overlap them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "0" if GENERATION in os.environ else "1")
    if GENERATION in os.environ:  # torch's watchdog would end every process whose peer has died
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ.update(dict.fromkeys(ALLOCATOR, "expandable_segments:True"))
    os.environ.setdefault("TORCH_DIST_USE_NCCL2", "0")
    if one_queue:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def missing_for_kernels() -> str:
    """Return which of a C compiler and Python's headers is missing, for kernels of Triton and inductor; or ""."""
    compiler = os.environ.get("CC")
    if not any(map(shutil.which, [compiler] if compiler else ["gcc", "clang", "cc"])):
        return f"CC={compiler} is not found" if compiler else "no C compiler (gcc or clang)"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return f"no Python.h in {sysconfig.get_path('include')} (package python3-dev)"
    return ""


def free_port() -> int:
    """Return a TCP port that is free on this machine now.

    Rank 0 listens on it seconds later, so an ephemeral port (Linux: from 32768 on) might be taken by then.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
