"""Who shares what: from a number of ranks, a sharding strategy and degrees to a layout of the ranks."""

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
    """How many ranks each dimension of the mesh has; their product is the world size.

    Expert ranks read rows of their own. Between them they share a layer's experts; all other parameters are sharded
    over them on the native backend, and replicated on SMP.
    """

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks that this layout takes."""
        return self.replicate * self.sharing

    @property
    def sharing(self) -> int:
        """Number of ranks that hold one copy of weights, gradients and optimizer state between them."""
        return self.shard * self.context * self.tensor * self.expert

    @property
    def sharded(self) -> int:
        """Number of ranks over which parameters are sharded; context ranks hold different shards."""
        return self.shard * self.context

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read rows of their own."""
        return self.replicate * self.shard * self.expert

    def data_rank(self, rank: int) -> int:
        """Return which share of the global batch ``rank`` reads; its context and tensor peers read the same rows."""
        return rank // (self.context * self.tensor)


def plan(args: Arguments, world_size: int, local_world_size: int, *, smp: bool) -> Degrees:
    """Turn the sharding strategy and degrees of a run into a layout of its ranks, as SMP or the native backend has it.

    A shard degree, where given, overrides the strategy, as in SMP v2: 1 replicates everywhere, the largest possible
    value shards everywhere, any divisor between the two is hybrid. 0 or None leaves it to the strategy, whose hybrid
    forms then shard over one node. The context dimension is part of the shard degree, as in SMP v2: its ranks hold
    different shards of the parameters.

    Raises:
        ConfigError: A degree does not divide the ranks it is to divide; names those that would.
    """
    tensor, context, expert = (
        args.tensor_parallel_degree, args.context_parallel_degree, args.expert_parallel_degree,
    )  # fmt: skip
    # SMP shards over all remaining ranks as soon as another degree is above 1, whatever the strategy.
    strategy = "full_shard" if smp and max(tensor, context, expert) > 1 else args.sharding_strategy
    processes = "the 1 process" if world_size == 1 else f"the {world_size} processes"
    for name in ("tensor_parallel_degree", "expert_parallel_degree", "context_parallel_degree", "hybrid_shard_degree"):
        degree = getattr(args, name)
        if degree and world_size % degree:
            raise ConfigError(f"--{name} {degree} does not divide {processes} of this run; {_would(world_size)}")
    if smp and tensor > 1 and expert > 1:
        raise ConfigError(
            "--tensor_parallel_degree and --expert_parallel_degree cannot both be above 1 on SMP; --backend native can"
        )
    others = " and ".join(
        f"--{name}_parallel_degree {degree}" for name, degree in (("tensor", tensor), ("expert", expert)) if degree > 1
    )
    if world_size % (tensor * expert):
        raise ConfigError(f"{others} do not divide {processes} of this run together")
    ranks = world_size // (tensor * expert)
    of = f"the {ranks} ranks left by {others}" if others else f"{processes} of this run"
    if ranks % context:
        raise ConfigError(f"--context_parallel_degree {context} does not divide {of}; {_would(ranks)}")
    if args.hybrid_shard_degree:
        shard, source = args.hybrid_shard_degree, f"--hybrid_shard_degree {args.hybrid_shard_degree}"
    elif strategy == "no_shard":
        shard, source = context, "--sharding_strategy no_shard"
    elif strategy in HYBRID_STRATEGIES:
        shard = max(local_world_size // (tensor * expert), context)
        source = f"--sharding_strategy {strategy} (one node of {local_world_size} ranks)"
    else:
        shard, source = ranks, f"--sharding_strategy {strategy}"
    if ranks % shard:
        raise ConfigError(
            f"{source}: a shard degree of {shard} does not divide {of}; --hybrid_shard_degree {_would(ranks)}"
        )
    if shard % context:
        raise ConfigError(
            f"--context_parallel_degree {context} does not divide the shard degree {shard} of {source}; {_would(shard)}"
        )
    return Degrees(replicate=ranks // shard, shard=shard // context, context=context, tensor=tensor, expert=expert)


LITTLE_WORK = 8192
"""Tokens of a rank's micro-batch up to which gathering and reducing over nodes takes longer than computing: 8 bytes of
a parameter at 45 GB/s take as long as 6 FLOP of it per token at 620 TFLOP/s with 18,000 tokens."""


def advice_for_nodes(degrees: Degrees, local_world_size: int, tokens: int) -> str:
    """Return a warning where parameters are sharded over nodes and a rank's micro-batch has few ``tokens``; or ""."""
    if degrees.sharing <= local_world_size or tokens > LITTLE_WORK:
        return ""
    return (
        f"{degrees.sharing} ranks on nodes of {local_world_size} share one copy of the model, and a micro-batch is "
        f"{tokens} tokens per rank: the network will take longer than the computation. Give --sharding_strategy "
        "hybrid_shard, if the model fits a node, or a larger --train_batch_size"
    )


def before_launch(args: Arguments, world_size: int, local_world_size: int) -> list[Degrees]:
    """Return the layouts that a run may have, SMP's first, while ``--backend auto`` may still take either backend."""
    only_native = min(args.tensor_parallel_degree, args.expert_parallel_degree) > 1  # SMP refuses the two together
    kinds = {"smp": (True,), "native": (False,)}.get(args.backend, (False,) if only_native else (True, False))
    return [plan(args, world_size, local_world_size, smp=smp) for smp in kinds]


def fewest_ranks(args: Arguments) -> int:
    """Return the smallest number of processes that the degrees of a run can be laid out on."""
    shards = args.hybrid_shard_degree or args.context_parallel_degree
    return shards * args.tensor_parallel_degree * args.expert_parallel_degree


def check_model(sizes: Mapping[str, int], *, seq_len: int, tensor: int = 1, context: int = 1, expert: int = 1) -> None:
    """Raise `ConfigError`, naming the degrees that would work, where a degree does not divide the model.

    ``sizes`` are those that tensor parallelism splits, by what a message calls them; "experts" are what
    ``expert`` splits. Key-value heads are not replicated: fewer of them than tensor ranks are refused.
    """
    if context > 1 and seq_len % (2 * context):
        raise ConfigError(
            f"--max_context_width {seq_len} does not split into the {2 * context} pieces that "
            f"--context_parallel_degree {context} needs; make it a multiple of {2 * context}"
        )
    experts = sizes.get("experts", 0)
    if expert > 1 and experts % (expert * tensor):
        times = f" times --tensor_parallel_degree {tensor}" if tensor > 1 else ""
        raise ConfigError(
            f"--expert_parallel_degree {expert}{times} does not divide the {experts} experts of this model; "
            f"{_would(experts)}"
        )
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
    """Check as `check_model` does, but for the vocabulary and the sequence: only SMP knows whether it splits these."""
    sizes = {name: size for name, size in sizes.items() if name != "tokens of vocabulary"}
    check_model({}, seq_len=seq_len, context=context)
    check_model(sizes, seq_len=tensor * seq_len, tensor=tensor, expert=expert)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _would(number: int) -> str:
    return f"{', '.join(map(str, divisors(number)))} would"
