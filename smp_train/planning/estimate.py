"""The memory and the work of a step, from two shallower models that differ by one repetition of the layers' pattern."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext

from smp_train.arguments import Arguments, checkpointing
from smp_train.distributed import Runtime
from smp_train.models.flops import count_parameters
from smp_train.models.resolve import ModelSpec
from smp_train.planning.stepping import EDGE
from smp_train.planning.world import Memory, of_depth, step, without_attention_dropout, world


def estimate(
    args: Arguments, spec: ModelSpec, *, devices: int, per_node: int, seq_len: int, gpu: bool = True,
    ranks: Runtime | None = None,
) -> Memory:  # fmt: skip
    """Return what a step takes and does on rank 0, whose shards are the largest.

    Bytes and operations of a phase are linear in the number of layers once each kind of layer is there: at both ends,
    and one repetition between. So two shallow models are stepped, and their difference is multiplied; the whole model
    where it is not deeper, or where the layers' parameters do not repeat.

    Args:
        args: Of the run.
        spec: The model.
        devices: Ranks of the run.
        per_node: Those of a node.
        seq_len: Tokens of a row.
        gpu: The run is on GPUs.
        ranks: Of an open `world` of these devices, for several estimates to share: what torch caches of one world is
            wrong in the next.
    """
    spec = without_attention_dropout(spec) if gpu else spec
    depth = spec.config.num_hidden_layers
    period = _period(args, spec)
    fewest = 2 * EDGE + 1 + (args.activation_loading_horizon + 1 if args.sm_activation_offloading else 0)
    small = fewest + (depth - fewest) % period
    large = small + period
    with world(devices, per_node) if ranks is None else nullcontext(ranks) as place:
        if large >= depth or not _repeats(spec, small, period):
            return step(args, spec, place, seq_len=seq_len, gpu=gpu)
        one, two = (step(args, of_depth(spec, layers), place, seq_len=seq_len, gpu=gpu) for layers in (small, large))
    return _deeper(one, two, (depth - small) // period)


def _period(args: Arguments, spec: ModelSpec) -> int:
    """Return after how many layers their checkpointing and their kinds repeat."""
    depth = spec.config.num_hidden_layers
    period = checkpointing.read(args.activation_checkpointing)[0].denominator
    for value in vars(spec.config).values():
        if isinstance(value, list) and len(value) == depth:
            repeats = next(n for n in range(1, depth + 1) if value[n:] == value[:-n])
            period = math.lcm(period, repeats)
    return period


def _repeats(spec: ModelSpec, small: int, period: int) -> bool:
    """Return whether the parameters of the layers that are left out are those of the layers that are stepped."""
    depth = spec.config.num_hidden_layers
    one, two = (count_parameters(of_depth(spec, layers).config) for layers in (small, small + period))
    return count_parameters(spec.config) == one + (two - one) * ((depth - small) // period)


def _deeper(one: Memory, two: Memory, times: int) -> Memory:
    def grown(first: int, second: int) -> int:
        return first + times * (second - first)

    peaks = {}
    for phase, peak in one.peaks.items():
        other = two.peaks[phase]
        peaks[phase] = Counter({use: grown(peak[use], other[use]) for use in {*peak, *other}})
    return Memory(
        peaks, grown(one.trained, two.trained), one.work.grown(two.work, times),
        pinned=grown(one.pinned, two.pinned), saved=grown(one.saved, two.saved),
    )  # fmt: skip
