"""Whether a container image can run on an instance type and with a backend, by its name or by the file's contents."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from smp_train.errors import ConfigError
from smp_train.launch.instances import Instance, release

SMP_NAME = "smdistributed-modelparallel"
SMP_TORCH = ((2, 4, 1), (2, 5, 1))
"""Releases of torch whose SMP images the SMP backend runs in."""
NATIVE_TORCH = (2, 6)
MACHINES = {0x3E: "x86_64", 0xB7: "aarch64"}  # e_machine of ELF
NAMED = (
    (r"(?<![a-z0-9])(arm64|aarch64|sbsa)(?![a-z0-9])", "aarch64"),
    (r"(?<![a-z0-9])(amd64|x86_64|x86-64)(?![a-z0-9])", "x86_64"),
    # AWS' training images have the architecture in their name unless it is x86_64.
    (rf"{SMP_NAME}|/pytorch-training:", "x86_64"),
)


def check_image(instance: Instance | None, image: str, backend: str = "auto") -> None:
    """Refuse an image that the instance's GPUs, its processors or the backend cannot be used with.

    CUDA and architecture are found by the name and tag (``cu124``, ``arm64``, SMP's own), and by the programs in an
    Enroot file where `unsquashfs` is installed; what nothing tells is let pass.

    Raises:
        ConfigError: with an image, or an instance type, that would do.
    """
    if instance is not None:
        _check_cuda(instance, image)
        arch = architecture(image)
        if arch and arch != instance.arch:
            raise ConfigError(
                f"--image {image}: is for {arch}, and {instance.name} has {instance.arch} processors; take an image "
                f"for {instance.arch} (docker_build.sh on such a node makes one), or another instance type"
            )
    _check_smp(image, backend)


def _check_cuda(instance: Instance, image: str) -> None:
    found = re.search(r"\bcu(?:da)?(\d\d)\.?(\d)\b", image)
    if found and not instance.runs_cuda(f"{found[1]}.{found[2]}"):
        raise ConfigError(
            f"--image {image}: CUDA {found[1]}.{found[2]} does not know the {instance.gpu} of {instance.name}, which "
            f"needs {instance.min_cuda}; take a newer image, or another instance type"
        )


def _check_smp(image: str, backend: str) -> None:
    found = re.search(rf"{SMP_NAME}:(\d+\.\d+\.\d+)", image)
    if found is None:
        return
    torch = release(found[1])
    if backend == "native" and torch < NATIVE_TORCH:
        raise ConfigError(
            f"--image {image}: has torch {found[1]}, and --backend native needs 2.6 or newer; leave --backend out, or "
            "take an image without SMP"
        )
    if backend != "native" and torch not in SMP_TORCH:
        known = " and ".join(".".join(map(str, one)) for one in SMP_TORCH)
        raise ConfigError(f"--image {image}: the SMP backend runs in SMP's images of torch {known}; take one of them")


def architecture(image: str) -> str | None:
    """Return x86_64 or aarch64 by the image's file, else by its name; None where neither shows it."""
    if os.path.isfile(image):
        return _of_file(image)
    return next((arch for pattern, arch in NAMED if re.search(pattern, image)), None)


def _of_file(path: str) -> str | None:
    """Return the architecture of a program in an Enroot file; None where the file cannot be read."""
    if not shutil.which("unsquashfs"):
        return None
    command = ["unsquashfs", "-cat", path, "usr/bin/env"]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    head = done.stdout[:20]
    return MACHINES.get(int.from_bytes(head[18:20], "little")) if head[:4] == b"\x7fELF" else None
