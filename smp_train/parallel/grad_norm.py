"""Norm of the whole gradient over any mixture of meshes, and the divisor that clips it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smp_train.distributed.dtensor import DTensor

CPU_RUN = 1024


def global_norm(gradients: Sequence[Tensor], device_type: str) -> Tensor:
    """Return the 2-norm of all gradients of the model, a float32 scalar on their device; collective.

    Args:
        gradients: Plain tensors, replicated on every rank, and DTensors, sharded or replicated over the dimensions of
            their meshes. Squares are summed over the dimensions that shard.
        device_type: The gradients' device; on a ``cpu``, norms are summed in float64.
    """
    by_ranks: dict[tuple[object, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            split = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
            by_ranks.setdefault((gradient.device_mesh, split), []).append(gradient.to_local())
        else:
            by_ranks.setdefault((None, ()), []).append(gradient)
    total: Tensor | None = None
    for (mesh, split), parts in by_ranks.items():
        squares = _sum_of_squares(parts, device_type)
        for dim in split:
            dist.all_reduce(squares, group=mesh.get_group(dim))  # type: ignore[attr-defined]
        total = squares if total is None else total + squares
    if total is None:
        raise ValueError("the model has no gradient")
    return total.sqrt().float()


def divisor(max_norm: float, norm: Tensor) -> Tensor:
    """Return the number by which to divide gradients of `global_norm` ``norm`` to clip them, a scalar on the device.

    The inverse of the factor in `torch.nn.utils.clip_grads_with_norm_`: min(1, max_norm / (norm + 1e-6)).
    """
    return torch.clamp((norm + 1e-6) / max_norm, min=1.0)


def _sum_of_squares(parts: list[Tensor], device_type: str) -> Tensor:
    """Return the sum of squares of local tensors as a float64 scalar."""
    if device_type != "cpu":
        return nn.utils.get_total_norm(parts).double().square()
    # On a CPU torch adds up a whole tensor in one float32 accumulator per lane: 1e-5 off at 100,000 elements, so the
    # norm would depend on the sharding. Norms of short runs, added up in float64, are exact and as fast.
    sums = []
    for part in parts:
        flat = part.detach().flatten()
        whole = flat.numel() // CPU_RUN * CPU_RUN
        runs = torch.linalg.vector_norm(flat[:whole].view(-1, CPU_RUN), dim=1)
        sums.append(runs.double().square().sum() + flat[whole:].double().square().sum())
    return torch.stack(sums).sum()
