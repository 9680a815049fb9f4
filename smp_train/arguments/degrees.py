"""From a number of ranks, a sharding strategy and degrees to a layout of the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from smp_train.errors import ConfigError

HYBRID_STRATEGIES = ("hybrid_shard", "_hybrid_shard_zero2")


@dataclass(frozen=True)
class Degrees:
    """How many ranks each dimension of the mesh has; their product is the world size."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks that this layout takes."""
        return self.replicate * self.shard * self.context * self.tensor * self.expert


def plan(
    *,
    world_size: int,
    local_world_size: int,
    sharding_strategy: str,
    hybrid_shard_degree: int | None = None,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
) -> Degrees:
    """Turn a sharding strategy and degrees into a layout of ``world_size`` ranks.

    A shard degree, where given, wins over the strategy, as in SMP v2: 1 replicates everywhere, the largest
    possible value shards everywhere, any divisor between the two is hybrid. 0 or None leaves it to the strategy,
    whose hybrid forms then shard over one node. The context dimension is part of the shard degree, as in SMP v2: its
    ranks hold different shards of the parameters.

    Raises:
        ConfigError: A degree does not divide the ranks it is to divide; names those that would.
    """
    processes = "the 1 process" if world_size == 1 else f"the {world_size} processes"
    for name, degree in (
        ("tensor_parallel_degree", tensor),
        ("expert_parallel_degree", expert),
        ("context_parallel_degree", context),
        ("hybrid_shard_degree", hybrid_shard_degree),
    ):
        if degree and world_size % degree:
            raise ConfigError(f"--{name} {degree} does not divide {processes} of this run; {_would(world_size)}")
    if tensor > 1 and expert > 1:
        raise ConfigError("--tensor_parallel_degree and --expert_parallel_degree cannot both be above 1")
    ranks = world_size // (tensor * expert)
    of = f"{processes} of this run"
    if tensor * expert > 1:
        of = f"the {ranks} ranks left by --{'expert' if expert > 1 else 'tensor'}_parallel_degree {tensor * expert}"
    if ranks % context:
        raise ConfigError(f"--context_parallel_degree {context} does not divide {of}; {_would(ranks)}")
    if hybrid_shard_degree:
        shard, source = hybrid_shard_degree, f"--hybrid_shard_degree {hybrid_shard_degree}"
    elif sharding_strategy == "no_shard":
        shard, source = context, "--sharding_strategy no_shard"
    elif sharding_strategy in HYBRID_STRATEGIES:
        shard = max(local_world_size // (tensor * expert), context)
        source = f"--sharding_strategy {sharding_strategy} (one node of {local_world_size} ranks)"
    else:
        shard, source = ranks, f"--sharding_strategy {sharding_strategy}"
    if ranks % shard:
        raise ConfigError(
            f"{source}: a shard degree of {shard} does not divide {of}; --hybrid_shard_degree {_would(ranks)}"
        )
    if shard % context:
        raise ConfigError(
            f"--context_parallel_degree {context} does not divide the shard degree {shard} of {source}; {_would(shard)}"
        )
    return Degrees(replicate=ranks // shard, shard=shard // context, context=context, tensor=tensor, expert=expert)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _would(number: int) -> str:
    return f"{', '.join(map(str, divisors(number)))} would"
