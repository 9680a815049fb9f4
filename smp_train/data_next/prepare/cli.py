"""``smp-train prepare``: text or chats in, token shards out, with a tokenizer and a manifest."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data_next import token_file
from smp_train.data_next.atomic_file import atomic_file
from smp_train.data_next.bad_records import BadRecords
from smp_train.data_next.chats import Chats
from smp_train.data_next.files import DataFile, Selection, list_files
from smp_train.data_next.kinds import Kind
from smp_train.data_next.manifest import MANIFEST
from smp_train.data_next.prepare.options import SEQ_LEN, read
from smp_train.data_next.prepare.splits import Split, entropy, is_held_out
from smp_train.data_next.prepare.work import PROGRESS, SPLITS, Preparation, is_whole, processes_for, saved_progress
from smp_train.data_next.prepare.writing import write_json
from smp_train.data_next.readers import Record, records
from smp_train.data_next.rows import Recipe
from smp_train.data_next.text import object_of
from smp_train.data_next.tokenizer import end_token, load, load_for_chats, train
from smp_train.errors import ConfigError, DataError
from smp_train.models.hugging_face import trust_code
from smp_train.progress import Progress
from smp_train.storage.paths import on_this_machine
from smp_train.storage.paths import place as open_path

MAKER = "smp-train prepare"
FORMAT = 2
TOKENIZER_SAMPLE_PER_ENTRY = 512
"""Bytes of text that a tokenizer is trained on, for each entry of its vocabulary."""
OUTPUT_FILES = re.compile(r"(train|test)-\d{5}\.(json|json\.gz|tok|idx)")
NOT_IN_REQUEST = ("input", "output", "overwrite", "processes")


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises ConfigError and DataError."""
    args = read(argv)
    trust_code(bool(args.trust_remote_code))
    files, kind = _list_input(args)
    output = Path(args.output)
    _check_flags(args, kind)
    request = _request(args, files)
    earlier = _read_manifest(output)
    if (
        earlier.get("complete")
        and earlier.get("request") == request
        and all(is_whole(output / split, totals["shards"]) for split, totals in earlier["splits"].items())
    ):
        print(f"{output}: already prepared from the same input")
        return 0
    if earlier.get("complete") and not args.overwrite:
        raise ConfigError(
            f"--output {output}: holds a preparation of other input or flags, or of another version; "
            "give another folder, or --overwrite 1"
        )
    _begin(output, earlier, request)
    manifest = prepare(args, files, kind, output)
    write_json(output / MANIFEST, {"made_by": MAKER, "complete": True, "request": request, **manifest})
    (output / PROGRESS).unlink(missing_ok=True)
    _print_summary(output, manifest)
    return 0


def _list_input(args: argparse.Namespace) -> tuple[list[DataFile], Kind]:
    """Return the files, ordered by a hash of their names so that the first are a fair sample, and their kind."""
    selection = Selection(args.text_column, args.dataset_config_name, args.pattern, args.exclude, flag="--input")
    inputs = [list_files(location, selection, split=args.split) for location in args.input]
    kind = inputs[0].kind
    for files in inputs:
        if files.kind.name == "tokens":
            raise DataError(f"{files.location}: holds rows of tokens, which need no preparation; train on them")
        if files.kind != kind:
            raise ConfigError(
                f"--input: {inputs[0].location} holds {kind.plural}, {files.location} {files.kind.plural}; prepare "
                "one kind at a time"
            )
    return sorted((file for each in inputs for file in each.files), key=_hash_of_name), kind


def _hash_of_name(file: DataFile) -> tuple[bytes, str, str]:
    name = file.name.encode(errors="surrogateescape")
    return hashlib.blake2b(name, digest_size=8).digest(), file.name, file.path


def _check_flags(args: argparse.Namespace, kind: Kind) -> None:
    """Raise ConfigError for flags that do not fit the kind of records, before anything is written."""
    if args.chat_template and kind.name != "chats":
        raise ConfigError(f"--chat_template {args.chat_template}: the input holds {kind.plural}; leave it out")
    if kind.answers_only and args.seq_len is not None:
        raise ConfigError(
            f"--seq_len {args.seq_len}: {kind.plural} are rows of their own length, which training cuts and packs "
            "(--max_context_width, --short pack); leave it out"
        )
    if kind.name == "chats" and not args.tokenizer and not args.chat_template:
        raise ConfigError("--train_tokenizer: chats need a chat template; give --chat_template FILE")
    if kind.name == "chats" and args.tokenizer:
        Chats(load_for_chats(args.tokenizer, bool(args.trust_remote_code)), kind, args.tokenizer, args.chat_template)
    args.seq_len = args.seq_len or SEQ_LEN


