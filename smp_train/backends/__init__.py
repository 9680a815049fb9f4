"""Backends, and the choice between them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from smp_train.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from smp_train.arguments import Arguments
    from smp_train.backends.base import Backend
    from smp_train.runtime import Runtime


def select(args: Arguments, runtime: Runtime, device: torch.device) -> tuple[Backend, str]:
    """Return the backend that ``--backend`` asks for, and in a few words why it was taken; collective."""
    from smp_train.backends.native import NativeBackend

    if args.backend == "smp":
        raise ConfigError("--backend smp is not available in this version; use --backend native")
    why = "--backend native" if args.backend == "native" else _why_native()
    return NativeBackend(args, runtime, device), why


def _why_native() -> str:
    found = importlib.util.find_spec("torch.sagemaker") is not None
    return "this version has no SMP backend yet" if found else "this torch has no torch.sagemaker"
