"""Numbers that are one for all ranks: the norm over every mesh, clipping of parts, dropout, the loss head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import harness
from tests.training import flags, steps, train


def norms_of_uneven_parts() -> tuple[float, float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from smp_train.parallel.grad_norm import global_norm

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    generator = torch.Generator().manual_seed(1)
    # Each part has a norm of its own: a norm over one rank, or one dimension of the mesh, would be another number.
    whole = [torch.randn(size, generator=generator) * scale for size, scale in (((6, 5), 1), ((7, 4), 30), ((8,), 0.1))]
    placements = [(Shard(0), Shard(1)), (Shard(0), Replicate()), (Replicate(), Replicate())]
    parts = [distribute_tensor(value, mesh, place) for value, place in zip(whole, placements, strict=True)]
    exact = torch.cat([value.flatten() for value in whole]).double().norm()
    ours = global_norm(parts)
    dist.destroy_process_group()
    return ours.item(), exact.item()


def test_norm_is_over_every_shard_of_every_dimension() -> None:
    results = harness.run(norms_of_uneven_parts, 4)
    for ours, exact in results:
        assert ours == pytest.approx(exact, rel=1e-6)
    assert len({ours for ours, _ in results}) == 1


def updates_of_uneven_parts() -> bool:
    """Return whether clipping and AdamW on each rank's own parts leave the bits that torch leaves over DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from smp_train.parallel import grad_norm
    from smp_train.parallel.optimizer import ShardedAdamW

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    # Of one row there is nothing on the second rank.
    sizes = [((6, 5), (Shard(0), Shard(1))), ((1, 4), (Shard(0), Replicate())), ((8,), (Replicate(), Replicate()))]

    def trained(kind: type[torch.optim.AdamW], clip: Callable[[list[torch.nn.Parameter], torch.Tensor], None]) -> Any:
        generator = torch.Generator().manual_seed(3)
        parameters = [
            torch.nn.Parameter(distribute_tensor(torch.randn(size, generator=generator), mesh, place))
            for size, place in sizes
        ]
        optimizer = kind(parameters, lr=0.1, fused=True)
        for _ in range(3):
            for parameter, (size, place) in zip(parameters, sizes, strict=True):
                parameter.grad = distribute_tensor(torch.randn(size, generator=generator), mesh, place)
            clip(parameters, grad_norm.global_norm([parameter.grad for parameter in parameters]))
            optimizer.step()
        return [(p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]) for p in parameters]

    torchs = trained(torch.optim.AdamW, lambda all, norm: torch.nn.utils.clip_grads_with_norm_(all, 0.5, norm))
    ours = trained(ShardedAdamW, lambda all, norm: grad_norm.clip([each.grad for each in all], 0.5, norm))
    same = all(
        mine.placements == other.placements and torch.equal(mine.to_local(), other.to_local())
        for one, two in zip(ours, torchs, strict=True)
        for mine, other in zip(one, two, strict=True)
    )
    dist.destroy_process_group()
    return same


def test_updates_of_each_part_are_those_of_the_whole() -> None:
    assert harness.run(updates_of_uneven_parts, 4) == [True] * 4


def vocabulary_parallel_head() -> dict[str, float]:
    from smp_train import losses

    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, 9, 8, generator=generator, requires_grad=True)
    weight = torch.randn(24, 8, generator=generator)
    labels = torch.randint(24, (2, 9), generator=generator)
    targets = losses.shift(labels)
    whole_weight = weight.clone().requires_grad_()
    expected = losses.cross_entropy_sum(hidden @ whole_weight.T, targets)
    grad_hidden, grad_weight = torch.autograd.grad(expected, (hidden, whole_weight))
    rows = slice(dist.get_rank() * 12, dist.get_rank() * 12 + 12)
    part = weight[rows].clone().requires_grad_()
    ours = losses.linear_cross_entropy_sum(hidden, part, targets, chunk=5, group=dist.group.WORLD)
    our_hidden, our_weight = torch.autograd.grad(ours, (hidden, part))
    dist.all_reduce(our_hidden)
    dist.destroy_process_group()
    return {
        "loss": abs(ours - expected).item() / expected.item(),
        "hidden": ((our_hidden - grad_hidden).norm() / grad_hidden.norm()).item(),
        "weight": ((our_weight - grad_weight[rows]).norm() / grad_weight[rows].norm()).item(),
    }


def test_vocabulary_parallel_head_equals_the_whole_one() -> None:
    for differences in harness.run(vocabulary_parallel_head, 2):
        assert max(differences.values()) < 1e-6, differences


@pytest.mark.slow
def test_dropout_is_shared_inside_a_tensor_group(tmp_path: Path) -> None:
    """Tensor peers work on the same tokens: with unlike masks their partial sums would belong to no model.

    The embedding's dropout is on whole sequences, so its mask is also that of one process.
    """
    options = {"model_type": "phi", "rotary_pct": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0, "train_batch_size": 2}
    harness.run(train, 1, flags(tmp_path / "one", **options))
    harness.run(train, 2, flags(tmp_path / "split", **options, tensor_parallel_degree=2))
    harness.run(train, 1, flags(tmp_path / "none", **{**options, "embd_pdrop": 0}))
    one, split, none = (steps(tmp_path / name) for name in ("one", "split", "none"))
    assert [r["loss"] for r in split] == pytest.approx([r["loss"] for r in one], rel=1e-5)
    assert one[0]["loss"] != pytest.approx(none[0]["loss"], rel=1e-4)
