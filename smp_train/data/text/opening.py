"""The streamed text of a run, as its arguments ask for it."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from smp_train import distributed
from smp_train.data import formats, hf_dataset
from smp_train.data.bad_rows import LeftOut
from smp_train.data.lines import LINE_BYTES
from smp_train.data.pipelines.data_pipeline import ValidationData
from smp_train.data.pipelines.text_data import TextData, TextRows
from smp_train.data.prepare import tokenizer as tokenizers
from smp_train.data.source import Source
from smp_train.data.text.files import begins_with, find_files
from smp_train.data.text.read import TextFile
from smp_train.data.text.stream import Reading, spread_tokenizing
from smp_train.errors import ConfigError, DataError
from smp_train.storage.paths import on_this_machine
from smp_train.storage.paths import place as place_of

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.data")

HELD_OUT = ("validation", "test")
"""Splits of the hub to validate on: the first of these that a data set has."""


def open_text(
    args: Arguments,
    *,
    vocab_size: int,
    seq_len: int,
    ranks: Runtime,
    dp_rank: int,
    dp_size: int,
    pin_memory: bool,
    shards: Callable[[str], Source],
) -> tuple[TextData, ValidationData | None]:
    """Open --dataset to train on, and, if the run validates, what it validates on; collective.

    ``shards`` opens a folder of token shards, which --test_dir may be.
    """
    assert args.dataset is not None
    share: dict[str, Any] = {"seq_len": seq_len, "dp_rank": dp_rank, "dp_size": dp_size, "pin_memory": pin_memory}
    spread_tokenizing(ranks.local_world_size)
    with distributed.together(f"opening {args.dataset}"):
        reading, identity = _reading(args, vocab_size, seq_len)
        files = find_files([args.dataset], config=args.dataset_config_name, column=args.text_column, flag="--dataset")
        training = TextData(
            files, reading, identity=identity, merge=distributed.largest, micro_batch=args.train_batch_size,
            accumulation=args.gradient_accumulation_steps, **share,
        )  # fmt: skip
        logger.info(
            "Text tokenised on the fly: %d files in %d streams, documents %s; this rank reads %d of the streams",
            len(files), training.streams, "permuted in blocks" if reading.shuffled else "in stored order",
            len(training.touched()),
        )  # fmt: skip
    if not (args.validation_freq or args.evaluate_only):
        return training, None
    held_out = _held_out(args, reading, args.validation_batches * args.val_batch_size * dp_size, shards)
    with distributed.together("preparing the validation data"):
        return training, ValidationData(
            held_out, micro_batch=args.val_batch_size, max_batches=args.validation_batches, fast=args.fast_validation,
            **share,
        )  # fmt: skip


def text_at(place: str, args: Arguments) -> list[TextFile]:
    """Return the text of a place, or of a data set of the hub where there is no such place; none of token rows."""
    if not place_of(place).exists():
        return find_files([place], config=args.dataset_config_name, column=args.text_column, flag="--data")
    return find_files([place], column=args.text_column, flag="--data") if holds_text(place, args.text_column) else []


def open_text_rows(args: Arguments, files: list[TextFile], *, vocab_size: int, seq_len: int) -> TextRows:
    """Return all samples of some text, in stored order. Raises `DataError` where there are none."""
    reading, _ = _reading(args, vocab_size, seq_len)
    rows = TextRows(files, replace(reading, shuffled=False), sys.maxsize)
    if not len(rows):
        raise DataError(f"{files[0].path}: has no text")
    return rows


def _reading(args: Arguments, vocab_size: int, seq_len: int) -> tuple[Reading, str]:
    name = args.tokenizer or args.hf_pretrained_model_name_or_dir or args.pretrained_model_name
    assert name is not None, "checked by arguments.validate"
    with on_this_machine(name) as folder:
        tokenizer = tokenizers.load(folder)
        _, end = tokenizers.end_token(tokenizer, None, folder)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if highest >= vocab_size:
        raise ConfigError(
            f"--tokenizer {name}: has ids up to {highest}, the model a vocabulary of {vocab_size}; "
            "use the tokenizer of the model, or set --vocab_size"
        )
    identity = hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest()
    # What a document says about ends of documents is text like any other.
    tokenizer.encode_special_tokens = True
    shuffled = args.shuffle != "none"
    left_out = LeftOut() if args.bad_rows == "skip" else None
    return Reading(tokenizer, end, seq_len, args.seed, shuffled, args.text_column, args.data_audit, left_out), identity


def _held_out(args: Arguments, reading: Reading, most: int, shards: Callable[[str], Source]) -> Source:
    files: list[TextFile] = []
    with distributed.together("looking at the validation data"):
        if args.test_dir is None:
            assert args.dataset is not None
            files = _split_of_hub(args.dataset, args.dataset_config_name)
        elif holds_text(args.test_dir, args.text_column):
            files = find_files([args.test_dir], column=args.text_column, flag="--test_dir")
    if not files:
        assert args.test_dir is not None
        return shards(args.test_dir)
    with distributed.together("reading the validation data"):
        rows = TextRows(files, replace(reading, shuffled=False), most)
        if not len(rows):
            raise DataError(f"{files[0].path}: has no text to validate on")
        logger.info("Validation: the first %d samples of %s", len(rows), files[0].path)
        return rows


def _split_of_hub(name: str, config: str | None) -> list[TextFile]:
    first: DataError | None = None
    for split in HELD_OUT:
        try:
            return find_files([name], config=config, split=split, flag="--dataset")
        except DataError as error:
            first = first or error
    raise DataError(f"{first}; give --test_dir to validate on")


def holds_text(location: str, column: str = "text") -> bool:
    """True when a folder or prefix holds text, and not token shards, by its first record. Raises DataError."""
    try:
        kind = formats.kind_of(location)
        if kind == formats.PREPARED or (kind == formats.ARROW and "input_ids" in hf_dataset.columns(location)):
            return False
        files = find_files([location], column=column, flag="--test_dir")
    except DataError:
        # It is then opened as shards, which names what is wrong with it.
        return False
    return files[0].kind != "lines" or not begins_with(files[0], "input_ids", most=LINE_BYTES)
