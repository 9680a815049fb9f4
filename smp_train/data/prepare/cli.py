"""``smp-train prepare``: text or chats in, token shards out, with a tokenizer and a manifest.

Records are converted as for training, into token files below the output; a later call continues with these files. Then
one pass over their rows divides the rows into splits, fills rows of the wanted length and writes the shards.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smp_train.data.arrays_file import atomic_file
from smp_train.data.chats import Chats
from smp_train.data.convert import open_token_rows, processes_for
from smp_train.data.files import FileSet, Selection, list_files
from smp_train.data.manifest import MANIFEST, read_manifest
from smp_train.data.prepare.options import SEQ_LEN, read
from smp_train.data.prepare.shards import SplitWriter, entropy, is_held_out
from smp_train.data.readers import records
from smp_train.data.rows import Recipe, grouped
from smp_train.data.text import object_of
from smp_train.data.tokenizer import end_token, load, load_for_chats, train
from smp_train.errors import ConfigError, DataError
from smp_train.models.hugging_face import trust_code
from smp_train.progress import Progress
from smp_train.storage.paths import on_this_machine
from smp_train.storage.paths import place as open_path

MAKER = "smp-train prepare"
FORMAT = 2
SPLITS = ("train", "test")
TOKENS = "_tokens"
"""Folder of the token files, below the output; deleted at the end."""
TOKENIZER_SAMPLE_PER_ENTRY = 512
"""Bytes of text that a tokenizer is trained on, for each entry of its vocabulary."""
BYTES_PER_TOKEN = 8
"""Bytes of input that are converted for each token of --max_rows: more than a token usually has."""
NOT_IN_REQUEST = ("input", "output", "overwrite", "processes")
OUTPUT_FILES = re.compile(r"\.?(train|test)-\d{5}\.json(\.gz)?(\..*\.partial)?")


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises ConfigError and DataError."""
    args = read(argv)
    trust_code(bool(args.trust_remote_code))
    files = _list_input(args)
    if files.kind.answers_only and args.seq_len is not None:
        raise ConfigError(f"--seq_len {args.seq_len}: {files.kind.plural} keep their length; leave it out")
    args.seq_len = None if files.kind.answers_only else args.seq_len or SEQ_LEN
    # An unusable tokenizer or template is refused before anything is written.
    recipe = Recipe(files.kind, tokenizer=args.tokenizer, chat_template=args.chat_template, eos_token=args.eos_token)
    identity = recipe.open().identity if args.tokenizer else open_path(args.chat_template or os.devnull).read_text()
    contents = [identity, [(file.name, file.size, file.version) for file in files.files], FORMAT]
    flags = {key: value for key, value in vars(args).items() if key not in NOT_IN_REQUEST}
    request = {**flags, "contents": hashlib.sha256(json.dumps(contents).encode()).hexdigest()}
    output = Path(args.output)
    earlier = _read_manifest(output)
    if earlier.get("complete") and not args.overwrite:
        if earlier.get("request") == request:
            print(f"{output}: already prepared from the same input")
            return 0
        raise ConfigError(f"--output {output}: holds another preparation; give another folder, or --overwrite 1")
    try:
        _begin(output, earlier, request)
        manifest = prepare(args, files, output)
        _write_json(output / MANIFEST, {"made_by": MAKER, "complete": True, "request": request, **manifest})
    except OSError as error:
        raise DataError(f"{output}: cannot be written ({error.strerror}); start again, and it continues") from None
    shutil.rmtree(output / TOKENS, ignore_errors=True)
    for split, totals in manifest["splits"].items():
        numbers = ", ".join(f"{number} {name}" for name, number in totals.items() if name != "shards")
        print(f"{output / split}: {numbers} in {len(totals['shards'])} shards")
    nats = manifest["unigram_entropy_nats"]["train"]
    print(f"{output / 'tokenizer.json'}: {manifest['vocab_size']} tokens, unigram entropy {nats:.3f} nats per token")
    return 0


def _list_input(args: Namespace) -> FileSet:
    """Return the files of all inputs, ordered by a hash of their names, so that the first files are a fair sample."""
    selection = Selection(args.text_column, args.dataset_config_name, args.pattern, args.exclude, flag="--input")
    inputs = [list_files(location, selection, split=args.split) for location in args.input]
    if len({fileset.kind for fileset in inputs}) > 1:
        kinds = ", ".join(f"{fileset.location} holds {fileset.kind.plural}" for fileset in inputs)
        raise ConfigError(f"--input: {kinds}; prepare one kind at a time")
    if inputs[0].kind.name == "tokens":
        raise DataError(f"{inputs[0].location}: holds rows of tokens, which need no preparation; train on them")
    files = [file for fileset in inputs for file in fileset.files]
    if len(inputs) > 1:  # names are unique within one input only
        files = [replace(file, name=file.shown) for file in files]
    files.sort(key=lambda file: hashlib.sha256(file.name.encode(errors="replace")).digest())
    return replace(inputs[0], files=tuple(files))


