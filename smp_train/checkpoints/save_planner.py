"""Which replicated tensors each rank writes, decided without communication: rank 0 gets one plan item per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from smp_train.distributed.dtensor import DTensor

Replicas = tuple[tuple[int, ...], int, int]
"""Dimensions of a mesh over which copies lie, their number, and which of them this rank holds."""


class SavePlanner(DefaultSavePlanner):
    """Leaves out of this rank's plan the copies that other ranks write; every rank of the tensors' meshes takes part.

    torch's planner sends every copy to rank 0, which drops all but one: millions of items at 2,048 ranks, and minutes.
    Here the holders of copies decide without communication: they hold equal lists, and assign each item in turn to the
    least loaded holder. What lies on no mesh is deduplicated by DCP on rank 0.
    """

    def create_local_plan(self) -> SavePlan:
        """See `DefaultSavePlanner.create_local_plan`."""
        plan = super().create_local_plan()
        loads: dict[Any, list[int]] = {}
        kept = []
        for item in plan.items:
            found = self._replicas(item)
            if found is not None:
                mesh, (dims, copies, mine) = found
                load = loads.setdefault((mesh, dims), [0] * copies)
                writer = load.index(min(load))
                load[writer] += item.tensor_storage_size() or 1
                if writer != mine:
                    continue
            kept.append(item)
        # Each entry's place in the nested state is known to whoever writes it.
        names = {item.index.fqn for item in kept}
        places = {name: place for name, place in (plan.planner_data or {}).items() if name in names}
        self.plan = replace(plan, items=kept, planner_data=places)
        return self.plan

    def _replicas(self, item: WriteItem) -> tuple[Any, Replicas] | None:
        """Return the mesh of a tensor, and its copies on it; None where no mesh tells who holds it."""
        name = item.index.fqn
        held: Any = self.state_dict[name]
        if isinstance(held, DTensor):
            dims = [dim for dim, placement in enumerate(held.placements) if placement.is_replicate()]
            return held.device_mesh, _copies(held.device_mesh, dims)
        # A number of a parameter's optimizer, such as its steps: on every rank that holds a part of its moments.
        moment = self.state_dict.get(f"{name.rpartition('.')[0]}.exp_avg")
        if isinstance(moment, DTensor):
            return moment.device_mesh, _copies(moment.device_mesh, range(moment.device_mesh.ndim))
        return None


def _copies(mesh: Any, dims: Sequence[int]) -> Replicas:
    place, mine, copies = mesh.get_coordinate(), 0, 1
    for dim in dims:
        mine = mine * mesh.size(dim) + place[dim]
        copies *= mesh.size(dim)
    return tuple(dims), copies, mine
