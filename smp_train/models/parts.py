"""Which elements of a parameter a rank holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smp_train.distributed.dtensor import DTensor
from smp_train.errors import SmpTrainError


@dataclass(frozen=True)
class Part:
    """Which elements of a parameter a rank holds: those at the given indices of each dimension.

    Attributes:
        shape: shape of the whole parameter.
        indices: for each dimension the indices held, int64, ascending.
    """

    shape: tuple[int, ...]
    indices: tuple[Tensor, ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's tensor."""
        return tuple(len(index) for index in self.indices)

    def runs(self) -> tuple[Tensor, Tensor]:
        """Return (starts, offsets): row o, column j is flat element starts[o] + offsets[j]."""
        stride, strides = 1, []
        for size in reversed(self.shape):
            strides.append(stride)
            stride *= size
        strides.reverse()
        starts = torch.zeros(1, dtype=torch.int64)
        for index, step in zip(self.indices[:-1], strides[:-1], strict=True):
            starts = (starts[:, None] + index[None, :] * step).flatten()
        offsets = self.indices[-1] if self.indices else torch.zeros(1, dtype=torch.int64)
        return starts, offsets


def part_of(param: Tensor) -> Part:
    """Return which elements of ``param`` this rank holds (all of a plain tensor's).

    Splitting the indices with the placements' own code follows every layout there is, `_StridedShard`
    included.
    """
    indices = [torch.arange(size) for size in param.shape]
    if isinstance(param, DTensor):
        coordinate = param.device_mesh.get_coordinate()
        if coordinate is None:
            indices = [index[:0] for index in indices]
        else:
            for mesh_dim, placement in enumerate(param.placements):
                if placement.is_replicate():
                    continue
                if placement.is_partial():
                    raise SmpTrainError("a parameter with a Partial placement cannot be initialised")
                count = param.device_mesh.size(mesh_dim)
                dim = placement.dim  # type: ignore[attr-defined]
                indices[dim] = _piece(placement, indices[dim], count, coordinate[mesh_dim])
    return Part(tuple(param.shape), tuple(indices))


def _piece(placement: object, index: Tensor, count: int, position: int) -> Tensor:
    factor = getattr(placement, "split_factor", 1)
    # Shard is torch.chunk. _StridedShard chunks each of the pieces that a later mesh dimension will take.
    blocks = torch.chunk(index, factor)
    pieces = [torch.chunk(block, count) for block in blocks]
    return torch.cat([piece[position] for piece in pieces if position < len(piece)] or [index[:0]])
