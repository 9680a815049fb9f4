"""Two steps of a run on one rank: the memory of each of their phases, and what the second does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from smp_train import train_utils
from smp_train.arguments import Arguments
from smp_train.backends.base import Backend
from smp_train.data.batch import Batch
from smp_train.models.build import decoder_layers
from smp_train.planning import work
from smp_train.planning.tracker import GRADIENTS, OPTIMIZER, PARAMETERS, LiveMemory

FORWARD, HEAD, BACKWARD, UPDATE = "forward", "head", "backward", "update"
MICRO_BATCHES = 2
"""Micro-batches of a planned step, at most: the last one, and one that stands for all before it."""
EDGE = 2
"""Layers at either end whose memory differs from that of the layers between: gathered before others, or not freed."""

Phase = tuple[str, int]
"""A part of the step and the layer: from the start, or from the end below 0; every other layer lies between the two."""


def peaks(
    args: Arguments, backend: Backend, model: nn.Module, *, seq_len: int, counter: work.WorkCounter | None = None
) -> dict[Phase, Counter[str]]:  # fmt: skip
    """Return the largest bytes of live tensors of two steps on this rank, by phase and use; collective.

    The state of the optimizer is there from the first update on, so the second step shows what later ones take.

    Args:
        args: Of the run.
        backend: Which built the model.
        model: With real parameters, or with fake ones in the mode of these.
        seq_len: Tokens of a row.
        counter: Of what the second step does.
    """
    optimizer = train_utils.build_optimizer(args, backend, model)
    device = backend.topology.device
    tracker = LiveMemory()
    handles = _mark(model, tracker)

    def before_update(*_: object) -> None:
        hold_gradients(model, tracker)
        tracker.enter((UPDATE, 0))

    optimizer.register_step_pre_hook(before_update)
    try:
        with tracker:
            tracker.enter((FORWARD, 0))
            tracker.hold(model.parameters(), PARAMETERS)
            tracker.hold(model.buffers(), PARAMETERS)
            for again in (False, True):
                batches = MicroBatches(args, seq_len, counter)
                if again and counter is not None:
                    tracker.count = counter.add
                train_utils.train_step(
                    backend, model, optimizer, batches, tokens=torch.ones((), dtype=torch.int64, device=device),
                    lr=args.lr, max_grad_norm=args.grad_clip, skip_update=torch.zeros((), device=device),
                )  # fmt: skip
                tracker.count, tracker.in_backward = None, False
                tracker.enter((FORWARD, 0))
                states = (each for state in optimizer.state.values() for each in state.values())
                tracker.hold((each for each in states if isinstance(each, torch.Tensor)), OPTIMIZER)
    finally:
        for handle in handles:
            handle.remove()
    return tracker.peaks


class MicroBatches(list[Batch]):
    """A rank's micro-batches of a step; while one runs, the counter knows how many it stands for."""

    def __init__(self, args: Arguments, seq_len: int, counter: work.WorkCounter | None) -> None:
        self.planned, self.counter = args.gradient_accumulation_steps, counter
        shape = (args.train_batch_size, seq_len)
        batches = min(args.gradient_accumulation_steps, MICRO_BATCHES)
        super().__init__(Batch(ids, ids) for ids in torch.zeros(batches, *shape, dtype=torch.int64))

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(super().__iter__()):
            if self.counter is not None:
                self.counter.times = 1 if index == len(self) - 1 else self.planned - 1
            yield batch


def hold_gradients(model: nn.Module, tracker: LiveMemory) -> None:
    """Count as gradients what was a buffer of their reduction until now."""
    tracker.hold((each.grad for each in model.parameters() if each.grad is not None), GRADIENTS)


def _mark(model: nn.Module, tracker: LiveMemory) -> list[Any]:
    """Let the layers and the head tell the tracker which phase begins."""
    layers = [layer for _, layer in decoder_layers(model)]
    count = len(layers)

    def place(index: int) -> int:
        return index if index < EDGE else max(index - count, -EDGE - 1)

    def at(part: str, index: int, in_backward: bool) -> None:
        tracker.in_backward, tracker.in_head = in_backward, part == HEAD
        tracker.enter((part, index))
        if in_backward:
            hold_gradients(model, tracker)

    def before(index: int, *_: Any) -> None:
        at(FORWARD, place(index), False)

    def after(index: int, _module: Any, _inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if output.requires_grad:
            output.register_hook(lambda _: at(BACKWARD, place(index), True))
        if index == count - 1:
            at(HEAD, 0, False)

    handles: list[Any] = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(partial(before, index)))
        handles.append(layer.register_forward_hook(partial(after, index)))
    return handles
