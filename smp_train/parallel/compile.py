"""torch.compile, one decoder layer at a time: layers share one compilation, and a crash names its layer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from smp_train.errors import ConfigError


def check(backend: str) -> None:
    """Raise `ConfigError` where this torch has no compiler of this name."""
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        offered = [name for name in known if "TESTING_ONLY" not in name]
        raise ConfigError(f"--torch_compile_backend {backend}: this torch has {', '.join(offered)}")


def disabled() -> AbstractContextManager[Any]:
    """Return a context in which compiled layers run eagerly: text of every length would be a compilation."""
    if hasattr(torch.compiler, "set_stance"):  # torch 2.6
        return torch.compiler.set_stance("force_eager")
    return nullcontext()


def apply(layers: list[nn.Module], *, backend: str) -> None:
    """Compile the ``forward`` of every decoder layer in place; parameter names stay as they are.

    Layers, not the whole model: equal layers share one compilation of some seconds, and FSDP2 communicates between
    them. Two kinds of layer, such as every second one checkpointed, take two compilations. Code that cannot be traced
    breaks a layer's graph; it does not stop the run.

    Args:
        layers: The decoder layers, checkpointed or not.
        backend: What compiles: a name of `torch.compile`.
    """
    for layer in layers:
        # Static shapes: a training run has one, and a validation run with another batch compiles once more.
        layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)
