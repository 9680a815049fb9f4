"""Changes of flags that lower what a run needs of each device, each of them planned."""

from __future__ import annotations

from dataclasses import replace

from smp_train.arguments import Arguments
from smp_train.arguments.chosen import words
from smp_train.arguments.remedies import MORE_DEVICES, Uses, remedies
from smp_train.distributed import Runtime
from smp_train.errors import ConfigError
from smp_train.models.resolve import ModelSpec
from smp_train.models.traits import number_of_experts
from smp_train.planning import fitting
from smp_train.planning.estimate import estimate
from smp_train.planning.tracker import ACTIVATIONS, BACKWARD, COMMUNICATION, GATHERED, HEAD
from smp_train.planning.world import Memory

TRIED = 4
"""Changes that are planned; each takes as long as the plan."""


def lower(
    args: Arguments, spec: ModelSpec, memory: Memory, ranks: Runtime, *, seq_len: int, gpu: bool, there: int | None,
    host: int | None = None,
) -> dict[str, int | None]:  # fmt: skip
    """Return what each device needs, in bytes, with one change of flags each: of those planned, those that lower it.

    The order is that of `remedies`. At most `TRIED` are planned, none after the first that fits; None is the size
    with `MORE_DEVICES`.

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
    at_peak = fitting.at_peak(args, memory, gpu=gpu)

    def of(*kinds: str) -> int:
        return sum(at_peak.get(kind, 0) for kind in kinds)

    uses = Uses(of(*fitting.STATE), of(ACTIVATIONS, BACKWARD), of(HEAD), of(GATHERED, COMMUNICATION))
    now, tried, fits = fitting.needed(args, memory, gpu=gpu), 0, False
    found: dict[str, int | None] = {}
    for flags in remedies(
        args, uses, ranks.world_size, ranks.local_world_size, gpu=gpu, experts=number_of_experts(spec.config)
    ):
        if flags is None:
            found[MORE_DEVICES] = None
        elif tried < TRIED and not fits:
            changed = replace(args, **flags)
            try:
                least = estimate(
                    changed, spec, devices=ranks.world_size, per_node=ranks.local_world_size, seq_len=seq_len, gpu=gpu,
                    ranks=ranks,
                )  # fmt: skip
            except ConfigError:  # a degree that does not divide the model
                continue
            tried += 1
            needed = fitting.needed(changed, least, gpu=gpu)
            if needed < now and (host is None or fitting.host_needed(changed, least) <= host):
                found[words(flags)] = needed
                fits = there is not None and needed <= there
    return found
