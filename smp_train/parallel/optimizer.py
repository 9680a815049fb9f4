"""AdamW on a mesh: each rank updates the part of every parameter that it holds."""

from __future__ import annotations

from typing import Any

import torch

from smp_train.distributed.dtensor import local_tensor


class ShardedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, whose update goes element by element and so needs nothing of other ranks.

    The states are laid out as their parameters are. The kernel is given this rank's part of both: over DTensors torch
    works out a layout for the lists of all of them, which on a mesh of three dimensions is most of a first step.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        # No public call hands out these lists; this one has been there since torch 2.0.
        found = super()._init_group(group, *lists)
        for tensors in lists:
            if isinstance(tensors, list):
                tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return found
