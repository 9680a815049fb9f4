"""Response to a spike of loss or gradient norm: name samples and layer, then warn, skip the update, or roll back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smp_train import distributed, train_utils
from smp_train.checkpoints.find import open_verified
from smp_train.distributed import ALL_RANKS, heartbeat
from smp_train.distributed.dtensor import local_tensor
from smp_train.errors import SmpTrainError
from smp_train.models.hub_names import canonical_name
from smp_train.parallel import compile
from smp_train.run.saving import end_saves, load, report_saves
from smp_train.run.state import Run
from smp_train.telemetry.logging_utils import get_logger
from smp_train.train_utils import Limits

log = get_logger()

NAMED = 4
"""A message names at most this many samples; the event in metrics.jsonl names all."""


class Part(NamedTuple):
    """One rank's part of a step's batch, with the results of the repeated forward passes."""

    rank: int
    dp_rank: int
    names: list[list[str]]
    """Sample names of each micro-batch."""
    losses: list[float]
    """Mean loss of each micro-batch, in nats per token; empty if the passes were not repeated."""
    layer: tuple[int, str] | None
    """The first module whose output is not finite: its number in the order of modules, and its name."""
    damaged: bool
    """Whether that module's weights are not finite."""


def respond(run: Run, pending: train_utils.PendingStep, numbers: train_utils.StepNumbers) -> bool:
    """Apply --on_spike to a step whose loss or gradient norm exceeds its limit; collective.

    Returns True if the weights lack the step's update; the step queued after it must then be repeated. Raises
    `SmpTrainError` if the run ends here, with nothing saved of this step.
    """
    spikes, step = run.spikes, pending.step
    heartbeat.enter(heartbeat.SAVE)  # this phase has no time limit
    rejected = spikes.skips_updates or numbers.not_finite
    checkpoint = None
    if spikes.policy == "rollback":
        report_saves(run)  # the save in progress may be the checkpoint to go back to
        checkpoint = run.checkpoints.scheduled_before(step)
    parts = examine(run, pending, run_again=rejected)
    damaged = any(part.damaged for part in parts)
    action = "warn"
    if rejected:
        action = "rollback" if checkpoint else "stop" if damaged or spikes.policy == "warn" else "skip"
    run.metrics.event(
        "spike", step=step, loss=numbers.loss, grad_norm=numbers.grad_norm, action=action, first=pending.first,
        last=pending.consumed - 1, samples={str(part.dp_rank): [*chain(*part.names)] for part in parts},
        layer=first_layer(parts),
    )  # fmt: skip
    spike = describe(pending, numbers, spikes.limits(step), parts)
    if not rejected:
        log.warning("%s; its update was made (--on_spike skip leaves it out)", spike, extra=ALL_RANKS)
        return False
    try:
        if action == "stop":
            remedy = "or with --on_spike skip"
            if damaged:  # the damage is older than this step; later saves would replace good checkpoints
                remedy = "or with --on_spike rollback: no skipped step mends weights"
            raise SmpTrainError(
                f"{spike}. Nothing was saved of it; resume from the last checkpoint with a lower --lr or --grad_clip, "
                f"{remedy}"
            )
        if checkpoint is None:
            spikes.skip_one(step)
            why = "" if spikes.policy == "skip" else ", as there is no checkpoint to go back to"
            log.warning("%s; its update is skipped%s", spike, why, extra=ALL_RANKS)
        else:
            first = roll_back(run, step, checkpoint) + 1
            text = "%s; back to %s, steps %d to %d are passed over"
            log.warning(text, spike, checkpoint, first, step, extra=ALL_RANKS)
    except SmpTrainError as failure:
        failure.repeats = not run.runtime.is_main  # raised on all ranks, printed by one
        end_saves(run)
        raise
    if run.audit is not None:
        run.audit.skip(*spikes.skipped[-1])
    return True


def report_divergence(run: Run, step: int, loss: float, start: float) -> None:
    """Report that the loss has risen far above the loss of the first steps. Not collective."""
    lr = run.args.lr
    log.warning(
        "step %d: the run diverges: the loss is %.3g, and was %.3g in the first steps. The first suspect is the "
        "learning rate, %.3g in this step: give --lr %.3g in place of %.3g, or a longer --warmup; then see the data",
        step, loss, start, run.schedule(step - 1), lr / 10, lr, extra=ALL_RANKS,
    )  # fmt: skip
    run.metrics.event("diverged", step=step, loss=loss, first=start, lr=lr)


