"""Extrapolation of the memory and the work of a setting from another one that was stepped."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from math import log2

from smp_train.arguments import checkpointing
from smp_train.planning.space import Setting, Space
from smp_train.planning.stepping import BACKWARD as GOING_BACK
from smp_train.planning.stepping import EDGE, FORWARD, UPDATE
from smp_train.planning.tracker import (
    ACTIVATIONS,
    BACKWARD,
    COMMUNICATION,
    GATHERED,
    GRADIENTS,
    HEAD,
    HOST,
    OPTIMIZER,
    PARAMETERS,
)
from smp_train.planning.work import GATHER, Collective, Cost, Work
from smp_train.planning.world import Memory


def distance(one: Setting, other: Setting) -> tuple[float, ...]:
    """Return how unlike two settings are."""
    return (
        one.offload != other.offload, one.tensor != other.tensor and 1 in (one.tensor, other.tensor),
        one.context != other.context and 1 in (one.context, other.context), abs(log2(one.tensor / other.tensor)),
        abs(log2(one.context / other.context)), abs(log2(one.rows / other.rows)), abs(log2(one.shard / other.shard)),
    )  # fmt: skip


def scaled(memory: Memory, of: Setting, to: Setting, space: Space) -> Memory:
    """Return the memory and the work of a setting in proportion to another's, of the same checkpointing.

    State scales with the ranks that share it, activations with this rank's tokens, collectives with the size of what
    is sent. Underestimates where the reference lacks a dimension's collectives: only `sent_by_tensor_ranks` is added.
    """
    state, tensor, share = of.sharing / to.sharing, of.tensor / to.tensor, to.share / of.share
    kept = to.checkpointing != checkpointing.FULL  # results of operations, and those of collectives among them
    whole = to.rows * of.context / (of.rows * to.context)
    by_use = {
        PARAMETERS: state, GRADIENTS: state, OPTIMIZER: state, GATHERED: tensor, ACTIVATIONS: share,
        BACKWARD: min(share, tensor),  # activations that are recomputed, and whole gradients
        COMMUNICATION: whole if kept and min(of.tensor, to.tensor) > 1 else tensor, HEAD: min(1.0, share), HOST: share,
    }  # fmt: skip
    most = max(peak[ACTIVATIONS] for peak in memory.peaks.values())
    sent = sent_by_tensor_ranks(to, space) if to.tensor > of.tensor == 1 else 0
    # Offloaded is what a layer saves; what a checkpoint keeps of its operations stays on the device.
    inputs = hidden_states(to, space) * space.spec.config.num_hidden_layers // to.tensor
    moved = inputs if checkpointing.read(to.checkpointing)[0] == 1 else sys.maxsize
    peaks = {}
    for phase, peak in memory.peaks.items():
        now: Counter[str] = Counter({use: int(size * by_use.get(use, 1)) for use, size in peak.items()})
        if kept and most:
            now[COMMUNICATION] += int(sent / 2 * peak[ACTIVATIONS] / most)
        if to.offload and not of.offload:
            now[HOST] = min(now[ACTIVATIONS], moved)
            now[ACTIVATIONS] -= now[HOST]
        peaks[phase] = now
    work = _scaled(memory.work, of, to, space)
    layers, steps = space.spec.config.num_hidden_layers, to.micro_steps
    for part in (FORWARD, GOING_BACK) if sent else ():
        between = (part, -EDGE - 1), Collective(GATHER, "tensor", *_ranks(to.tensor, 1, space))
        work.collectives[between] = Cost(0, sent * steps, 4 * layers * steps)
    pinned, saved = int(memory.pinned * state), int(memory.saved * state)
    return replace(memory, peaks=peaks, work=work, pinned=pinned, saved=saved)


def sent_by_tensor_ranks(to: Setting, space: Space) -> int:
    """Return the bytes of a forward pass, and of a backward pass, that tensor ranks send each other at least.

    A layer gathers the hidden states of its group before attention and before the feed-forward layer, and reduces them
    behind each; what is gathered is kept, unless the layer is recomputed.
    """
    return 4 * space.spec.config.num_hidden_layers * hidden_states(to, space)


def hidden_states(to: Setting, space: Space) -> int:
    """Return the bytes of the hidden states of a micro-batch, of all tensor ranks."""
    return int(to.rows * space.seq_len // to.context * space.spec.config.hidden_size * (2 if space.args.bf16 else 4))


def _ranks(ranks: int, stride: int, space: Space) -> tuple[int, int]:
    """Return a dimension's ranks and the nodes that they lie on, every ``stride``-th rank being one of them."""
    return ranks, min(-(-ranks * stride // space.per_node), ranks)


def _scaled(work: Work, of: Setting, to: Setting, space: Space) -> Work:
    """Operations of a step are the same, spread over as many devices; only how often they start differs."""
    steps, tensor, state = to.micro_steps / of.micro_steps, of.tensor / to.tensor, of.sharing / to.sharing
    operations = {
        (phase, name): cost._replace(size=cost.size * state) if phase[0] == UPDATE
        else cost._replace(calls=cost.calls * steps)
        for (phase, name), cost in work.operations.items()
    }  # fmt: skip
    sizes = {  # by dimension: its ranks, how far apart they are, and the factors of size and calls
        "shard": (to.shard, to.tensor, steps * tensor, steps),
        "context": (to.context, to.tensor, to.context / of.context, steps),
        "tensor": (to.tensor, 1, 1 / tensor, steps),
        "replicate": (space.devices // to.sharing, to.sharing, state, 1),
    }
    collectives = {}
    for (phase, each), cost in work.collectives.items():
        key = each
        if (known := sizes.get(each.dimension.partition("_")[0])) is not None:
            ranks, stride, larger, often = known
            key = Collective(each.kind, each.dimension, *_ranks(ranks, stride, space))
            cost = cost._replace(size=cost.size * larger, calls=cost.calls * often)
        collectives[phase, key] = cost
    return Work(operations, collectives)
