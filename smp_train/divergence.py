"""What a run does about a step that diverges: names samples and layer, warns, skips its update, or goes back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smp_train import distributed, train_utils
from smp_train.build_run import Run
from smp_train.checkpoints.find import open_verified
from smp_train.distributed import ALL_RANKS, heartbeat
from smp_train.distributed.dtensor import local_tensor
from smp_train.errors import SmpTrainError
from smp_train.models.hub_names import canonical_name
from smp_train.parallel import compile
from smp_train.saving import end_saves, load, report_saves
from smp_train.telemetry.logging_utils import get_logger

log = get_logger()

NAMED = 4
"""Samples that a message names at most; the event in metrics.jsonl has all."""


class Part(NamedTuple):
    """What one rank found when it ran the forward passes of its part again."""

    rank: int
    dp_rank: int
    names: list[list[str]]
    """Of each micro-batch."""
    losses: list[float]
    """Mean loss of each micro-batch, in nats per token; none where the passes were not run again."""
    layer: tuple[int, str] | None
    """The first module with an output that is not finite: its number in the order of modules, and its name."""
    damaged: bool
    """Whether that module's weights are not finite."""


def left_out(run: Run, result: train_utils.StepResult) -> Tensor:
    """Return a scalar on the device, above 0 where the update of a step was not made, or is to be undone."""
    return result.judged[2 if run.spikes.held else 3]


def respond(run: Run, of: train_utils.Unread, loss: float, grad_norm: float, *, finite: bool) -> bool:
    """Deal with a step whose numbers are beyond the limits, as --on_spike says; collective.

    Returns whether its update was not made, or undone: what was queued behind it must be repeated. Raises
    `SmpTrainError` where the run ends here, with nothing saved of this step.
    """
    spikes = run.spikes
    limits, held = spikes.limits(of.step), spikes.held or not finite
    heartbeat.enter(heartbeat.SAVE)  # takes as long as it takes
    if spikes.policy == "rollback":
        report_saves(run)  # one under way may be the checkpoint to go back to
    parts = examine(run, of, again=held)
    what = f"step {of.step}: the loss is {loss:.5g} and the gradient norm {grad_norm:.5g}"
    if finite:
        what += f", where {limits.loss:.5g} and {limits.grad_norm:.5g} are the limits"
    what += "; " + where_from(parts, of, finite=finite)
    to = run.checkpoints.scheduled_before(of.step) if spikes.policy == "rollback" and held else None
    damaged = any(part.damaged for part in parts)
    action = "warn"
    if held:
        action = "rollback" if to else "stop" if damaged or spikes.policy == "warn" else "skip"
    run.metrics.event(
        "spike", step=of.step, loss=loss, grad_norm=grad_norm, action=action, first=of.first, last=of.consumed - 1,
        samples={str(part.dp_rank): [*chain(*part.names)] for part in parts}, layer=first_layer(parts),
    )  # fmt: skip
    if not held:
        log.warning("%s; its update was made (--on_spike skip leaves it out)", what, extra=ALL_RANKS)
        return False
    try:
        if action == "stop":
            remedy = "or with --on_spike skip"
            if damaged:  # without this step, too: what is saved from here on would replace good checkpoints
                remedy = "or with --on_spike rollback: no skipped step mends weights"
            raise SmpTrainError(
                f"{what}. Nothing was saved of it; resume from the last checkpoint with a lower --lr or --grad_clip, "
                f"{remedy}"
            )
        if to is None:
            spikes.skip_one(of.step)
            why = "" if spikes.policy == "skip" else ", as there is no checkpoint to go back to"
            log.warning("%s; its update is skipped%s", what, why, extra=ALL_RANKS)
        else:
            first = roll_back(run, of.step, to) + 1
            text = "%s; back to %s, steps %d to %d are passed over"
            log.warning(text, what, to, first, of.step, extra=ALL_RANKS)
    except SmpTrainError as failure:
        failure.repeats = not run.runtime.is_main  # type: ignore[attr-defined]  # all ranks have it: one prints it
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

    Steps and data go on after ``step``: the updates since the checkpoint are as if skipped.
    """
    found = open_verified(checkpoint)
    run.spikes.count_rollback(step, found.step)
    load(run, found)
    run.spikes.skip(found.step + 1, step)
    run.checkpoints.next_generation()
    return found.step


def examine(run: Run, of: train_utils.Unread, *, again: bool) -> list[Part]:
    """Return what each rank finds in its part of a step's batch, in order of ranks; collective.

    With ``again`` the forward passes are run again, with the step's dropout, on weights without its update.
    """
    numbers = {id(module): number for number, module in enumerate(run.model.modules())}
    clean = {id(module): canonical_name(name) for name, module in run.model.named_modules()}
    layers: list[tuple[int, str]] = []
    damaged: list[bool] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not layers and id(module) in numbers and not all(bool(t.isfinite().all()) for t in tensors(output)):
            damaged.append(not all(bool(local_tensor(p).isfinite().all()) for p in module.parameters(recurse=False)))
            name = clean[id(module)] + " (its weights are not finite)" * damaged[0]
            layers.append((numbers[id(module)], name))

    losses: list[float] = []
    if again:
        hook = nn.modules.module.register_module_forward_hook(look)
        try:
            train_utils.seed_for(run.backend, run.args, of.step - 1)
            with torch.no_grad(), compile.disabled():
                for batch in of.batches:
                    total = train_utils.loss_sum(run.backend, run.model, batch)
                    losses.append(float(total) / max(1, batch.counted_tokens()))
        finally:
            hook.remove()

    def part() -> Part:
        names = [[name for name in batch.samples if name] for batch in of.batches]
        if not any(names):
            names = run.train_data.names(of.first)
        rank, topology = run.runtime.rank, run.backend.topology
        return Part(rank, topology.dp_rank, names, losses, layers[0] if layers else None, any(damaged))

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
    """Return the first layer, in the order of the model, whose output was not finite on any rank."""
    found = [part for part in parts if part.layer is not None]
    if not found:
        return None
    first = min(found, key=lambda part: part.layer or (0, ""))
    return f"{first.layer and first.layer[1]} of rank {first.rank}"


def where_from(parts: list[Part], of: train_utils.Unread, *, finite: bool) -> str:
    """Return in words which samples and which layer a step's numbers are from."""

    def place(part: Part, number: int) -> str:
        names = part.names[number] if number < len(part.names) else []
        return f"rank {part.rank}'s {', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}"

    words = [f"samples {of.first} to {of.consumed - 1} of the order"]
    ran = [(loss, part, number) for part in parts for number, loss in enumerate(part.losses)]
    if ran:
        odd = [(part, number) for loss, part, number in ran if not math.isfinite(loss)]
        _, part, number = max(ran, key=lambda one: one[0] if math.isfinite(one[0]) else -math.inf)
        highest = f"the highest loss is {place(part, number)}"
        words += [f"not finite for {place(*one)}" for one in odd[:NAMED]] or [highest]
    else:
        words.append(f"among them {place(parts[0], 0)}")
    layer = first_layer(parts)
    if layer is not None:
        words.append(f"first in the output of {layer}")
    elif not finite:
        words.append("no layer's output: in the loss, or in the backward pass")
    return ", ".join(words)
