"""AdamW over DTensors: each rank updates its local part of every parameter."""

from __future__ import annotations

from typing import Any

import torch

from smp_train.distributed.dtensor import local_tensor


class ShardedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` on local tensors; its update is elementwise and needs no communication.

    States have their parameters' layout. The fused kernel gets local tensors: with DTensors, torch would propagate the
    layouts of whole lists, which takes most of a first step's time on a three-dimensional mesh.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        # There is no public access to these lists; this method has existed since torch 2.0.
        has_complex = super()._init_group(group, *lists)
        for tensors in lists:
            if isinstance(tensors, list):
                tensors[:] = [local_tensor(tensor) for tensor in tensors]
        return has_complex
