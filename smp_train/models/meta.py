"""Construction of a model whose parameters are on the meta device, so that its size does not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

CONSTRUCT = "_smp_train_construct"
"""Attribute of a model that holds a function that builds another one like it."""


def construct_on_meta(construct: Callable[[], Any], *, larger_than: int = 0) -> Any:
    """Return the model that ``construct`` builds, with its parameters of more elements than this on meta.

    Parameters move to meta as they are registered. Buffers stay real.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.numel() > larger_than and not param.is_meta:
            values = torch.empty(param.shape, dtype=param.dtype, device="meta")
            meta = nn.Parameter(values, requires_grad=param.requires_grad)
            meta.__dict__.update(param.__dict__)
            param = meta
        register(module, name, param)

    with patch.object(nn.Module, "register_parameter", register_on_meta):
        return construct()
