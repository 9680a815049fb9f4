"""The layout of ranks over the dimensions of parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smp_train.errors import ConfigError

if TYPE_CHECKING:
    from smp_train.arguments.groups import Arguments

HYBRID_STRATEGIES = ("hybrid_shard", "_hybrid_shard_zero2")


@dataclass(frozen=True)
class Degrees:
    """Number of ranks in each dimension of the mesh; the product is the world size.

    Expert ranks read different rows and hold different experts of a layer. All other parameters are sharded over them
    on the native backend, and replicated on SMP.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks in this layout."""
        return self.replicate * self.sharing

    @property
    def sharing(self) -> int:
        """Number of ranks that together hold one copy of weights, gradients and optimizer state."""
        return self.shard * self.context * self.tensor * self.expert

    @property
    def sharded(self) -> int:
        """Number of ranks over which parameters are sharded, context ranks included."""
        return self.shard * self.context

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different rows."""
        return self.replicate * self.shard * self.expert

    def data_rank(self, rank: int) -> int:
        """Return the share of the global batch that ``rank`` reads, with its context and tensor peers."""
        return rank // (self.context * self.tensor)


def plan(args: Arguments, world_size: int, local_world_size: int, *, smp: bool) -> Degrees:
    """Return the layout of a run's ranks on SMP or the native backend, from its sharding strategy and degrees.

    As in SMP v2, a shard degree overrides the strategy: 1 replicates on all ranks, the largest possible value shards
    over all ranks, and a divisor between the two does both. With 0 or None the strategy decides; its hybrid forms shard
    over one node. The shard degree includes the context degree, as context ranks hold different shards.

    Raises:
        ConfigError: A degree does not divide the ranks; the message lists the degrees that would.
    """
    tensor, context, expert = args.tensor_parallel_degree, args.context_parallel_degree, args.expert_parallel_degree
    processes = f"the {world_size} process{'es' if world_size > 1 else ''} of this run"
    for name in ("tensor_parallel_degree", "expert_parallel_degree", "context_parallel_degree", "hybrid_shard_degree"):
        degree = getattr(args, name)
        _check_divides(f"--{name} {degree}", degree or 1, world_size, processes)
    if smp and tensor > 1 and expert > 1:
        raise ConfigError(
            "--tensor_parallel_degree and --expert_parallel_degree cannot both be above 1 on SMP; --backend native can"
        )
    flags = [f"--{name}_parallel_degree {n}" for name, n in (("tensor", tensor), ("expert", expert)) if n > 1]
    _check_divides(f"the product of {' and '.join(flags)}", tensor * expert, world_size, processes)
    ranks = world_size // (tensor * expert)
    divided = f"the {ranks} ranks left by {' and '.join(flags)}" if flags else processes
    _check_divides(f"--context_parallel_degree {context}", context, ranks, divided)
    # SMP ignores the strategy, and shards over all remaining ranks, if another degree is above 1.
    strategy = "full_shard" if smp and max(tensor, context, expert) > 1 else args.sharding_strategy
    shard, source = ranks, f"--sharding_strategy {strategy}"
    if args.hybrid_shard_degree:
        shard, source = args.hybrid_shard_degree, f"--hybrid_shard_degree {args.hybrid_shard_degree}"
    elif strategy == "no_shard":
        shard = context
    elif strategy in HYBRID_STRATEGIES:
        shard = max(local_world_size // (tensor * expert), context)
        source += f" (one node of {local_world_size} ranks)"
    _check_divides(f"{source}: a shard degree of {shard}", shard, ranks, divided)
    _check_divides(f"--context_parallel_degree {context}", context, shard, f"the shard degree {shard} of {source}")
    return Degrees(replicate=ranks // shard, shard=shard // context, context=context, tensor=tensor, expert=expert)


LITTLE_WORK = 8192
"""Up to this many tokens per rank and micro-batch, communication between nodes takes longer than computation: 8 bytes
per parameter at 45 GB/s take as long as 6 FLOP per parameter and token at 620 TFLOP/s for 18,000 tokens."""


def advice_for_nodes(degrees: Degrees, local_world_size: int, tokens: int) -> str:
    """Return a warning if parameters are sharded over nodes and a rank's micro-batch has few ``tokens``; or ""."""
    if degrees.sharing <= local_world_size or tokens > LITTLE_WORK:
        return ""
    return (
        f"{degrees.sharing} ranks on nodes of {local_world_size} share one copy of the model, and a micro-batch is "
        f"{tokens} tokens per rank: the network will take longer than the computation. Give --sharding_strategy "
        "hybrid_shard, if the model fits a node, or a larger --train_batch_size"
    )


def before_launch(args: Arguments, world_size: int, local_world_size: int) -> list[Degrees]:
    """Return the possible layouts of a run, SMP's first: ``--backend auto`` may still choose either backend."""
    only_native = min(args.tensor_parallel_degree, args.expert_parallel_degree) > 1  # SMP refuses both together
    kinds = {"smp": (True,), "native": (False,)}.get(args.backend, (False,) if only_native else (True, False))
    return [plan(args, world_size, local_world_size, smp=smp) for smp in kinds]


def fewest_ranks(args: Arguments) -> int:
    """Return the smallest world size that fits the degrees of a run."""
    shards = args.hybrid_shard_degree or args.context_parallel_degree
    return shards * args.tensor_parallel_degree * args.expert_parallel_degree


def check_model(sizes: Mapping[str, int], *, seq_len: int, tensor: int = 1, context: int = 1, expert: int = 1) -> None:
    """Raise `ConfigError`, with the degrees that would work, if a degree does not divide the model.

    ``sizes`` are the sizes that tensor parallelism splits, by their names in messages; ``expert`` splits "experts".
    Key-value heads are not replicated, so they must not be fewer than tensor ranks.
    """
    if context > 1 and seq_len % (2 * context):
        raise ConfigError(
            f"--max_context_width {seq_len} does not split into the {2 * context} pieces that "
            f"--context_parallel_degree {context} needs; make it a multiple of {2 * context}"
        )
    if expert > 1:
        times = f" times --tensor_parallel_degree {tensor}" if tensor > 1 else ""
        experts = sizes.get("experts", 0)
        of_model = f"the {experts} experts of this model"
        _check_divides(f"--expert_parallel_degree {expert}{times}", expert * tensor, experts, of_model)
    per_rank = seq_len // context
    fitting = [d for d in divisors(per_rank) if all(size % d == 0 for size in sizes.values())]
    for name, size in sizes.items():
        if size % tensor:
            raise ConfigError(
                f"--tensor_parallel_degree {tensor} does not divide the {size} {name} of this model; "
                f"use one of {fitting}"
            )
    if per_rank % tensor:
        raise ConfigError(
            f"--tensor_parallel_degree {tensor} does not divide the {per_rank} tokens that a rank has of each "
            f"sequence; change --max_context_width, or use one of {fitting}"
        )


def check_model_on_smp(sizes: Mapping[str, int], *, seq_len: int, tensor: int, context: int, expert: int) -> None:
    """Check as `check_model` does, except for the vocabulary and the sequence, whose split SMP decides itself."""
    sizes = {name: size for name, size in sizes.items() if name != "tokens of vocabulary"}
    check_model({}, seq_len=seq_len, context=context)
    check_model(sizes, seq_len=tensor * seq_len, tensor=tensor, expert=expert)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _check_divides(degree_shown: str, degree: int, number: int, number_shown: str) -> None:
    if number % degree:
        would = ", ".join(map(str, divisors(number)))
        raise ConfigError(f"{degree_shown} does not divide {number_shown}; {would} would")
