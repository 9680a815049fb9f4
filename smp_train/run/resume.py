"""What a run resumes from: lookup of the checkpoint, comparison of the models, position in the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from smp_train import distributed
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.flag import show
from smp_train.checkpoints.aws import sharded as aws
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.find import open_intact
from smp_train.checkpoints.node_local import facts_of_part, is_node_local, open_parts, steps_on_nodes
from smp_train.data.loader import Loader
from smp_train.distributed import ALL_RANKS
from smp_train.errors import CheckpointError
from smp_train.models.configuration import changes_from
from smp_train.models.hugging_face import ModelSpec
from smp_train.models.resolve import names_model, resolve_saved
from smp_train.run.best import Best
from smp_train.run.start import Start
from smp_train.run.start_log import nothing_to_resume_line
from smp_train.run.state import Position, Run
from smp_train.storage import normal
from smp_train.telemetry.logging_utils import get_logger

OPTIMIZER_FLAGS = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "max_steps", "epochs", "warmup", "plateau", "weight_decay",
    "beta1", "beta2", "adam_epsilon", "grad_clip",
)  # fmt: skip
"""Flags that decide the size of an update."""

log = get_logger()


def with_saved_row_length(resolved: Resolved, start: Start) -> Resolved:
    """Return the settings with the checkpoint's row length, unless a flag gives the row length or the model."""
    newest = start.newest_readable
    if newest is None or names_model(resolved.args) or resolved.args.max_context_width is not None:
        return resolved
    saved = (newest.meta.get("arguments") or {}).get("max_context_width")
    return resolved if saved is None else resolved.with_values(newest.path, max_context_width=saved)


def model_to_resume(args: Arguments, start: Start) -> ModelSpec | None:
    """Return the model of the checkpoint that the run goes on from, if no flag names the model; not collective."""
    newest = start.newest_readable
    if newest is None or names_model(args):
        return None
    return resolve_saved(newest.model_config(), newest.marker.model_type, newest.path, newest.meta, args)


def find_checkpoint(
    args: Arguments, spec: ModelSpec, start: Start, mesh: dict[str, int]
) -> tuple[Checkpoint | None, Start]:
    """Return the verified checkpoint to resume from (or None), and ``start``, adapted to it; collective."""
    if not start.continues:
        _log_aws_checkpoints(args)
        return None, start
    strict, mark_damaged = args.strict_resume or start.is_one_checkpoint, start.is_own and not args.evaluate_only
    durable: list[Option] = [
        (
            (candidate.generation, candidate.step),
            partial(open_intact, candidate.folder, candidate.name, strict=strict, mark=mark_damaged),
        )
        for candidate in start.candidates
    ]
    parts = [] if start.went_back else _parts_on_nodes(args, start, mesh)
    options = sorted(parts + durable, key=itemgetter(0), reverse=True) if start.is_own else parts + durable
    for _, open_option in options:
        checkpoint = open_option()
        if checkpoint is not None:
            return checkpoint, replace(start, is_own=start.is_own or not checkpoint.durable)
    if start.newest is not None:
        raise CheckpointError(
            f"cannot resume: every checkpoint in {start.newest.folder} is damaged; they are kept there. To start "
            "afresh, give another --run_name or --checkpoint_dir, or move them away"
        )
    checkpoint = None
    if start.without_candidate is not None:
        checkpoint = aws.find_checkpoint(start.without_candidate, spec.config, strict=args.strict_resume)
    if checkpoint is None:
        if args.resume_from_checkpoint is not None:
            level = logging.WARNING if start.other_runs else logging.INFO
            log.log(level, "%s", nothing_to_resume_line(args, start))
    elif checkpoint.step < 1:
        raise CheckpointError(
            f"{checkpoint.path} does not say of which step it is; start from it with --finetune 1 "
            f"--pretrained_checkpoint_file {checkpoint.path}"
        )
    return checkpoint, replace(start, is_own=False)


Option = tuple[tuple[int, int], Callable[[], Checkpoint | None]]
"""(generation, step) of a checkpoint, and a collective function that opens and verifies the checkpoint."""


def _parts_on_nodes(args: Arguments, start: Start, mesh: dict[str, int]) -> list[Option]:
    """Return the run's steps for which every rank has its part on its node's disk; collective."""
    local_parents = [parent for parent in args.checkpoint_dir if is_node_local(parent)]
    if not local_parents:
        return []
    facts = facts_of_part([parent for parent in args.checkpoint_dir if not is_node_local(parent)], mesh)
    steps = steps_on_nodes(local_parents, start.name)
    return [(step, partial(open_parts, parent, start.name, step, facts)) for step, parent in steps]


