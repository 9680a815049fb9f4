"""The streamed text of a run, as its arguments ask for it."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from smp_train import distributed
from smp_train.data import formats, hf_dataset, manifest
from smp_train.data.bad_rows import LeftOut
from smp_train.data.lines import LINE_BYTES
from smp_train.data.pipelines.data_pipeline import ValidationData
from smp_train.data.pipelines.text_data import TextData, TextRows
from smp_train.data.prepare import tokenizer as tokenizers
from smp_train.data.rows import FIELDS as ROW_FIELDS
from smp_train.data.source import Source
from smp_train.data.text.conversations import Conversations, chat_tokenizer
from smp_train.data.text.detect import fields_that_are_lists, find_fields
from smp_train.data.text.fields import Fields
from smp_train.data.text.files import OF_DATASETS, SUFFIXES, begins_with, find_files
from smp_train.data.text.read import LOOKED_INTO, TextFile
from smp_train.data.text.stream import Reading, spread_tokenizing
from smp_train.errors import ConfigError, DataError, first_few
from smp_train.storage.paths import on_this_machine
from smp_train.storage.paths import place as place_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from smp_train.arguments import Arguments
    from smp_train.distributed import Runtime

logger = logging.getLogger("smp_train.data")

LOOKED_AT = 16
"""Files of lines that are looked at for rows of tokens."""
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
        files = find_files([args.dataset], config=args.dataset_config_name, column=args.text_column, flag="--dataset")
        fields = find_fields(files, args.text_column)
        _refuse_layout(args, fields)
        reading, identity = _reading(args, vocab_size, seq_len, fields)
        training = TextData(
            files, reading, identity=identity, merge=distributed.largest, micro_batch=args.train_batch_size,
            accumulation=args.gradient_accumulation_steps, **share,
        )  # fmt: skip
        logger.info(
            "%s tokenised on the fly: %d files in %d streams, documents %s; this rank reads %d of the streams",
            reading.fields.kind.capitalize(), len(files), training.streams,
            "permuted in blocks" if reading.shuffled else "in stored order", len(training.touched()),
        )  # fmt: skip
        if reading.conversations and not reading.packed:
            logger.info(
                "Each row is padded to %d tokens; --short pack puts several into one, and smp-train prepare packs "
                "them closest", seq_len,
            )  # fmt: skip
    if not (args.validation_freq or args.evaluate_only):
        return training, None
    most = args.validation_batches * args.val_batch_size * dp_size
    held_out = _held_out(args, most, vocab_size, seq_len, shards)
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
    fields = find_fields(files, args.text_column)
    reading, _ = _reading(args, vocab_size, seq_len, fields)
    rows = TextRows(files, replace(reading, shuffled=False), sys.maxsize)
    if not len(rows):
        raise DataError(f"{files[0].path}: has no {fields.kind}")
    return rows


def _reading(args: Arguments, vocab_size: int, seq_len: int, fields: Fields) -> tuple[Reading, str]:
    """Return how documents of ``fields`` are read, and what else decides which tokens they become."""
    name = args.tokenizer or args.hf_pretrained_model_name_or_dir or args.pretrained_model_name
    assert name is not None, "checked by arguments.validate"
    tokenizer, end, conversations = open_tokenizer(name, args.chat_template, fields)
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if highest >= vocab_size:
        raise ConfigError(
            f"--tokenizer {name}: has ids up to {highest}, the model a vocabulary of {vocab_size}; "
            "use the tokenizer of the model, or set --vocab_size"
        )
    identity = tokenizer.to_str() + (conversations.template if conversations else "")
    reading = Reading(
        tokenizer, end, seq_len, args.seed, args.shuffle != "none", fields, args.data_audit,
        LeftOut() if args.bad_rows == "skip" else None, conversations, args.short == "pack", args.long or "truncate",
    )  # fmt: skip
    return reading, hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def open_tokenizer(
    name: str, chat_template: str | None, fields: Fields
) -> tuple[Tokenizer, int, Conversations | None]:
    """Return the tokenizer, its end token, and what makes rows of ``fields``, None for text. Raises ConfigError."""
    with on_this_machine(name) as folder:
        known = chat_tokenizer(folder, chat_template, fields) if fields.answers else None
        tokenizer = tokenizers.load(folder) if known is None else known.backend_tokenizer
        _, end = tokenizers.end_token(tokenizer, None, folder)
    if known is not None:
        return tokenizer, end, Conversations(known, fields, end)
    # What a document says about ends of documents is text like any other.
    tokenizer.encode_special_tokens = True
    return tokenizer, end, None


def _refuse_layout(args: Arguments, fields: Fields) -> None:
    """Raise ConfigError for flags that do not fit the training documents."""
    if args.chat_template is not None and not fields.chat:
        raise ConfigError(f"--chat_template {args.chat_template}: --dataset holds {fields.kind}; leave it out")
    refused, why = {"short": ("pack",), "long": ("truncate", "error")}, "whose documents are joined end to end"
    if fields.answers:
        refused, why = {"short": ("concat",), "long": ("split",)}, "which are read whole"
    for flag, values in refused.items():
        given = getattr(args, flag)
        if given in values:
            raise ConfigError(
                f"--{flag} {given} does not go with --dataset of {fields.kind}, {why}; make shards with "
                "smp-train prepare"
            )


def _held_out(
    args: Arguments, most: int, vocab_size: int, seq_len: int, shards: Callable[[str], Source]
) -> Source:
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
        fields = find_fields(files, args.text_column)
        reading, _ = _reading(args, vocab_size, seq_len, fields)
        rows = TextRows(files, replace(reading, shuffled=False), most)
        if not len(rows):
            raise DataError(f"{files[0].path}: has no {fields.kind} to validate on")
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


def refuse_documents(location: str) -> None:
    """Raise DataError, once, where a place surely holds text or chats, of which each line would be no row of tokens."""
    if not place_of(location).exists() or formats.kind_of(location) != formats.SHARDS:
        return
    manifest.refuse_root(location)
    try:
        files = find_files([location], [f"*{suffix}" for suffix in (*SUFFIXES, LOOKED_INTO)], ["_*", *OF_DATASETS])
    except DataError:
        return  # opened as shards, which names what is wrong with it
    fields: dict[str, bool] = {}
    for file in [file for file in files if file.kind == "lines"][:LOOKED_AT]:
        fields = fields_that_are_lists(file)
        if not fields or not fields.keys().isdisjoint(ROW_FIELDS):
            return
    holds = f"records with {first_few(list(fields))}" if fields else "text" if files[0].kind == "whole" else "a table"
    raise DataError(
        f"{location}: holds {holds}, not rows of token ids; to look at text and chats give data inspect --tokenizer, "
        "to make such rows of them: smp-train prepare"
    )


def holds_text(location: str, column: str | None = None) -> bool:
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
