"""Flags that lower the memory of a run, by what is largest: of a plan, and of a run that is out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from smp_train.arguments import checkpointing
from smp_train.arguments.groups import Arguments
from smp_train.arguments.validation import check_together, check_values, refuse_natively
from smp_train.distributed.degrees import Degrees, divisors, plan
from smp_train.errors import ConfigError

WORTH = 0.05
"""Share of all memory below which a use is not worth a change."""
MORE_DEVICES = "more devices"


@dataclass(frozen=True)
class Uses:
    """What a device's memory holds, in one unit, by what lowers it."""

    state: float
    """Parameters, gradients and optimizer."""
    working: float
    """Activations and temporaries."""
    head: float
    """Logits and what the loss makes of them."""
    gathered: float = 0
    """Gathered parameters and buffers of collectives."""


def remedies(
    args: Arguments, uses: Uses, degrees: Degrees, local_world_size: int, *, gpu: bool, smp: bool = False,
    experts: int | None = None,
) -> Iterator[dict[str, Any] | None]:  # fmt: skip
    """Yield changes of flags, those against the largest use first and the cheapest of each; last, None: more devices.

    Each keeps the global batch, and none is refused for its flags and ranks.

    Args:
        args: Of the run.
        uses: Of a device.
        degrees: The layout of the run's ranks.
        local_world_size: Ranks of a node.
        gpu: The run is on GPUs.
        smp: It is on SMP.
        experts: Of a layer of the model, 0 of a dense one. None leaves out the degrees that a model may not divide by:
            those are for the caller to try.
    """
    world_size = degrees.world_size
    whole = degrees.sharing == world_size
    checkpointed = checkpointing.read(args.activation_checkpointing)[0] > 0
    offloads = gpu and not (smp and (args.fp8 or not checkpointed))
    dense, moe = experts is not None, bool(experts)
    working = max(uses.working, uses.head)
    rows: list[tuple[float, bool, dict[str, Any] | None]] = [
        (uses.head, not args.chunked_loss, {"chunked_loss": True}),
        (uses.working, args.activation_checkpointing != checkpointing.FULL, _checkpointed(args)),
        (working, True, _fewer_rows(args)),
        (uses.working, offloads and not args.sm_activation_offloading, {"sm_activation_offloading": True}),
        (working, dense, _larger(args, degrees, "context")),
        (max(working, uses.gathered), dense, _larger(args, degrees, "tensor")),
        (uses.gathered, args.forward_prefetch, {"forward_prefetch": False}),
        (uses.gathered, moe, _larger(args, degrees, "expert")),
        (uses.state, not whole, {"sharding_strategy": "full_shard", "hybrid_shard_degree": 0}),
        (uses.state, gpu and not smp and not args.cpu_offload, {"cpu_offload": True}),
    ]
    least = WORTH * (uses.state + uses.working + uses.head + uses.gathered)
    for size, possible, flags in sorted(rows, key=lambda row: -row[0]):
        if possible and flags and size > least and _accepted(args, flags, world_size, local_world_size, smp=smp):
            yield flags
    if whole and uses.state > least:
        yield None


def _checkpointed(args: Arguments) -> dict[str, Any]:
    share = {"selective_checkpointing": 1.0} if args.selective_checkpointing != 1 else {}
    return {"activation_checkpointing": checkpointing.FULL, **share}


def _fewer_rows(args: Arguments) -> dict[str, Any] | None:
    """Return a micro-batch divided by its smallest prime factor, in as many more steps; None for a single row."""
    if args.train_batch_size == 1:
        return None
    factor = divisors(args.train_batch_size)[1]
    return {"train_batch_size": args.train_batch_size // factor, **_more_steps(args, factor)}


def _larger(args: Arguments, degrees: Degrees, dimension: str) -> dict[str, Any] | None:
    """Return a degree times the smallest factor that the ranks leave; None where they leave none."""
    left = degrees.replicate * degrees.shard
    if left == 1:
        return None
    factor, name = divisors(left)[1], f"{dimension}_parallel_degree"
    # Expert ranks read rows of their own; with more tensor or context ranks, fewer do.
    return {name: factor * getattr(args, name), **(_more_steps(args, factor) if dimension != "expert" else {})}


def _more_steps(args: Arguments, factor: int) -> dict[str, Any]:
    return {"gradient_accumulation_steps": factor * args.gradient_accumulation_steps}


def _accepted(args: Arguments, flags: dict[str, Any], world_size: int, local_world_size: int, *, smp: bool) -> bool:
    """Return whether the program takes these flags on these ranks, whatever the model and the data."""
    changed = replace(args, **flags)
    try:
        check_values(changed)
        if not smp:
            refuse_natively(changed)
        check_together(changed)
        plan(changed, world_size, local_world_size, smp=smp)
    except ConfigError:
        return False
    return True
