"""Process groups as on GPUs: this program's start and mesh on torch's own code, with gloo under NCCL's name."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest

from smp_train.distributed.degrees import Degrees
from tests import fake_nccl
from tests.harness import RankFailed, run

LIMIT = 7 * 60.0
"""Seconds of a collective, which no default of torch is."""


def begin(limit: float = LIMIT) -> Any:
    from smp_train import distributed

    ranks = distributed.detect()
    fake_nccl.install(ranks.rank, ranks.local_world_size)
    return distributed, ranks, distributed.start(ranks, timeout_seconds=limit)


def groups(degrees: Degrees) -> list[tuple[Any, ...]]:
    """Return of every group of this rank its size, its backends by device, their limits, and whether it is bound."""
    from torch.distributed import distributed_c10d

    from smp_train.parallel.mesh import Mesh

    distributed, ranks, device = begin()
    assert (device.type, device.index) == ("cuda", ranks.rank)
    Mesh(degrees, device.type).loss_group()
    described = []
    for group in distributed_c10d._world.pg_map:
        backends = {device.type: group._get_backend(device) for device in group._device_types}
        names = {device: type(backend).__name__ for device, backend in backends.items()}
        limits = {backend.options._timeout for backend in backends.values()}
        described.append((group.size(), names, limits, group.bound_device_id))
    distributed.stop()
    return described


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(replicate=1, shard=1, context=1, tensor=1), Degrees(replicate=1, shard=2, context=1, tensor=1),
        Degrees(replicate=2, shard=2, context=1, tensor=1), Degrees(replicate=1, shard=1, context=2, tensor=2),
        Degrees(replicate=1, shard=1, context=1, tensor=2, expert=2),
    ],
)  # fmt: skip
def test_every_group_has_gloo_and_nccl_and_the_limit_of_the_flag(degrees: Degrees) -> None:
    for of_rank in run(groups, degrees.world_size, degrees):
        assert len(of_rank) > 1 or degrees.world_size == 1
        for size, backends, limits, bound in of_rank:
            assert backends == {"cpu": "ProcessGroupGloo", "cuda": "FakeNCCL"}, size
            assert limits == {timedelta(seconds=LIMIT)}, size
            # torch would split a group that is bound to a device: 2.8 and 2.9 cannot, with two backends.
            assert bound is None, size


def meet() -> tuple[Any, ...]:
    """Return what ranks tell each other in the ways that take a device of torch's choice."""
    import torch.distributed as dist

    from smp_train.parallel.mesh import Mesh

    distributed, ranks, device = begin()
    mesh = Mesh(Degrees(replicate=2, shard=2, context=1, tensor=1), device.type)
    shard = mesh.root["shard"].get_group()
    dist.barrier()
    dist.barrier(shard)
    of_shard: list[Any] = [None, None]
    dist.all_gather_object(of_shard, ranks.rank, group=shard)
    chosen = [f"by {ranks.rank}"]
    dist.broadcast_object_list(chosen, src=0)
    together = distributed.gather("asking", lambda: ranks.rank), distributed.largest([ranks.rank])
    distributed.stop()
    return of_shard, chosen, *together


def test_barriers_and_objects_go_through_the_cpu() -> None:
    """On the GPU each would allocate there, which fails in this test."""
    results = run(meet, 4)
    assert [result[0] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result[1:] for result in results] == [(["by 0"], [0, 1, 2, 3], [3])] * 4


def alone_in_a_collective() -> bool:
    """Return whether a collective of a sub-group that the other rank never enters fails before that rank ends."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from smp_train.parallel.mesh import Mesh

    _, ranks, device = begin(limit=10)
    mesh, store = Mesh(Degrees(1, 1, context=2), device.type), distributed_c10d._get_default_store()
    if ranks.rank == 1:
        store.wait(["over"], timedelta(seconds=120))
        return True
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1), group=mesh.context.get_group())
    store.set("over", "")
    return True


@pytest.mark.slow
def test_a_collective_of_a_sub_group_ends_at_its_limit() -> None:
    assert run(alone_in_a_collective, 2) == [True, True]


def aborting(start: str, end: str, *, hangs: bool) -> tuple[list[str], int]:
    """Return the calls to NCCL by `unblock`, and the number of groups; an abort ``hangs`` for longer than it may."""
    import torch.distributed as dist

    from smp_train.distributed import unblock
    from smp_train.parallel.mesh import Mesh

    _, ranks, device = begin()
    Mesh(Degrees(replicate=1, shard=ranks.world_size, context=1, tensor=1), device.type)
    calls: list[str] = []
    for name in (start, "abort", end):
        setattr(dist.ProcessGroupNCCL, name, lambda self, name=name: calls.append(name))
    if hangs:
        unblock.ABORT_SECONDS = 0.1
        dist.ProcessGroupNCCL.abort = lambda self: threading.Event().wait()  # type: ignore[method-assign]
    unblock.unblock()
    return calls, len(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize(("start", "end"), [("_group_start", "_group_end"), ("_start_coalescing", "_end_coalescing")])
def test_all_communicators_are_aborted_in_one_group(start: str, end: str) -> None:
    for calls, groups in run(aborting, 2, start, end, hangs=False):
        assert groups > 1
        assert calls == [start, *["abort"] * groups, end]


def test_a_rank_whose_abort_hangs_ends() -> None:
    with pytest.raises(RankFailed, match="exit code 1, late: False"):
        run(aborting, 1, "_group_start", "_group_end", hangs=True)
