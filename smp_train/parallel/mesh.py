"""The one object that knows how ranks are laid out.

Dimensions, outermost first: ``replicate`` x ``shard`` x ``context`` x ``tensor``. Neighbouring ranks sit on the same
node, so the innermost dimensions, which talk most, stay on the fastest links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_train.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

HYBRID_STRATEGIES = ("hybrid_shard", "_hybrid_shard_zero2")
KEEP_UNSHARDED_STRATEGIES = ("shard_grad_op", "_hybrid_shard_zero2")


@dataclass(frozen=True)
class Degrees:
    """How many ranks each dimension of the mesh has; their product is the world size."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks that this layout takes."""
        return self.replicate * self.shard * self.context * self.tensor

    def __str__(self) -> str:
        return (
            f"replicate {self.replicate} x shard {self.shard} x context {self.context} x tensor {self.tensor}"
        )


def plan(
    *,
    world_size: int,
    local_world_size: int,
    sharding_strategy: str,
    hybrid_shard_degree: int | None = None,
    tensor: int = 1,
    context: int = 1,
) -> Degrees:
    """Turn a sharding strategy and degrees into a layout of ``world_size`` ranks.

    A shard degree, where given, wins over the strategy, as in SMP v2: 1 replicates everywhere, the largest
    possible value shards everywhere, any divisor between the two is hybrid. 0 or None leaves it to the strategy,
    whose hybrid forms then shard over one node. The context dimension is part of the shard degree, as in SMP v2: its
    ranks hold different shards of the parameters.

    Raises:
        ConfigError: A degree does not divide the ranks it is to divide; names those that would.
    """
    for name, degree in (("tensor_parallel_degree", tensor), ("context_parallel_degree", context)):
        if world_size % degree:
            raise ConfigError(
                f"--{name} {degree} does not divide the {world_size} ranks; use one of {divisors(world_size)}"
            )
    ranks = world_size // tensor
    if ranks % context:
        raise ConfigError(
            f"--context_parallel_degree {context} does not divide the {ranks} ranks left by "
            f"--tensor_parallel_degree {tensor}; use one of {divisors(ranks)}"
        )
    if hybrid_shard_degree:
        shard = hybrid_shard_degree
        source = f"--hybrid_shard_degree {hybrid_shard_degree}"
    elif sharding_strategy == "no_shard":
        shard, source = context, "--sharding_strategy no_shard"
    elif sharding_strategy in HYBRID_STRATEGIES:
        shard = max(local_world_size // tensor, context)
        source = f"--sharding_strategy {sharding_strategy} (one node of {local_world_size} ranks)"
    else:
        shard, source = ranks, f"--sharding_strategy {sharding_strategy}"
    if ranks % shard:
        raise ConfigError(
            f"{source}: a shard degree of {shard} does not divide the {ranks} data-parallel ranks; "
            f"use --hybrid_shard_degree with one of {divisors(ranks)}"
        )
    if shard % context:
        raise ConfigError(
            f"--context_parallel_degree {context} must divide the shard degree {shard}; use one of {divisors(shard)}"
        )
    return Degrees(replicate=ranks // shard, shard=shard // context, context=context, tensor=tensor)


def divisors(number: int) -> list[int]:
    """Return every divisor of ``number``, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


class Mesh:
    """The ranks of a run laid out by `Degrees`, and every sub-mesh that a part of the program asks for."""

    def __init__(self, degrees: Degrees, device_type: str) -> None:
        """Build the mesh; collective, every rank of the initialised process group takes part."""
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

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank reads; context and tensor peers read the same rows."""
        replicate, shard = self.root.get_local_rank("replicate"), self.root.get_local_rank("shard")
        return replicate * self.degrees.shard + shard

    @property
    def data_size(self) -> int:
        """Into how many shares the global batch is split."""
        return self.degrees.replicate * self.degrees.shard

    def loss_group(self) -> torch.distributed.ProcessGroup:
        """Return the ranks whose token sums add up to the global batch: all but tensor peers."""
        import torch.distributed as dist

        if self.degrees.tensor == 1:
            group = dist.group.WORLD
            assert group is not None
            return group
        return self.root["replicate", "shard", "context"]._flatten("loss").get_group()
