"""Memory for modules that are on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def empty_module_params(module: nn.Module, device: Any = None, recurse: bool = False) -> nn.Module:
    """Give meta parameters memory on ``device``, unset."""
    for child in module.modules() if recurse else (module,):
        for name, param in child._parameters.items():
            if param is not None and param.is_meta:
                # Not zero, so that a parameter nobody initialises shows.
                value = torch.full(param.shape, float("nan"), dtype=param.dtype, device=device)
                child._parameters[name] = nn.Parameter(value, requires_grad=param.requires_grad)
    return module


def move_buffers_to_device(module: nn.Module, device: Any, recurse: bool = False) -> nn.Module:
    """Move buffers to ``device``."""
    for child in module.modules() if recurse else (module,):
        for name, buffer in child._buffers.items():
            if buffer is not None and not buffer.is_meta:
                child._buffers[name] = buffer.to(device)
    return module
