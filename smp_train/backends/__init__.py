"""Selection of the backend."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from smp_train import arguments, distributed
from smp_train.backends import smp_library
from smp_train.distributed import ALL_RANKS
from smp_train.distributed.degrees import plan
from smp_train.distributed.host import check_native_releases
from smp_train.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from smp_train.arguments import Arguments
    from smp_train.backends.base import Backend
    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.backends")


def select(args: Arguments, ranks: Runtime, device: torch.device) -> tuple[Backend, str]:
    """Return the backend that ``--backend`` selects, and the reason for the log; collective.

    ``auto`` selects SMP if ``torch.sagemaker`` can be imported and initialised, else the native backend. If
    ``torch.sagemaker`` is installed but unusable, a warning gives the cause; if the native backend cannot run either,
    as with the older torch of SMP's containers, the error gives both causes.
    """
    if args.backend == "native":
        return _native(args, ranks, device), "--backend native"
    if args.backend == "smp":
        return _smp(args, ranks, device), "--backend smp"
    if not distributed.any_rank(distributed.smp_installed()):
        return _native(args, ranks, device), "this torch has no torch.sagemaker"
    try:
        return _smp(args, ranks, device), "torch.sagemaker is here"
    except smp_library.Unusable as cause:
        unusable = f"SMP is here but cannot be used: {cause}"
    logger.warning("%s", unusable, extra=ALL_RANKS)
    try:
        return _native(args, ranks, device), "SMP cannot be used here"
    except ConfigError as refused:
        raise ConfigError(f"{unusable}; and natively: {refused}") from refused


def _native(args: Arguments, ranks: Runtime, device: torch.device) -> Backend:
    check_native_releases()  # check first: importing native.py fails with an older torch
    arguments.refuse_natively(args)
    from smp_train.backends.native import NativeBackend

    return NativeBackend(args, ranks, device)


def _smp(args: Arguments, ranks: Runtime, device: torch.device) -> Backend:
    degrees = plan(args, ranks.world_size, ranks.local_world_size, smp=True)
    library = smp_library.start(args, ranks, degrees)
    from smp_train.backends.smp import SmpBackend

    return SmpBackend(args, ranks, device, degrees, library)
