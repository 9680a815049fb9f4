"""AdamW on a mesh: each rank updates the part of every parameter that it holds."""

from __future__ import annotations

from typing import Any

import torch

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4, of SMP's older containers
    from torch.distributed._tensor import DTensor


class ShardedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, whose update goes element by element and so needs nothing of other ranks.

    The states are laid out as their parameters are. The kernel is given what lies behind both: over DTensors torch
    works out a layout for the lists of all of them: on a mesh of three dimensions that is most of a first step.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        # No public call hands out these lists; this one has been there since torch 2.0.
        found = super()._init_group(group, *lists)
        for tensors in lists:
            if isinstance(tensors, list):
                tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return found