def _log_aws_checkpoints(args: Arguments) -> None:
    """Log which checkpoint folders hold checkpoints of SMP's sample scripts, which a new run ignores; collective."""
    with distributed.together("looking into the checkpoint folders"):
        for folder in args.checkpoint_dir if distributed.rank() == 0 else ():
            paths = [] if is_node_local(folder) else aws.checkpoint_paths(folder)
            if paths:
                log.info(
                    "%s holds %d checkpoints of SMP's sample scripts, the newest is %s: they stay as they are; to go "
                    "on from them, --resume_from_checkpoint %s", folder, len(paths), paths[0], folder,
                )  # fmt: skip


def check_model(args: Arguments, spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` if a checkpoint's model computes something else than the run's model; not collective."""
    different = changes_from(checkpoint.meta, spec.config)
    if different and not args.allow_model_change:
        raise CheckpointError(
            f"{checkpoint.path} is of another model ({'; '.join(different)}); give the checkpoint's flags, or "
            "--allow_model_change 1 to go on with this one"
        )
    saved, current = dict(checkpoint.meta.get("adapter") or {}), adapter_of(spec) or {}
    saved_base, base = saved.pop("base", None), current.pop("base", None)
    if saved != current:
        raise CheckpointError(
            f"{checkpoint.path} is of a run {_adapters(saved)}, and this one is {_adapters(current)}; give the "
            "checkpoint's --lora_rank, --lora_alpha, --lora_target_modules and --lora_dropout"
        )
    if saved_base != base:
        moved = f"The adapters of {checkpoint.path} are of {saved_base}, and this run adds them to {base}"
        if not args.allow_model_change:
            raise CheckpointError(f"{moved}; give those weights, or --allow_model_change 1 where these are the same")
        log.warning("%s", moved, extra=ALL_RANKS)
    if different:
        log.warning("The model is not that of %s: %s", checkpoint.path, "; ".join(different), extra=ALL_RANKS)


def changed_settings(args: Arguments, checkpoint: Checkpoint) -> list[str]:
    """Return the settings of optimizer and schedule that differ from the checkpoint's, each with both values."""
    saved = checkpoint.meta.get("arguments", {})
    current = {name: getattr(args, name) for name in OPTIMIZER_FLAGS}
    return [
        f"--{name} {show(value)} (there {show(saved[name])})"
        for name, value in current.items()
        if name in saved and saved[name] != value
    ]


def adapter_of(spec: ModelSpec) -> dict[str, Any] | None:
    """Return the run's adapters as checkpoints describe them: settings, and the location of the adapted weights."""
    return None if spec.lora is None else {**spec.lora.to_json(), "base": normal(spec.pretrained or "")}


def _adapters(settings: Mapping[str, Any]) -> str:
    return "with " + " ".join(f"{name} {value}" for name, value in settings.items()) if settings else "without adapters"


def imported_position(checkpoint: Checkpoint, training: Loader) -> tuple[int, str]:
    """Return how many samples of this run's order an imported checkpoint has consumed, and the counter used for it.

    AWS's sample counts sequences per data rank. This converts the count to global batches of this run's own order.
    """
    recorded = checkpoint.meta.get("imported", {})
    batches, counter = checkpoint.step, "its step"
    size = recorded.get("cli_args.train_batch_size")
    if size and "resume_from_sequence_number" in recorded:
        accumulated = recorded.get("cli_args.gradient_accumulation_steps") or 1
        batches = recorded["resume_from_sequence_number"] // (size * accumulated)
        counter = "resume_from_sequence_number"
    return (batches * training.global_batch, counter) if training.rows_in_epoch is not None else (0, "nothing")


def set_position(run: Run, checkpoint: Checkpoint) -> None:
    """Set the run to the position of a checkpoint whose weights are loaded; collective."""
    with distributed.together(f"resuming from {checkpoint.path}"):
        consumed = data_position(run, checkpoint)
    if run.start.is_own:  # another run's best checkpoint is not in this run's folder
        run.best = Best.of_meta(checkpoint.meta)
    run.spikes.restore(checkpoint.meta.get("spikes"), run.train_data.global_batch)
    run.progress = Position(step=checkpoint.step, consumed=consumed, tokens=checkpoint.meta["tokens"])
    if checkpoint.durable:
        run.saved_step, run.saved_path = checkpoint.step, checkpoint.path


def data_position(run: Run, checkpoint: Checkpoint) -> int:
    """Return how many samples of this run's order are consumed at the checkpoint; not collective."""
    if "data" in checkpoint.meta:
        if run.args.evaluate_only and run.args.training_dir is None:  # the data of that run may not be on this machine
            return int(checkpoint.meta["data"].get("consumed", 0))
        return run.train_data.restore_state(checkpoint.meta["data"], allow_data_change=run.args.allow_data_change)
    consumed, counter = imported_position(checkpoint, run.train_data)
    log.info(
        "Data: begins at sample %d (by %s); this run has its own sample order: within this epoch some rows repeat and "
        "others are skipped", consumed, counter,
    )  # fmt: skip
    return consumed
