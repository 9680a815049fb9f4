"""Flags that change a run's memory and speed but not its results; a search or a remedy for lack of memory sets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from smp_train.arguments import checkpointing
from smp_train.arguments.groups import Arguments
from smp_train.arguments.validation import check_flags
from smp_train.distributed.degrees import Degrees, divisors, plan
from smp_train.errors import ConfigError

if TYPE_CHECKING:
    from smp_train.arguments.parse import Resolved

SHARDING = ("sharding_strategy", "hybrid_shard_degree")
CHECKPOINTING = ("activation_checkpointing", "selective_checkpointing")
SEARCHED = (
    "tensor_parallel_degree", "context_parallel_degree", *SHARDING, *CHECKPOINTING, "sm_activation_offloading",
    "train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
"""Flags that ``plan --search`` and ``--auto`` choose if the user does not set them."""
MIN_SHARE = 0.05
"""A use with less than this share of the memory is not worth a change."""
MORE_DEVICES = "more devices"


def fixed_flags(resolved: Resolved) -> frozenset[str]:
    """Return the flags in `SEARCHED` that the user set, which a search keeps."""
    return frozenset(name for name in SEARCHED if resolved.given(name))


@dataclass(frozen=True)
class Uses:
    """A device's memory by use, in one unit."""

    state: float
    """Parameters, gradients and optimizer."""
    working: float
    """Activations and temporaries."""
    head: float
    """Logits, and tensors of the same size in the loss."""
    gathered: float = 0
    """Gathered parameters and buffers of collectives."""


def remedies(
    args: Arguments, uses: Uses, degrees: Degrees, local_world_size: int, *, gpu: bool, smp: bool = False,
    experts: int | None = None,
) -> Iterator[dict[str, Any] | None]:  # fmt: skip
    """Yield changes of flags that save memory; a final None stands for more devices.

    Changes that reduce the largest use come first; among changes for one use, the cheapest comes first. Each change
    keeps the global batch, and is valid with the other flags and the number of ranks.

    Args:
        args: The run's settings.
        uses: A device's memory.
        degrees: The layout of the run's ranks.
        local_world_size: Ranks per node.
        gpu: The run is on GPUs.
        smp: The run is on SMP.
        experts: Experts per layer, 0 for a dense model. With None, larger degrees are left out, because the model may
            not be divisible by them.
    """
    full_shard = degrees.sharing == degrees.world_size
    checkpointed = checkpointing.read(args.activation_checkpointing)[0] > 0
    offloads = gpu and not (smp and (args.fp8 or not checkpointed))
    divisible, moe = experts is not None, bool(experts)
    working = max(uses.working, uses.head)
    every_layer = {"selective_checkpointing": 1.0} if args.selective_checkpointing != 1 else {}
    rows: list[tuple[float, bool, dict[str, Any] | None]] = [
        (uses.head, not args.chunked_loss, {"chunked_loss": True}),
        (uses.working, args.activation_checkpointing != checkpointing.FULL,
         {"activation_checkpointing": checkpointing.FULL, **every_layer}),
        (working, True, _fewer_rows(args)),
        (uses.working, offloads and not args.sm_activation_offloading, {"sm_activation_offloading": True}),
        (working, divisible, _larger(args, degrees, "context")),
        (max(working, uses.gathered), divisible, _larger(args, degrees, "tensor")),
        (uses.gathered, args.forward_prefetch, {"forward_prefetch": False}),
        (uses.gathered, moe, _larger(args, degrees, "expert")),
        (uses.state, not full_shard, {"sharding_strategy": "full_shard", "hybrid_shard_degree": 0}),
        (uses.state, gpu and not smp and not args.cpu_offload, {"cpu_offload": True}),
    ]  # fmt: skip
    least = MIN_SHARE * (uses.state + uses.working + uses.head + uses.gathered)
    for size, possible, changes in sorted(rows, key=lambda row: -row[0]):
        if not changes or not possible or size <= least:
            continue
        if _accepted(replace(args, **changes), degrees.world_size, local_world_size, smp=smp):
            yield changes
    if full_shard and uses.state > least:
        yield None


def _fewer_rows(args: Arguments) -> dict[str, Any] | None:
    """Return a micro-batch divided by its smallest prime factor, in more micro-steps; None for a single row."""
    if args.train_batch_size == 1:
        return None
    factor = divisors(args.train_batch_size)[1]
    return {"train_batch_size": args.train_batch_size // factor, **_more_steps(args, factor)}


def _larger(args: Arguments, degrees: Degrees, dimension: str) -> dict[str, Any] | None:
    """Return a degree times the smallest factor of the remaining ranks; None if no ranks remain."""
    remaining = degrees.replicate * degrees.shard
    if remaining == 1:
        return None
    factor, name = divisors(remaining)[1], f"{dimension}_parallel_degree"
    # Tensor and context ranks share their rows, so fewer rows are read; expert ranks read different rows.
    return {name: factor * getattr(args, name), **(_more_steps(args, factor) if dimension != "expert" else {})}


def _more_steps(args: Arguments, factor: int) -> dict[str, Any]:
    return {"gradient_accumulation_steps": factor * args.gradient_accumulation_steps}


def _accepted(args: Arguments, world_size: int, local_world_size: int, *, smp: bool) -> bool:
    """Return whether training accepts these settings on these ranks, for any model and data."""
    try:
        check_flags(args, natively=not smp)
        plan(args, world_size, local_world_size, smp=smp)
    except ConfigError:
        return False
    return True
