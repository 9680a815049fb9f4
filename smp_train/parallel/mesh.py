"""The device mesh of a run.

Dimensions, outermost first: ``replicate`` x ``shard`` x ``context`` x ``tensor``. Neighbouring ranks share a node, so
the innermost dimensions, which communicate most, use the fastest links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from smp_train.distributed.degrees import Degrees

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

KEEP_UNSHARDED_STRATEGIES = ("shard_grad_op", "_hybrid_shard_zero2")


class Mesh:
    """The ranks of a run laid out by `Degrees`, and every sub-mesh that a part of the program asks for."""

    def __init__(self, degrees: Degrees, device_type: str) -> None:
        """Build the mesh; collective, every rank of the initialised process group takes part."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        self.degrees = degrees
        self.root: DeviceMesh = init_device_mesh(
            device_type,
            (degrees.replicate, degrees.shard, degrees.context, degrees.tensor),
            mesh_dim_names=("replicate", "shard", "context", "tensor"),
        )
        # Parameters are sharded over shard x context: context ranks see the same rows but split the work on them.
        if degrees.context > 1:
            self._shard = self.root["shard", "context"]._flatten("shard_context")
        else:
            self._shard = self.root["shard"]
        # Groups connect through the store, which rank 0 may serve. Without the barrier rank 0 could refuse the
        # configuration and exit first, and its peers would report a lost connection instead of that message.
        dist.barrier()

    @property
    def parameters(self) -> DeviceMesh:
        """The mesh for `fully_shard`: 1-D when every rank holds its own shard, else (replicate, shard)."""
        if self.degrees.replicate == 1:
            return self._shard
        shard = "shard" if self.degrees.context == 1 else "shard_context"
        return self.root["replicate", shard]

    @property
    def tensor(self) -> DeviceMesh:
        """The ranks that split each layer's matrices between them."""
        return self.root["tensor"]

    @property
    def context(self) -> DeviceMesh:
        """The ranks that split each sequence between them."""
        return self.root["context"]

    def loss_group(self) -> torch.distributed.ProcessGroup:
        """Return the ranks whose token sums add up to the global batch: all but tensor peers."""
        import torch.distributed as dist

        if self.degrees.tensor == 1:
            group = dist.group.WORLD
            assert group is not None
            return group
        return self.root["replicate", "shard", "context"]._flatten("loss").get_group()
