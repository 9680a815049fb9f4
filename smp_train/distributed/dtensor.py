"""DTensor for all supported versions of torch, and which elements of a parameter this rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smp_train.errors import SmpTrainError

try:
    from torch.distributed.tensor import DTensor, Shard
except ImportError:  # torch 2.4, of SMP's older containers
    from torch.distributed._tensor import DTensor, Shard

__all__ = ["DTensor", "Part", "Shard", "forget_layouts", "local_tensor", "part_of"]


def local_tensor(tensor: Any) -> Any:
    """Return the local shard of a DTensor; return other values unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def forget_layouts() -> None:
    """Empty DTensor's cache of the layouts of operators' results."""
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is None:  # older than torch 2.10
        clear = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear
    clear()


@dataclass(frozen=True)
class Part:
    """The elements of a parameter that a rank holds: the product of the indices in each dimension.

    Attributes:
        shape: shape of the whole parameter.
        indices: for each dimension the indices held, int64, ascending.
    """

    shape: tuple[int, ...]
    indices: tuple[Tensor, ...]


def part_of(param: Tensor) -> Part:
    """Return the elements of ``param`` that this rank holds; all elements of a plain tensor.

    The indices are split just as the placements split the tensor, so that any layout works, also `_StridedShard`.
    """
    indices = [torch.arange(size) for size in param.shape]
    if isinstance(param, DTensor):
        coordinate = param.device_mesh.get_coordinate()
        if coordinate is None:
            return Part(tuple(param.shape), tuple(index[:0] for index in indices))
        for mesh_dim, placement in enumerate(param.placements):
            if placement.is_partial():
                raise SmpTrainError("a parameter with a Partial placement cannot be initialised")
            if not placement.is_replicate():
                dim = placement.dim  # type: ignore[attr-defined]
                count = param.device_mesh.size(mesh_dim)
                indices[dim] = _piece(placement, indices[dim], count, coordinate[mesh_dim])
    return Part(tuple(param.shape), tuple(indices))


def _piece(placement: object, index: Tensor, count: int, position: int) -> Tensor:
    # Shard splits as torch.chunk does. _StridedShard first chunks for a later mesh dimension, then splits each chunk.
    blocks = torch.chunk(index, getattr(placement, "split_factor", 1))
    pieces = [torch.chunk(block, count) for block in blocks]
    return torch.cat([piece[position] for piece in pieces if position < len(piece)] or [index[:0]])
