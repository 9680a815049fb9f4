"""The device mesh of a run.

Dimensions, outermost first: ``replicate`` x ``shard`` x ``expert`` x ``context`` x ``tensor``, without ``expert`` where
its degree is 1. Neighbouring ranks share a node, so the innermost dimensions, which communicate most, use the fastest
links.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from smp_train.distributed.degrees import Degrees

KEEP_UNSHARDED_STRATEGIES = ("shard_grad_op", "_hybrid_shard_zero2")


class Mesh:
    """The device mesh of a run's `Degrees`, and its sub-meshes."""

    def __init__(self, degrees: Degrees, device_type: str) -> None:
        """Build the mesh; collective."""
        self.degrees = degrees
        sizes = {
            "replicate": degrees.replicate, "shard": degrees.shard, "expert": degrees.expert,
            "context": degrees.context, "tensor": degrees.tensor,
        }  # fmt: skip
        if degrees.expert == 1:
            del sizes["expert"]
        self.root: DeviceMesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.tensor, self.context = self.root["tensor"], self.root["context"]
        """The ranks that split each layer's matrices, and the ranks that split each sequence."""
        # Parameters are sharded over shard x expert x context: context ranks see the same rows but split the work on
        # them. Experts are distributed over expert x tensor, and each rank's experts sharded over shard x context.
        self.parameters = self._parameters("shard", "expert", "context")
        """The mesh for `fully_shard`: 1-D when every rank holds its own shard, else (replicate, shard)."""
        self.parameters_of_experts = self.parameters
        """The mesh for `fully_shard` of a layer's experts, 1-D or 2-D in the same way."""
        self.experts: DeviceMesh | None = None
        """The ranks between which a layer's experts are distributed, None without an expert dimension."""
        if degrees.expert > 1:
            self.parameters_of_experts = self._parameters("shard", "context")
            self.experts = self._flat("expert", "tensor")[0]
        self._loss: DeviceMesh | None = None
        if degrees.tensor > 1:
            data_dimensions = tuple(name for name in self.root.mesh_dim_names or () if name != "tensor")
            self._loss = self.root[data_dimensions]._flatten("loss")
        # Groups connect through the store, which rank 0 may serve. Without the barrier, rank 0 could refuse the
        # configuration and exit early, and its peers would report a lost connection instead of that message.
        dist.barrier()

    def _flat(self, *names: str) -> tuple[DeviceMesh, str]:
        """Return the ranks of several dimensions as one dimension, and its name."""
        several = tuple(name for name in self.root.mesh_dim_names or () if name in names and self.root[name].size() > 1)
        flat = "_".join(several) or names[0]
        return (self.root[several]._flatten(flat) if len(several) > 1 else self.root[flat]), flat

    def _parameters(self, *names: str) -> DeviceMesh:
        mesh, flat = self._flat(*names)
        return mesh if self.degrees.replicate == 1 else self.root["replicate", flat]

    def dimensions(self) -> dict[tuple[int, ...], str]:
        """Return the dimension's name for each group of this rank, by the ranks in the group."""
        return {
            tuple(dist.get_process_group_ranks(mesh.get_group(name))): name
            for mesh in (self.parameters_of_experts, self.parameters, self.root)
            for name in mesh.mesh_dim_names or ()
        }

    def loss_group(self) -> dist.ProcessGroup:
        """Return the ranks whose token sums add up to the global batch: all but tensor peers."""
        group = dist.group.WORLD if self._loss is None else self._loss.get_group()
        assert group is not None
        return group

    def group_names(self) -> list[str]:
        """Return the names of this rank's groups, in the order of their dimensions."""
        meshes = [self.root, self.parameters, self.parameters_of_experts, self.experts, self._loss]
        return [name for mesh in meshes if mesh is not None for name in mesh._dim_group_names]
