"""What a run resumes from: lookup of the checkpoint, comparison of the models, position in the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from smp_train import distributed
from smp_train.arguments import Arguments, Resolved
from smp_train.arguments.flag import show
from smp_train.arguments.sources import is_hub_name, training_sources
from smp_train.checkpoints.aws import sharded as aws
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.find import locate, open_checkpoint, open_intact
from smp_train.checkpoints.node_local import facts_of_part, is_node_local, open_parts, steps_on_nodes
from smp_train.data.loader import Loader
from smp_train.distributed import ALL_RANKS
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models import tokenizer
from smp_train.models.configuration import changes_from
from smp_train.models.resolve import ModelSpec, names_model, resolve_saved
from smp_train.run.naming import Start, nothing_found
from smp_train.storage import normal
from smp_train.telemetry.logging_utils import get_logger

OF_OPTIMIZER = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "max_steps", "warmup", "plateau", "weight_decay", "beta1",
    "beta2", "adam_epsilon", "grad_clip",
)  # fmt: skip
"""Flags that decide the size of an update."""

log = get_logger()


def with_saved_row_length(resolved: Resolved, start: Start) -> Resolved:
    """Return the settings with the row length of the checkpoint whose model the run takes, if no flag gives either."""
    newest = start.described
    if newest is None or names_model(resolved.args) or resolved.args.max_context_width is not None:
        return resolved
    saved = (newest.meta.get("arguments") or {}).get("max_context_width")
    return resolved if saved is None else resolved.with_values(newest.path, max_context_width=saved)


def model_to_resume(args: Arguments, start: Start) -> ModelSpec | None:
    """Return the model of the checkpoint that the run goes on from, if no flag names the model; not collective."""
    newest = start.described
    if newest is None or names_model(args):
        return None
    return resolve_saved(newest.model_config(), newest.marker.model_type, newest.path, newest.meta, args)


def tokenizer_in_checkpoint(spec: ModelSpec, found: Checkpoint | None) -> dict[str, bytes]:
    """Return the tokenizer's files in ``found``, or in the checkpoint to finetune; else none. Not collective."""
    if found is None and spec.pretrained is not None and locate(spec.pretrained).kind == "checkpoint":
        found = open_checkpoint(spec.pretrained)
    return {} if found is None else found.tokenizer()


def tokenizer_of(
    args: Arguments, spec: ModelSpec, found: Checkpoint | None, *, reads_text: bool = False
) -> dict[str, bytes]:
    """Return the files of the run's tokenizer, for its checkpoints; empty where none is known. Not collective.

    It is --tokenizer, the tokenizer of the weights, that of the model's name where the run reads text, or the tokenizer
    of the checkpoint to resume or finetune; the tokenizer of prepared training data where no other is known, or where
    it is the same with a chat template.
    """
    where = args.tokenizer or tokenizer.tokenizer_folder(spec.pretrained)
    if where is None and reads_text:
        where = args.hf_pretrained_model_name_or_dir or args.pretrained_model_name
    files = _tokenizer_files(args, where)
    if not files:
        where, files = "the checkpoint", tokenizer_in_checkpoint(spec, found)
        if files and args.chat_template:
            with tokenizer.folder_of(files) as folder:
                files = tokenizer.tokenizer_files(folder, args.chat_template)
    locations = [location for location in training_sources(args)[0] if not is_hub_name(location)]
    if locations and not args.tokenizer:
        of_data = tokenizer.tokenizer_folder_of_data(locations)
        known = _tokenizer_files(args, of_data)
        if known and (not files or tokenizer.adds_chat_template(known, files)):
            where, files = of_data, known
    if files:
        log.info("Tokenizer: that of %s goes into the checkpoints", where)
    return files


def _tokenizer_files(args: Arguments, where: str | None) -> dict[str, bytes]:
    """Return a tokenizer's files; empty, with a warning, where it cannot be read and --tokenizer does not name it."""
    if where is None:
        return {}
    try:
        return tokenizer.tokenizer_files(where, args.chat_template)
    except ConfigError as failure:
        if args.tokenizer:
            raise
        log.warning("%s; checkpoints are written without it", failure)
        return {}


@contextmanager
def tokenizer_for_text(args: Arguments, spec: ModelSpec, start: Start) -> Iterator[str | None]:
    """Yield the location of the tokenizer that makes tokens of text; None where none is known; not collective.

    It is --tokenizer, the tokenizer of the weights, or of the model by its name, or else of the checkpoint to resume or
    finetune, whose files are then in a temporary folder.
    """
    named = args.hf_pretrained_model_name_or_dir or args.pretrained_model_name
    known = args.tokenizer or tokenizer.tokenizer_folder(spec.pretrained) or named
    if known:
        yield known
        return
    files = tokenizer_in_checkpoint(spec, start.described)
    if not files:
        yield None
        return
    with tokenizer.folder_of(files) as folder:
        yield folder


