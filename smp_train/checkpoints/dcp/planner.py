"""Which rank writes which replicated tensor, decided without communication: rank 0 gets one plan item per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from smp_train.distributed.dtensor import DTensor

Replicas = tuple[tuple[int, ...], int, int]
"""Mesh dimensions over which a tensor is replicated, the number of replicas, and the number of this rank's replica."""


class SavePlanner(DefaultSavePlanner):
    """Drops from this rank's plan the replicas that other ranks write; all ranks of the tensors' meshes take part.

    torch's planner sends every replica to rank 0, which drops all except one: millions of items at 2,048 ranks, and
    minutes. Here the holders of a replica have equal lists of items, and assign each item to the least loaded holder.
    DCP removes duplicates of tensors without a mesh on rank 0.
    """

    def create_local_plan(self) -> SavePlan:
        """See `DefaultSavePlanner.create_local_plan`."""
        plan = super().create_local_plan()
        loads: dict[Any, list[int]] = {}
        items = []
        for item in plan.items:
            replicated = self._replicas(item)
            if replicated is not None:
                mesh, (dims, count, this_rank) = replicated
                load = loads.setdefault((mesh, dims), [0] * count)
                writer = load.index(min(load))
                load[writer] += item.tensor_storage_size() or 1
                if writer != this_rank:
                    continue
            items.append(item)
        # The writer of an entry sends its path in the nested state; all other ranks need not.
        names = {item.index.fqn for item in items}
        paths = {name: path for name, path in (plan.planner_data or {}).items() if name in names}
        self.plan = replace(plan, items=items, planner_data=paths)
        return self.plan

    def _replicas(self, item: WriteItem) -> tuple[Any, Replicas] | None:
        """Return a tensor's mesh and its replicas on the mesh; None if no mesh shows which ranks hold the tensor."""
        name = item.index.fqn
        value: Any = self.state_dict[name]
        if isinstance(value, DTensor):
            dims = [dim for dim, placement in enumerate(value.placements) if placement.is_replicate()]
            return value.device_mesh, _replicas_over(value.device_mesh, dims)
        # A number of a parameter's optimizer state, such as its step: every rank with a shard of the moments has it.
        moment = self.state_dict.get(f"{name.rpartition('.')[0]}.exp_avg")
        if isinstance(moment, DTensor):
            return moment.device_mesh, _replicas_over(moment.device_mesh, range(moment.device_mesh.ndim))
        return None


def _replicas_over(mesh: Any, dims: Sequence[int]) -> Replicas:
    coordinate, this_rank, count = mesh.get_coordinate(), 0, 1
    for dim in dims:
        this_rank = this_rank * mesh.size(dim) + coordinate[dim]
        count *= mesh.size(dim)
    return tuple(dims), count, this_rank
