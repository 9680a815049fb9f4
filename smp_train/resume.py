"""What a run resumes from: lookup of the checkpoint, comparison of the models, position in the data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from smp_train import distributed
from smp_train.arguments import Arguments
from smp_train.arguments.sources import is_hub_name, training_sources
from smp_train.checkpoints import Checkpoint
from smp_train.checkpoints.aws import sharded as aws
from smp_train.checkpoints.collective import on_main
from smp_train.checkpoints.discovery import is_checkpoint_folder, newest_readable, open_checkpoint
from smp_train.checkpoints.hf import tokenizer
from smp_train.checkpoints.node_local import find_newest, is_node_local
from smp_train.checkpoints.runs import runs_in
from smp_train.data.loader import Loader
from smp_train.distributed import ALL_RANKS
from smp_train.errors import CheckpointError, ConfigError, first_few
from smp_train.models.configuration import changes_from
from smp_train.models.resolve import ModelSpec, names_model, resolve_saved
from smp_train.naming import Start
from smp_train.storage import normal
from smp_train.telemetry.logging_utils import get_logger

log = get_logger()


def model_to_resume(args: Arguments, start: Start) -> ModelSpec | None:
    """Return the model of the checkpoints that the run resumes from, where no flag says which it is; not collective."""
    if start.origin is None or names_model(args):
        return None
    found = newest_readable(start.origin.place, start.origin.run)
    if found is None:
        return None
    if args.max_context_width is None:
        args.max_context_width = (found.meta.get("arguments") or {}).get("max_context_width")
    return resolve_saved(found.model_config(), found.committed.model_type, found.path, found.meta, args)


def checkpoint_to_finetune(args: Arguments) -> None:
    """Where --pretrained_checkpoint_file is a folder of checkpoints, set it to the newest of them; not collective."""
    where = args.pretrained_checkpoint_file
    if args.finetune and where is not None and is_checkpoint_folder(where):
        found = newest_readable(where, None)
        if args.lora_rank is not None and found is not None and found.path != normal(where):
            raise ConfigError(
                f"--pretrained_checkpoint_file {where}: its newest checkpoint may be another one on a resume, "
                f"and adapters belong to one; name it, such as {found.path}"
            )
        args.pretrained_checkpoint_file = where if found is None else found.path


def tokenizer_in_checkpoint(spec: ModelSpec, found: Checkpoint | None) -> dict[str, bytes]:
    """Return the tokenizer's files in ``found``, or in the checkpoint to finetune; else none. Not collective."""
    if found is None and spec.pretrained is not None and is_checkpoint_folder(spec.pretrained):
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
    found = None if start.origin is None else newest_readable(start.origin.place, start.origin.run)
    files = tokenizer_in_checkpoint(spec, found)
    if not files:
        yield None
        return
    with tokenizer.folder_of(files) as folder:
        yield folder


def look_for_checkpoint(args: Arguments, spec: ModelSpec, start: Start, mesh: dict[str, int]) -> Checkpoint | None:
    """Return the newest committed checkpoint that the run can resume from, None for a fresh start; collective.

    Without one, the newest checkpoint of SMP's sample scripts.
    """
    location = args.resume_from_checkpoint
    if location is None:
        _log_aws_checkpoints(args)
        return None
    found = None
    whose = start.run if start.origin is None else start.origin.run
    if not on_main("cannot resume", lambda: aws.is_checkpoint(location)):
        found = find_newest(
            location, args.checkpoint_dir, run=whose, mesh=mesh, strict=args.strict_resume,
            rename=start.continues and not args.evaluate_only,
        )  # fmt: skip
    if found is None:
        found = aws.find_checkpoint(location, spec.config, strict=args.strict_resume)
        if found is not None and found.step < 1:
            raise CheckpointError(
                f"{found.path} does not say of which step it is; start from it with --finetune 1 "
                f"--pretrained_checkpoint_file {found.path}"
            )
    if found is None:
        of = f"No committed checkpoint of run {start.run.quoted} in {location}"
        others = distributed.on_main("looking for other runs", lambda: runs_in(location))
        if others:
            log.warning(
                "%s, which holds those of %s: it begins at step 0; to go on with one of these give its --run_name, to "
                "begin from one --resume_from_checkpoint CHECKPOINT", of, first_few(others),
            )  # fmt: skip
        else:
            log.info("%s yet", of)
    return found


def _log_aws_checkpoints(args: Arguments) -> None:
    """Log the checkpoints of SMP's sample scripts in the folders of a run that resumes from none; collective."""
    with distributed.together("looking into the checkpoint folders"):
        for folder in args.checkpoint_dir:
            names = [] if is_node_local(folder) else aws.checkpoint_names(folder)
            if names:
                log.info(
                    "%s holds %d checkpoints of SMP's sample scripts, the newest is %s: they stay as they are; to go "
                    "on from them, --resume_from_checkpoint %s", folder, len(names), names[0], folder,
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
