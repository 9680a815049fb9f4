"""Whether a container image can run on an instance type and with a backend, by the image's name."""

from __future__ import annotations

import os
import re

from smp_train.distributed.host import OLDEST, older
from smp_train.errors import ConfigError
from smp_train.launch.instances import Instance, release

SMP_NAME = "smdistributed-modelparallel"
SMP_TORCH = ((2, 4, 1), (2, 5, 1))
"""Releases of torch whose SMP images the SMP backend runs in."""
SMP_RELEASES = " and ".join(".".join(map(str, torch)) for torch in SMP_TORCH)
ARCHITECTURES = (
    (r"(?<![a-z0-9])(arm64|aarch64|sbsa)(?![a-z0-9])", "aarch64"),
    (r"(?<![a-z0-9])(amd64|x86_64|x86-64)(?![a-z0-9])", "x86_64"),
    # AWS' training images have the architecture in their name unless it is x86_64.
    (rf"{SMP_NAME}|/pytorch-training:", "x86_64"),
)


def backends(backend: str, image: str | None) -> tuple[str, ...]:
    """Return the backends that a run in an image may use; ``--backend auto`` takes SMP if the image has SMP."""
    if backend != "auto" or not image:
        return (backend,)
    if SMP_NAME in image or os.path.basename(image) == "smpv2.sqsh":  # docker_build.sh names SMP's image so
        return ("smp",)
    return ("native",) if "/pytorch-training" in image else ("smp", "native")


def check_image(instance: Instance | None, image: str, backend: str = "auto") -> None:
    """Refuse an image that does not fit the instance's GPUs, its processors or the backend.

    CUDA, torch and architecture are read from the name and tag (``cu124``, ``arm64``, AWS's own images). An unknown
    property is accepted.

    Raises:
        ConfigError: with an image, or an instance type, that would do.
    """
    arch = next((arch for pattern, arch in ARCHITECTURES if re.search(pattern, image)), None)
    if instance and arch and arch != instance.arch:
        raise ConfigError(
            f"--image {image}: is for {arch}, and {instance.name} has {instance.arch} processors; take an image for "
            f"{instance.arch} (docker_build.sh on such a node makes one), or another instance type"
        )
    cuda = re.search(r"\bcu(?:da)?(\d\d)\.?(\d)\b", image)
    if instance and cuda and (int(cuda[1]), int(cuda[2])) < release(instance.min_cuda):
        raise ConfigError(
            f"--image {image}: CUDA {cuda[1]}.{cuda[2]} does not know the {instance.gpu} of {instance.name}, which "
            f"needs {instance.min_cuda}; take a newer image, or another instance type"
        )
    of_aws = re.search(rf"({SMP_NAME}|/pytorch-training(?:-arm64)?):(\d+\.\d+(?:\.\d+)?)", image)
    if of_aws is None:
        return
    has_smp, torch = of_aws[1] == SMP_NAME, of_aws[2]
    natively = backend == "native" or (backend == "auto" and not has_smp)
    if natively and older(torch, OLDEST["torch"]):
        remedy = "leave --backend out, or take an image without SMP" if has_smp else "take a newer image"
        raise ConfigError(
            f"--image {image}: has torch {torch}, and --backend native needs {OLDEST['torch']} or newer; {remedy}"
        )
    if has_smp and not natively and release(torch) not in SMP_TORCH:
        raise ConfigError(
            f"--image {image}: the SMP backend runs in SMP's images of torch {SMP_RELEASES}; take such an image"
        )
