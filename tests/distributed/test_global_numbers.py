"""Updates of parameters of which each rank has its own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests import harness


def updates_of_uneven_parts() -> bool:
    """Return whether clipping and AdamW on each rank's own parts give what torch gives over DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from smp_train.parallel import grad_norm
    from smp_train.parallel.optimizer import ShardedAdamW

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    # Of one row there is nothing on the second rank.
    sizes = [((6, 5), (Shard(0), Shard(1))), ((1, 4), (Shard(0), Replicate())), ((8,), (Replicate(), Replicate()))]

    def trained(kind: type[torch.optim.AdamW], clip: Callable[[torch.optim.Optimizer, torch.Tensor], None]) -> Any:
        generator = torch.Generator().manual_seed(3)
        parameters = [
            torch.nn.Parameter(distribute_tensor(torch.randn(size, generator=generator), mesh, place))
            for size, place in sizes
        ]
        optimizer = kind(parameters, lr=0.1, fused=True)
        for _ in range(3):
            for parameter, (size, place) in zip(parameters, sizes, strict=True):
                parameter.grad = distribute_tensor(torch.randn(size, generator=generator), mesh, place)
            clip(optimizer, grad_norm.global_norm([parameter.grad for parameter in parameters], "cpu"))
            optimizer.step()
        return [(p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]) for p in parameters]

    def scale(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> None:
        optimizer.grad_scale = grad_norm.divisor(0.5, norm)  # type: ignore[attr-defined]

    def clip(optimizer: torch.optim.Optimizer, norm: torch.Tensor) -> None:
        torch.nn.utils.clip_grads_with_norm_(optimizer.param_groups[0]["params"], 0.5, norm)

    ours, torchs = trained(ShardedAdamW, scale), trained(torch.optim.AdamW, clip)
    same = all(
        mine.placements == other.placements and torch.allclose(mine.to_local(), other.to_local(), rtol=1e-5)
        for one, two in zip(ours, torchs, strict=True)
        for mine, other in zip(one, two, strict=True)
    )
    dist.destroy_process_group()
    return same


def test_updates_of_each_part_are_those_of_the_whole() -> None:
    assert harness.run(updates_of_uneven_parts, 4) == [True] * 4