def prepare(args: argparse.Namespace, files: list[DataFile], kind: Kind, output: Path) -> dict[str, Any]:
    """Write ``output`` from ``files``; return the counts in its manifest."""
    end, vocab_size = _write_tokenizer(args, files, kind, output)
    # The tokenizer in the output has the chat template.
    recipe = Recipe(kind, tokenizer=str(output), eos_token=end, trust_remote_code=bool(args.trust_remote_code))
    test_rows = sys.maxsize if args.validation_shards is None else args.validation_shards * args.rows_per_shard
    train, test = (
        Split(None if kind.answers_only else args.seq_len, args.rows_per_shard, most, np.zeros(vocab_size, np.int64))
        for most in (args.max_rows or sys.maxsize, test_rows)
    )
    with Progress("prepare", args.max_rows, " rows") as progress:
        try:
            Preparation(
                output, files, recipe, dict(zip(SPLITS, (train, test), strict=True)),
                fraction=args.validation_fraction, output_type=args.output_type, zipped=bool(args.zip),
                bad=BadRecords(args.bad_rows == "skip"), advance=progress.update,
            ).run(processes_for(args.processes, files))  # fmt: skip
        except OSError as error:
            raise DataError(
                f"{output}: cannot be written ({error.strerror}); free some space, start again, and it continues"
            ) from None
    row = "a row" if kind.answers_only else f"a row of {args.seq_len} tokens"
    remedy = "" if kind.answers_only else "lower --seq_len, or "
    if train.rows == 0:
        raise DataError(f"{', '.join(args.input)}: too few records for {row}; {remedy}lower --validation_fraction")
    if args.validation_fraction and test_rows and test.rows == 0:
        raise DataError(
            f"{', '.join(args.input)}: too few records for {row} of validation; {remedy}raise --validation_fraction, "
            "or set it to 0 for no validation set"
        )
    return {
        "format": FORMAT, "seq_len": max(train.longest, test.longest), "vocab_size": vocab_size, "eos_token": end,
        "tokenizer_sha256": hashlib.sha256((output / "tokenizer.json").read_bytes()).hexdigest(),
        "splits": {
            name: {**split.totals(), "shards": split.shards}
            for name, split in zip(SPLITS, (train, test), strict=True)
        },
        "unigram_entropy_nats": {
            "train": entropy(train.counts),
            "test": entropy(test.counts) if test.rows else None,
            "test_under_train": entropy(test.counts, train.counts) if test.rows else None,
        },
    }  # fmt: skip


def _write_tokenizer(args: argparse.Namespace, files: list[DataFile], kind: Kind, output: Path) -> tuple[str, int]:
    """Load or train the tokenizer and write it to the output; return its end token and its vocabulary size."""
    path = output / "tokenizer.json"
    with on_this_machine(args.tokenizer or "") as location:
        if args.tokenizer:
            tokenizer = load(location)
        elif path.exists():  # trained by a preparation that was interrupted
            tokenizer = load(str(path))
        else:
            texts = _training_sample(args, files, kind)
            tokenizer = train(texts, args.train_tokenizer, args.special_tokens, args.min_frequency)
        end, _ = end_token(tokenizer, args.eos_token, location or None)
    # With this file transformers loads the folder, end token included.
    loading = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    write_json(output / "tokenizer_config.json", loading)
    with atomic_file(str(path)) as file:
        file.write(tokenizer.to_str(pretty=True).encode() + b"\n")
    if kind.name == "chats":
        # The tokenizer of transformers, with its chat template, is also saved with models trained on these rows.
        source = args.tokenizer or str(output)
        loaded = load_for_chats(source, bool(args.trust_remote_code))
        loaded.chat_template = Chats(loaded, kind, source, args.chat_template).template
        loaded.save_pretrained(str(output))
        tokenizer = load(str(path))
    return end, tokenizer.get_vocab_size(with_added_tokens=True)