def look_for_checkpoint(
    args: Arguments, spec: ModelSpec, start: Start, mesh: dict[str, int]
) -> tuple[Checkpoint | None, Start]:
    """Return the verified checkpoint that the run goes on from, None at step 0, and the start it is of; collective."""
    if not start.continues:
        _log_aws_checkpoints(args)
        return None, start
    strict, mark = args.strict_resume or start.is_one_checkpoint, start.is_own and not args.evaluate_only
    durable: list[Option] = [
        ((each.generation, each.step), partial(open_intact, each.folder, each.name, strict=strict, mark=mark))
        for each in start.candidates
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
    if start.elsewhere is not None:
        checkpoint = aws.find_checkpoint(start.elsewhere, spec.config, strict=args.strict_resume)
    if checkpoint is None:
        if args.resume_from_checkpoint is not None:
            log.log(logging.WARNING if start.other_runs else logging.INFO, "%s", nothing_found(args, start))
    elif checkpoint.step < 1:
        raise CheckpointError(
            f"{checkpoint.path} does not say of which step it is; start from it with --finetune 1 "
            f"--pretrained_checkpoint_file {checkpoint.path}"
        )
    return checkpoint, replace(start, is_own=False)


Option = tuple[tuple[int, int], Callable[[], Checkpoint | None]]
"""(generation, step) of a checkpoint, and a collective function that opens and verifies the checkpoint."""


def _parts_on_nodes(args: Arguments, start: Start, mesh: dict[str, int]) -> list[Option]:
    """Return the steps of the run of which every rank has its part on its node's disk; collective."""
    near = [parent for parent in args.checkpoint_dir if is_node_local(parent)]
    if not near:
        return []
    facts = facts_of_part([parent for parent in args.checkpoint_dir if not is_node_local(parent)], mesh)
    steps = steps_on_nodes(near, start.name)
    return [(step, partial(open_parts, parent, start.name, step, facts)) for step, parent in steps]


def _log_aws_checkpoints(args: Arguments) -> None:
    """Log the checkpoints of SMP's sample scripts in the folders of a run that resumes from none; collective."""
    with distributed.together("looking into the checkpoint folders"):
        for folder in args.checkpoint_dir if distributed.rank() == 0 else ():
            paths = [] if is_node_local(folder) else aws.checkpoint_paths(folder)
            if paths:
                log.info(
                    "%s holds %d checkpoints of SMP's sample scripts, the newest is %s: they stay as they are; to go "
                    "on from them, --resume_from_checkpoint %s", folder, len(paths), paths[0], folder,
                )  # fmt: skip


def check_model(args: Arguments, spec: ModelSpec, found: Checkpoint) -> None:
    """Raise `CheckpointError` where a checkpoint's model is another function than the run's. Not collective."""
    different = changes_from(found.meta, spec.config)
    if different and not args.allow_model_change:
        raise CheckpointError(
            f"{found.path} is of another model ({'; '.join(different)}); give the checkpoint's flags, or "
            "--allow_model_change 1 to go on with this one"
        )
    saved, here = found.meta.get("adapter"), adapter_of(spec)
    if (saved is None) != (here is None) or (saved and here and {**saved, "base": ""} != {**here, "base": ""}):
        raise CheckpointError(
            f"{found.path} is of a run {_adapters(saved)}, and this one is {_adapters(here)}; give the checkpoint's "
            "--lora_rank, --lora_alpha, --lora_target_modules and --lora_dropout"
        )
    if saved and here and saved.get("base") != here["base"]:
        moved = f"The adapters of {found.path} are of {saved.get('base')}, and this run adds them to {here['base']}"
        if not args.allow_model_change:
            raise CheckpointError(f"{moved}; give those weights, or --allow_model_change 1 where these are the same")
        log.warning("%s", moved, extra=ALL_RANKS)
    if different:
        log.warning("The model is not that of %s: %s", found.path, "; ".join(different), extra=ALL_RANKS)


def changed_settings(args: Arguments, found: Checkpoint) -> list[str]:
    """Return the settings of optimizer and schedule that differ from the checkpoint's, each with both values."""
    saved = found.meta.get("arguments", {})
    here = {name: getattr(args, name) for name in OF_OPTIMIZER}
    return [
        f"--{name} {show(value)} (there {show(saved[name])})"
        for name, value in here.items()
        if name in saved and saved[name] != value
    ]


def adapter_of(spec: ModelSpec) -> dict[str, Any] | None:
    """Return what a checkpoint says of the run's adapters: their settings, and where the adapted weights are."""
    return None if spec.lora is None else {**spec.lora.to_json(), "base": normal(spec.pretrained or "")}


def _adapters(of: Mapping[str, Any] | None) -> str:
    return "without adapters" if of is None else "with " + " ".join(f"{k} {v}" for k, v in of.items() if k != "base")


def imported_position(found: Checkpoint, training: Loader) -> tuple[int, str]:
    """Return the number of samples of this run's order to skip, and the counter of SMP's sample it follows from.

    The sample counts sequences per data rank, which become global batches of this run. Its order differs.
    """
    recorded = found.meta.get("imported", {})
    batches, by = found.step, "its step"
    size = recorded.get("cli_args.train_batch_size")
    if size and "resume_from_sequence_number" in recorded:
        accumulated = recorded.get("cli_args.gradient_accumulation_steps") or 1
        batches, by = recorded["resume_from_sequence_number"] // (size * accumulated), "resume_from_sequence_number"
    return (batches * training.global_batch, by) if training.rows_in_epoch is not None else (0, "nothing")
