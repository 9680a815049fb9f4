"""The run's tokenizer: which one converts text to tokens, and whose files go into the checkpoints. Not collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smp_train.arguments import Arguments
from smp_train.arguments.sources import is_hub_name, training_sources
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.find import locate, open_checkpoint
from smp_train.errors import ConfigError
from smp_train.models import tokenizer
from smp_train.models.hugging_face import ModelSpec
from smp_train.telemetry.logging_utils import get_logger

log = get_logger()


@contextmanager
def tokenizer_for_text(args: Arguments, spec: ModelSpec, checkpoint: Checkpoint | None) -> Iterator[str | None]:
    """Yield the location of the tokenizer that converts text to tokens, or None.

    The first of these is used: --tokenizer; the weights' tokenizer; the model's name; ``checkpoint`` or the checkpoint
    to finetune, whose tokenizer files are then in a temporary folder.
    """
    if location := _location(args, spec, reads_text=True):
        yield location
    elif files := _files_in_checkpoint(spec, checkpoint):
        with tokenizer.folder_of(files) as folder:
            yield folder
    else:
        yield None


def tokenizer_of_run(
    args: Arguments, spec: ModelSpec, checkpoint: Checkpoint | None, *, reads_text: bool = False
) -> dict[str, bytes]:
    """Return the files of the run's tokenizer, which go into its checkpoints; empty if it has no tokenizer.

    The order is that of `tokenizer_for_text`, but the model's name counts only if the run reads text. The last is the
    tokenizer of prepared training data, which takes precedence if it is the same tokenizer with a chat template.
    """
    location = _location(args, spec, reads_text=reads_text)
    files = _files_at(args, location)
    if not files:
        location, files = "the checkpoint", _files_in_checkpoint(spec, checkpoint)
        if files and args.chat_template:
            with tokenizer.folder_of(files) as folder:
                files = tokenizer.tokenizer_files(folder, args.chat_template)
    data_folders = [source for source in training_sources(args)[0] if not is_hub_name(source)]
    if data_folders and not args.tokenizer:
        data_location = tokenizer.tokenizer_folder_of_data(data_folders)
        data_files = _files_at(args, data_location)
        if data_files and (not files or tokenizer.adds_chat_template(data_files, files)):
            location, files = data_location, data_files
    if files:
        log.info("Tokenizer: that of %s goes into the checkpoints", location)
    return files


def _location(args: Arguments, spec: ModelSpec, *, reads_text: bool) -> str | None:
    """Return the tokenizer that the flags name: --tokenizer, the weights, or if the run reads text the model."""
    if location := args.tokenizer or tokenizer.tokenizer_folder(spec.pretrained):
        return location
    return (args.hf_pretrained_model_name_or_dir or args.pretrained_model_name) if reads_text else None


def _files_in_checkpoint(spec: ModelSpec, checkpoint: Checkpoint | None) -> dict[str, bytes]:
    """Return the tokenizer's files in ``checkpoint``, by default the checkpoint to finetune."""
    if checkpoint is None and spec.pretrained is not None and locate(spec.pretrained).kind == "checkpoint":
        checkpoint = open_checkpoint(spec.pretrained)
    return {} if checkpoint is None else checkpoint.tokenizer()


def _files_at(args: Arguments, location: str | None) -> dict[str, bytes]:
    """Return a tokenizer's files. Empty, with a warning, if they cannot be read and --tokenizer does not name them."""
    if location is None:
        return {}
    try:
        return tokenizer.tokenizer_files(location, args.chat_template)
    except ConfigError as failure:
        if args.tokenizer:
            raise
        log.warning("%s; checkpoints are written without it", failure)
        return {}
