"""Backends, and the choice between them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from smp_train import runtime
from smp_train.backends import smp_library
from smp_train.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from smp_train.arguments import Arguments
    from smp_train.backends.base import Backend
    from smp_train.runtime import Runtime

logger = logging.getLogger("smp_train.backends")


def select(args: Arguments, ranks: Runtime, device: torch.device) -> tuple[Backend, str]:
    """Return the backend that ``--backend`` asks for, and in a few words why it was taken; collective.

    ``auto`` takes SMP where ``torch.sagemaker`` can be imported and initialised, and the native backend otherwise,
    after a warning that names the cause where there is a ``torch.sagemaker``.
    """
    from smp_train.backends.native import NativeBackend

    if args.backend == "native":
        return NativeBackend(args, ranks, device), "--backend native"
    if args.backend == "smp":
        with runtime.together("starting SMP"):
            library = smp_library.start(args)
        return _smp(args, ranks, device, library), "--backend smp"
    if runtime.any_rank(not smp_library.installed()):
        return NativeBackend(args, ranks, device), "this torch has no torch.sagemaker"
    library, failure = None, None
    try:
        library = smp_library.start(args)
    except ConfigError as cause:
        failure = cause
    if runtime.any_rank(failure is not None):
        logger.warning("SMP is here but cannot be used: %s", failure or "another rank's message says why")
        return NativeBackend(args, ranks, device), "SMP cannot be used here"
    return _smp(args, ranks, device, library), "torch.sagemaker is here"


def _smp(args: Arguments, ranks: Runtime, device: torch.device, library: Any) -> Backend:
    from smp_train.backends.smp import SmpBackend

    return SmpBackend(args, ranks, device, library)