def prepare(args: Namespace, files: FileSet, output: Path) -> dict[str, Any]:
    """Write the data set at ``output`` from ``files``; return the contents of its manifest."""
    end, vocab_size = _write_tokenizer(args, files, output)
    test_rows = sys.maxsize if args.validation_shards is None else args.validation_shards * args.rows_per_shard
    train = SplitWriter(args, "train", args.max_rows or sys.maxsize, vocab_size)
    test = SplitWriter(args, "test", test_rows, vocab_size)
    # The tokenizer in the output has the chat template.
    trusted = bool(args.trust_remote_code)
    recipe = Recipe(files.kind, vocab_size, str(output), eos_token=end, trust_remote_code=trusted)
    _write_rows(args, files, recipe, train, test)
    if not (train.rows and (test.rows or not args.validation_fraction or not test.max_rows)):
        raise DataError(
            f"{', '.join(args.input)}: too few records for a row of each split (--seq_len {args.seq_len}); change "
            "--validation_fraction (0: no validation set), or give more"
        )
    return {
        "format": FORMAT, "seq_len": max(train.longest, test.longest), "vocab_size": vocab_size, "eos_token": end,
        "tokenizer_sha256": hashlib.sha256((output / "tokenizer.json").read_bytes()).hexdigest(),
        "splits": {"train": train.totals(), "test": test.totals()},
        "unigram_entropy_nats": {"train": entropy(train.counts)},
    }  # fmt: skip


def _write_rows(args: Namespace, files: FileSet, recipe: Recipe, train: SplitWriter, test: SplitWriter) -> None:
    """Write the shards of both splits; read the files from the first on, and only as many as are needed."""
    test_rows = 1 if args.validation_shards is None else test.max_rows
    test_rows = test_rows if args.validation_fraction else 0

    def has_enough() -> bool:
        return train.full and test.rows >= test_rows

    most = train.max_rows / (1 - args.validation_fraction) + test_rows
    needed = most * (args.seq_len or SEQ_LEN) * BYTES_PER_TOKEN
    with Progress("prepare", args.max_rows, " rows") as progress:
        for part in grouped(files.files, needed, size=lambda file: file.size or needed):
            if has_enough():
                break
            rows = open_token_rows(
                replace(files, files=tuple(part)), recipe, cache_dir=str(Path(args.output, TOKENS)),
                max_bad=1.0 if args.bad_rows == "skip" else None, processes=processes_for(args.processes, 1),
            )  # fmt: skip
            for index in range(len(rows)):
                if has_enough():
                    break
                # Once the validation split is full, held-out records go to training.
                held_out = not test.full and is_held_out(rows.name(index), args.validation_fraction)
                written = train.rows
                (test if held_out else train).add(rows.row(index))
                progress.update(train.rows - written)
        train.write()
        test.write()


def _write_tokenizer(args: Namespace, files: FileSet, output: Path) -> tuple[str, int]:
    """Load or train the tokenizer and write it to the output; return its end token and its vocabulary size."""
    path = output / "tokenizer.json"
    with on_this_machine(args.tokenizer or "") as location:
        if args.tokenizer:
            tokenizer = load(location)
        elif path.exists():  # trained by a preparation that was interrupted
            tokenizer = load(str(path))
        else:
            texts = _training_sample(args, files)
            tokenizer = train(texts, args.train_tokenizer, args.special_tokens, args.min_frequency)
        end, _ = end_token(tokenizer, args.eos_token, location or None)
    loading = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # without it, transformers 4 adds token_type_ids
    }  # fmt: skip
    _write_json(output / "tokenizer_config.json", loading)  # transformers needs this file to load the folder
    with atomic_file(str(path)) as file:
        file.write(tokenizer.to_str(pretty=True).encode() + b"\n")
    if files.kind.name == "chats":
        # Save transformers' tokenizer with its chat template: models trained on these rows are saved with both.
        name = args.tokenizer or str(output)
        loaded = load_for_chats(name, bool(args.trust_remote_code))
        loaded.chat_template = Chats(loaded, files.kind, name, args.chat_template).template
        loaded.save_pretrained(str(output))
        tokenizer = load(str(path))
    return end, tokenizer.get_vocab_size(with_added_tokens=True)


def _training_sample(args: Namespace, files: FileSet) -> Iterator[str]:
    """Yield enough texts for a vocabulary of the size asked for, spread over all files, without held-out records."""
    missing = args.train_tokenizer * TOKENIZER_SAMPLE_PER_ENTRY
    every = max(1, files.size // missing)
    all_records = ((file, line, record) for file in files.files for _, line, record in records(file, files.kind.fields))
    for number, (file, line, record) in enumerate(all_records, 1):
        if number % every or is_held_out(f"{file.name}:{line}", args.validation_fraction):
            continue
        try:
            fields = {"": record} if isinstance(record, str) else object_of(record)
        except ValueError:
            continue  # reported by the conversion
        text = "\n".join(_strings([fields.get(name) for name in ("", *files.kind.fields)]))
        yield text
        missing -= len(text)
        if missing < 0:
            return


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in nested lists and objects."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(inner)


def _read_manifest(output: Path) -> dict[str, Any]:
    """Return the manifest of an earlier preparation; empty if none. Raises ConfigError for a folder of other files."""
    earlier = read_manifest(str(output))
    if earlier.get("made_by") == MAKER:
        return earlier
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: is not empty and was not made by this command; give another folder")
    return {}


def _begin(output: Path, earlier: dict[str, Any], request: dict[str, Any]) -> None:
    """Mark the output as unfinished; delete an earlier preparation, except its token files."""
    output.mkdir(parents=True, exist_ok=True)
    if earlier.get("complete") or earlier.get("request") != request:
        for name in ("tokenizer.json", "chat_template.jinja"):
            (output / name).unlink(missing_ok=True)
    _write_json(output / MANIFEST, {"made_by": MAKER, "complete": False, "request": request})
    for path in [path for split in SPLITS for path in (output / split).glob("*")]:
        if OUTPUT_FILES.fullmatch(path.name):
            path.unlink()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_file(str(path)) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())
