"""Decide without communication which rank writes which replicated tensor. Rank 0 receives one plan item per tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed.checkpoint as dcp

from smp_train.distributed.dtensor import DTensor


class SavePlanner(dcp.DefaultSavePlanner):
    """Drops from this rank's plan the replicas that other ranks write. All ranks of the tensors' meshes must take part.

    torch's planner sends every replica's plan item to rank 0: millions at 2,048 ranks. Here all holders of a replica
    see the same items, and give each to the least loaded holder. Rank 0 drops duplicates of tensors without mesh.
    """

    def create_local_plan(self) -> dcp.SavePlan:
        """See `DefaultSavePlanner.create_local_plan`."""
        plan = super().create_local_plan()
        loads: dict[Any, list[int]] = {}
        items = []
        for item in plan.items:
            holders, count, this_rank = self._holders(item.index.fqn)
            if count > 1:
                load = loads.setdefault(holders, [0] * count)
                writer = load.index(min(load))
                load[writer] += item.tensor_storage_size() or 1
                if writer != this_rank:
                    continue
            items.append(item)
        # Only the rank that writes an entry sends the entry's path in the nested state.
        names = {item.index.fqn for item in items}
        paths = {name: path for name, path in (plan.planner_data or {}).items() if name in names}
        self.plan = replace(plan, items=items, planner_data=paths)
        return self.plan

    def _holders(self, name: str) -> tuple[Any, int, int]:
        """Return a key that identifies the ranks that hold a replica, their number, and this rank's index among them.

        A scalar of a parameter's optimizer state, such as its step, is on every rank that has a shard of the moments.
        """
        value: Any = self.state_dict[name]
        is_number = not isinstance(value, DTensor)
        placed: Any = self.state_dict.get(f"{name.rpartition('.')[0]}.exp_avg") if is_number else value
        if not isinstance(placed, DTensor):
            return None, 1, 0
        mesh: Any = placed.device_mesh
        dims = tuple(dim for dim, part in enumerate(placed.placements) if is_number or part.is_replicate())
        number, count = 0, 1
        for dim in dims:
            number, count = number * mesh.size(dim) + mesh.get_coordinate()[dim], count * mesh.size(dim)
        return (mesh, dims), count, number