def _training_sample(args: argparse.Namespace, files: list[DataFile], kind: Kind) -> Iterator[str]:
    """Yield enough texts for a vocabulary of the size asked for, spread over all files; none is held out."""
    missing = args.train_tokenizer * TOKENIZER_SAMPLE_PER_ENTRY
    every = max(1, sum(file.size for file in files) // missing)
    number = 0
    for file in files:
        for index, _, record in records(file, kind.fields):
            number += 1
            if number % every == 0 and not is_held_out(file.name, index, args.validation_fraction):
                text = "\n".join(_strings(record, kind))
                yield text
                missing -= len(text)
                if missing < 0:
                    return


def _strings(record: Record, kind: Kind) -> Iterator[str]:
    """Yield the texts in a record; none of a malformed one, which the preparation will report."""
    try:
        fields = {"": record} if isinstance(record, str) else object_of(record)
    except ValueError:
        return
    values = [value for name, value in fields.items() if name in ("", *kind.fields)]
    while values:
        value = values.pop(0)
        if isinstance(value, dict):
            values = [*value.values(), *values]
        elif isinstance(value, list):
            values = [*value, *values]
        elif isinstance(value, str):
            yield value


def _request(args: argparse.Namespace, files: list[DataFile]) -> dict[str, Any]:
    """Return all that decides the output; a call with the same request has nothing to do."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0{file.version}\n".encode(errors="surrogateescape"))
    request = {key: value for key, value in vars(args).items() if key not in NOT_IN_REQUEST}
    template = request.pop("chat_template")
    if template:
        request["chat_template_sha256"] = hashlib.sha256(open_path(template).read_bytes()).hexdigest()
    tokenizer = Path(args.tokenizer or "")
    tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if args.tokenizer and tokenizer.is_file():
        request["tokenizer_sha256"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    if args.output_type == "cache":
        request["token_files"] = token_file.VERSION
    return {"format": FORMAT, **request, "files": len(files), "files_sha256": digest.hexdigest()}


def _read_manifest(output: Path) -> dict[str, Any]:
    """Return the manifest of an earlier preparation, empty without one. Raises ConfigError for another folder."""
    try:
        manifest: dict[str, Any] = json.loads((output / MANIFEST).read_text())
        if manifest.get("made_by") == MAKER:
            return manifest
    except (OSError, ValueError, AttributeError):
        pass
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: is not empty and was not made by this command; give another folder")
    return {}


def _begin(output: Path, earlier: dict[str, Any], request: dict[str, Any]) -> None:
    """Mark the output as unfinished; delete an earlier preparation, except what this one continues."""
    # Without malformed records --bad_rows makes no difference to the output.
    continues = not earlier.get("complete") and earlier.get("request") in (request, {**request, "bad_rows": "stop"})
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not continues:
            for name in (PROGRESS, "tokenizer.json", "chat_template.jinja"):
                (output / name).unlink(missing_ok=True)
        write_json(output / MANIFEST, {"made_by": MAKER, "complete": False, "request": request})
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror})") from None
    saved = saved_progress(output)
    for split in SPLITS:
        kept = {shard["name"].partition(".")[0] for shard in saved.get(split, {}).get("shards", ())}
        for path in (output / split).glob("*"):
            temporary = path.name.startswith(f".{split}-") and path.suffix == ".tmp"
            if temporary or (OUTPUT_FILES.fullmatch(path.name) and path.name.partition(".")[0] not in kept):
                os.unlink(path)


def _print_summary(output: Path, manifest: dict[str, Any]) -> None:
    for split, totals in manifest["splits"].items():
        counted = totals.get("counted_tokens")
        size = (
            f"{manifest['seq_len']} tokens"
            if counted is None
            else (f"{totals['tokens']} tokens in all, {counted} of them counted, the longest of {manifest['seq_len']},")
        )
        print(
            f"{output / split}: {totals['rows']} rows of {size} in {len(totals['shards'])} shards, from "
            f"{totals['documents']} documents"
        )
    nats = manifest["unigram_entropy_nats"]
    print(
        f"{output / 'tokenizer.json'}: {manifest['vocab_size']} tokens, unigram entropy {nats['train']:.3f} nats per "
        "token"
    )
