"""Changes of flags that lower what a run needs of each device, each of them planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from smp_train.arguments import Arguments
from smp_train.arguments.chosen import words
from smp_train.distributed import Runtime
from smp_train.distributed.degrees import plan as layout
from smp_train.errors import ConfigError
from smp_train.models.resolve import ModelSpec
from smp_train.models.traits import number_of_experts
from smp_train.planning import fitting
from smp_train.planning.estimate import estimate
from smp_train.planning.tracker import ACTIVATIONS, BACKWARD, COMMUNICATION, GATHERED, HEAD
from smp_train.planning.world import Memory

WORTH = 0.05
"""Of the peak: the smallest use that is lowered."""
TRIED = 4
"""Changes that are planned; each takes as long as the plan."""
MORE_DEVICES = "more devices"


def lower(
    args: Arguments, spec: ModelSpec, memory: Memory, ranks: Runtime, *, seq_len: int, gpu: bool, there: int | None,
    host: int | None = None,
) -> dict[str, int | None]:  # fmt: skip
    """Return what each device needs with one change each, in bytes: those that lower it, up to one that fits.

    Those against the largest use come first, and of each use the cheapest; `TRIED` are planned. None is of
    `MORE_DEVICES`.

    Args:
        args: Of the run.
        spec: The model.
        memory: What it takes.
        ranks: Of the open `smp_train.planning.world.world` in which it was planned.
        seq_len: Tokens of a row.
        gpu: The run is on GPUs.
        there: Bytes of each device; None: unknown.
        host: Of the host's memory for each; None: unknown.
    """
    now, tried = fitting.needed(args, memory, gpu=gpu), 0
    found: dict[str, int | None] = {}
    for flags in _changes(args, spec, fitting.at_peak(args, memory, gpu=gpu), ranks, gpu=gpu):
        if flags is None:
            found[MORE_DEVICES] = None
            continue
        changed = replace(args, **flags)
        try:
            least = estimate(
                changed, spec, devices=ranks.world_size, per_node=ranks.local_world_size, seq_len=seq_len, gpu=gpu,
                ranks=ranks,
            )  # fmt: skip
        except ConfigError:  # a degree that does not divide the model, or the ranks
            continue
        tried += 1
        needed = fitting.needed(changed, least, gpu=gpu)
        if needed < now and (host is None or fitting.host_needed(changed, least) <= host):
            found[words(flags)] = needed
            if there is not None and needed <= there:
                break
        if tried == TRIED:
            break
    return found


def _changes(
    args: Arguments, spec: ModelSpec, at_peak: dict[str, int], ranks: Runtime, *, gpu: bool
) -> Iterator[dict[str, Any] | None]:  # fmt: skip
    """Yield the flags to change, None for more devices; the rows of a step stay the same."""
    state = sum(at_peak.get(use, 0) for use in fitting.STATE)
    working = at_peak.get(ACTIVATIONS, 0) + at_peak.get(BACKWARD, 0)
    head = at_peak.get(HEAD, 0)
    gathered = at_peak.get(GATHERED, 0) + at_peak.get(COMMUNICATION, 0)
    whole = layout(args, ranks.world_size, ranks.local_world_size, smp=False).sharing == ranks.world_size
    more_steps = {"gradient_accumulation_steps": 2 * args.gradient_accumulation_steps}

    def doubled(dimension: str) -> dict[str, Any]:
        name = f"{dimension}_parallel_degree"
        return {name: 2 * getattr(args, name), **(more_steps if dimension != "expert" else {})}

    remedies: list[tuple[int, bool, dict[str, Any] | None]] = [
        (head, not args.chunked_loss, {"chunked_loss": True}),
        (working, args.activation_checkpointing != "full", {"activation_checkpointing": "full"}),
        (max(working, head), args.train_batch_size > 1, {"train_batch_size": args.train_batch_size // 2, **more_steps}),
        (working, gpu and not args.sm_activation_offloading, {"sm_activation_offloading": True}),
        (max(working, head), True, doubled("context")),
        (max(working, head, gathered), True, doubled("tensor")),
        (gathered, args.forward_prefetch, {"forward_prefetch": False}),
        (gathered, bool(number_of_experts(spec.config)), doubled("expert")),
        (state, not whole, {"sharding_strategy": "full_shard", "hybrid_shard_degree": 0}),
        (state, whole, None),
        (state, gpu and not args.cpu_offload, {"cpu_offload": True}),
    ]
    useful = [(size, flags) for size, possible, flags in remedies if possible and size > WORTH * sum(at_peak.values())]
    yield from (flags for _, flags in sorted(useful, key=lambda remedy: -remedy[0]))