def roll_back(run: Run, step: int, checkpoint: str) -> int:
    """Load weights and optimizer of a checkpoint, and return its step; collective.

    Training continues after ``step``, in steps and data, as if the updates since the checkpoint had been skipped.
    """
    target = open_verified(checkpoint)
    run.spikes.count_rollback(step, target.step)
    load(run, target)
    run.spikes.skip(target.step + 1, step)
    run.checkpoints.next_generation()
    return target.step


def examine(run: Run, pending: train_utils.PendingStep, *, run_again: bool) -> list[Part]:
    """Return what each rank finds in its part of a step's batch, in the order of ranks; collective.

    With ``run_again`` the forward passes are repeated, with the step's dropout, on weights without its update.
    """
    numbers = {id(module): number for number, module in enumerate(run.model.modules())}
    names = {id(module): canonical_name(name) for name, module in run.model.named_modules()}
    layers: list[tuple[int, str]] = []
    damaged: list[bool] = []

    def check_output(module: nn.Module, inputs: Any, output: Any) -> None:
        if not layers and id(module) in numbers and not all(bool(t.isfinite().all()) for t in tensors(output)):
            damaged.append(not all(bool(local_tensor(p).isfinite().all()) for p in module.parameters(recurse=False)))
            name = names[id(module)] + " (its weights are not finite)" * damaged[0]
            layers.append((numbers[id(module)], name))

    losses: list[float] = []
    if run_again:
        hook = nn.modules.module.register_module_forward_hook(check_output)
        try:
            train_utils.seed_for(run.backend, run.args, pending.step - 1)
            with torch.no_grad(), compile.disabled():
                for batch in pending.batches:
                    loss_sum, _ = run.backend.loss(run.model, batch.to(run.backend.topology.device))
                    losses.append(float(loss_sum) / max(1, batch.counted_tokens()))
        finally:
            hook.remove()

    def part() -> Part:
        samples = [[name for name in batch.samples if name] for batch in pending.batches]
        if not any(samples):
            samples = run.train_data.names(pending.first)
        rank, topology = run.runtime.rank, run.backend.topology
        return Part(rank, topology.dp_rank, samples, losses, layers[0] if layers else None, any(damaged))

    return distributed.gather("naming the samples", part)


def tensors(output: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a module's output."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield local_tensor(output)
    elif isinstance(output, Mapping | list | tuple):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from tensors(each)


def first_layer(parts: list[Part]) -> str | None:
    """Return the first layer, in the order of the model, whose output is not finite on any rank."""
    layers = [(*part.layer, part.rank) for part in parts if part.layer is not None]
    if not layers:
        return None
    _, name, rank = min(layers)
    return f"{name} of rank {rank}"


def describe(
    pending: train_utils.PendingStep, numbers: train_utils.StepNumbers, limits: Limits, parts: list[Part]
) -> str:
    """Return one sentence with a step's loss and gradient norm, its samples and the first layer that is not finite."""

    def micro_batch(part: Part, number: int) -> str:
        names = part.names[number] if number < len(part.names) else []
        return f"rank {part.rank}'s {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"

    text = f"step {pending.step}: the loss is {numbers.loss:.5g} and the gradient norm {numbers.grad_norm:.5g}"
    if not numbers.not_finite:
        text += f", where {limits.loss:.5g} and {limits.grad_norm:.5g} are the limits"
    details = [f"samples {pending.first} to {pending.consumed - 1} of the order"]
    losses = [(loss, part, number) for part in parts for number, loss in enumerate(part.losses)]
    if losses:
        not_finite = [(part, number) for loss, part, number in losses if not math.isfinite(loss)]
        _, part, number = max(losses, key=lambda each: each[0] if math.isfinite(each[0]) else -math.inf)
        details += [f"not finite for {micro_batch(*each)}" for each in not_finite[:NAMED]] or [
            f"the highest loss is {micro_batch(part, number)}"
        ]
    else:
        details.append(f"among them {micro_batch(parts[0], 0)}")
    layer = first_layer(parts)
    if layer is not None:
        details.append(f"first in the output of {layer}")
    elif numbers.not_finite:
        details.append("no layer's output: in the loss, or in the backward pass")
    return f"{text}; {', '.join(details)}"
