"""Extrapolation of a setting's memory and work from another setting that was stepped."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from math import log2

from smp_train.arguments import checkpointing
from smp_train.planning.memory import Memory
from smp_train.planning.space import Setting, Space
from smp_train.planning.step_memory import EDGE, Part, Use
from smp_train.planning.work import Collective, Cost, Transfer, Work


def distance(start: Setting, target: Setting) -> tuple[float, ...]:
    """Return how much two settings differ, the differences that extrapolate worst first."""
    return (
        start.offload != target.offload, start.tensor != target.tensor and 1 in (start.tensor, target.tensor),
        start.context != target.context and 1 in (start.context, target.context),
        *(abs(log2(getattr(start, name) / getattr(target, name))) for name in ("tensor", "context", "rows", "shard")),
    )  # fmt: skip


def extrapolated(memory: Memory, start: Setting, target: Setting, space: Space) -> Memory:
    """Return the memory and the work of the target, in proportion to another setting with the same checkpointing.

    State scales with the ranks that share it, activations with this rank's tokens, collectives with the size of their
    tensors. The result is too small if ``start`` lacks the collectives of a dimension: only `sent_by_tensor_ranks` is
    added.
    """
    layers, steps = space.run.spec.config.num_hidden_layers, target.micro_steps
    state, tensor, share = start.sharing / target.sharing, start.tensor / target.tensor, target.share / start.share
    keeps_results = target.checkpointing != checkpointing.FULL  # results of operations and collectives
    whole = target.rows * start.context / (start.rows * target.context)
    by_use = {
        Use.PARAMETERS: state, Use.GRADIENTS: state, Use.OPTIMIZER: state, Use.GATHERED: tensor, Use.ACTIVATIONS: share,
        Use.TEMPORARIES: min(share, tensor),  # recomputed activations and unsharded gradients
        Use.COMMUNICATION: whole if keeps_results and min(start.tensor, target.tensor) > 1 else tensor,
        Use.HEAD: min(1.0, share), Use.HOST: share,
    }  # fmt: skip
    most = max(peak[Use.ACTIVATIONS] for peak in memory.peaks.values())
    sent = sent_by_tensor_ranks(target, space) if target.tensor > start.tensor == 1 else 0
    # A layer's saved tensors are offloaded; the results of single operations that its checkpoint keeps are not.
    inputs = hidden_states(target, space) * layers // target.tensor
    offloadable = inputs if checkpointing.read(target.checkpointing)[0] == 1 else sys.maxsize
    peaks = {}
    for phase, peak in memory.peaks.items():
        scaled: Counter[str] = Counter({use: int(size * by_use.get(use, 1)) for use, size in peak.items()})
        if keeps_results and most:
            scaled[Use.COMMUNICATION] += int(sent / 2 * peak[Use.ACTIVATIONS] / most)
        if target.offload and not start.offload:
            scaled[Use.HOST] = min(scaled[Use.ACTIVATIONS], offloadable)
            scaled[Use.ACTIVATIONS] -= scaled[Use.HOST]
        peaks[phase] = scaled
    work = _extrapolated_work(memory.work, start, target, space)
    for part in (Part.FORWARD, Part.BACKWARD) if sent else ():
        collective = Collective(Transfer.GATHER, "tensor", *_ranks_and_nodes(target.tensor, 1, space))
        work.collectives[(part, -EDGE - 1), collective] = Cost(0, sent * steps, 4 * layers * steps)
    pinned, saved = int(memory.pinned * state), int(memory.saved * state)
    return replace(memory, peaks=peaks, work=work, pinned=pinned, saved=saved)


def sent_by_tensor_ranks(target: Setting, space: Space) -> int:
    """Return a lower bound on the bytes that tensor ranks exchange in a forward pass; in a backward pass as many.

    Each layer gathers the hidden states before attention and before the feed-forward layer, and reduces them after
    each. Gathered tensors are kept, unless the layer is recomputed.
    """
    return 4 * space.run.spec.config.num_hidden_layers * hidden_states(target, space)


def hidden_states(target: Setting, space: Space) -> int:
    """Return the bytes of a micro-batch's hidden states, over all tensor ranks."""
    run = space.run
    return int(target.rows * run.seq_len // target.context * run.spec.config.hidden_size * (2 if run.bf16 else 4))


def _ranks_and_nodes(ranks: int, stride: int, space: Space) -> tuple[int, int]:
    """Return ``ranks`` and the number of nodes that they span, if neighbours are ``stride`` ranks apart."""
    return ranks, min(-(-ranks * stride // space.run.per_node), ranks)


def _extrapolated_work(work: Work, start: Setting, target: Setting, space: Space) -> Work:
    """Return the target's work: the same operations on the same number of devices, in a different number of kernels."""
    tensor, state = start.tensor / target.tensor, start.sharing / target.sharing
    steps = target.micro_steps / start.micro_steps
    operations = {
        (phase, name): cost._replace(size=cost.size * state) if phase[0] == Part.UPDATE
        else cost._replace(calls=cost.calls * steps)
        for (phase, name), cost in work.operations.items()
    }  # fmt: skip
    dimensions = {  # ranks, stride, factor of bytes, factor of calls
        "shard": (target.shard, target.tensor, steps * tensor, steps),
        "context": (target.context, target.tensor, target.context / start.context, steps),
        "tensor": (target.tensor, 1, 1 / tensor, steps),
        "replicate": (space.run.devices // target.sharing, target.sharing, state, 1),
    }
    collectives = {}
    for (phase, collective), cost in work.collectives.items():
        if (known := dimensions.get(collective.dimension.partition("_")[0])) is not None:
            ranks, stride, bytes_factor, calls_factor = known
            collective = Collective(collective.kind, collective.dimension, *_ranks_and_nodes(ranks, stride, space))
            cost = cost._replace(size=cost.size * bytes_factor, calls=cost.calls * calls_factor)
        collectives[phase, collective] = cost
    return Work(operations, collectives)
