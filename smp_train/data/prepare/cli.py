"""``smp-train prepare``: text or conversations in, token shards out, with a tokenizer and a manifest."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train.data import token_file
from smp_train.data.atomic_file import atomic_file
from smp_train.data.bad_rows import LeftOut
from smp_train.data.manifest import MANIFEST
from smp_train.data.prepare import pipeline, writing
from smp_train.data.prepare import tokenizer as tokenizers
from smp_train.data.prepare.options import SEQ_LEN, read
from smp_train.data.prepare.packing import Collector, Position, entropy, held_out, numbered
from smp_train.data.prepare.pipeline import PROGRESS, SPLITS, Preparation, is_whole, saved_progress
from smp_train.data.text.conversations import chat_tokenizer
from smp_train.data.text.detect import find_fields
from smp_train.data.text.fields import Fields, texts_of
from smp_train.data.text.files import find_files
from smp_train.data.text.read import TextFile
from smp_train.errors import ConfigError, DataError
from smp_train.models.hugging_face import trust_code
from smp_train.progress import Progress
from smp_train.storage.paths import place

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAKER = "smp-train prepare"
FORMAT = 1
TOKENIZER_SAMPLE_PER_ENTRY = 512
"""Bytes of text a tokenizer is trained on, for each entry of its vocabulary."""
OURS = re.compile(r"(train|test)-\d{5}\.(json|json\.gz|tok|idx|arrow)|state\.json|dataset_info\.json")
NOT_IN_REQUEST = ("input", "output", "overwrite", "processes")


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises ConfigError and DataError."""
    args = read(argv)
    trust_code(bool(args.trust_remote_code))
    files = find_files(
        args.input, args.pattern, args.exclude, config=args.dataset_config_name, split=args.split,
        column=args.text_column,
    )  # fmt: skip
    output = Path(args.output)
    fields = _settle_fields(args, files)
    request = _request(args, files)
    before = _read_manifest(output)
    if before.get("complete") and before.get("request") == request and all(
        is_whole(output / split, totals["shards"]) for split, totals in before["splits"].items()
    ):
        print(f"{output}: already prepared from the same input")
        return 0
    if before.get("complete") and not args.overwrite:
        raise ConfigError(
            f"--output {output}: holds a preparation of other input or flags, or of another version; "
            "give another folder, or --overwrite 1"
        )
    _begin(output, before, request)
    manifest = prepare(args, files, fields, output)
    writing.write_json(output / MANIFEST, {"made_by": MAKER, "complete": True, "request": request, **manifest})
    (output / PROGRESS).unlink(missing_ok=True)
    _print_summary(output, manifest)
    return 0


def _settle_fields(args: argparse.Namespace, files: list[TextFile]) -> Fields:
    """Return what the documents are; set the flags that depend on it. Raises ConfigError for those that do not fit."""
    fields = find_fields(files, args.text_column)
    args.text_column = ",".join(fields.names)
    if args.chat_template and not fields.chat:
        raise ConfigError(f"--chat_template {args.chat_template}: the input holds {fields.kind}; leave it out")
    if fields.answers:
        if args.seq_len is not None:
            raise ConfigError(
                f"--seq_len {args.seq_len}: {fields.kind} are rows of their own length, which training cuts and packs "
                "(--max_context_width, --short pack); leave it out"
            )
        if args.tokenizer:  # an unusable one is refused before anything is written
            chat_tokenizer(args.tokenizer, args.chat_template, fields)
        elif fields.chat and not args.chat_template:
            raise ConfigError("--train_tokenizer: chats need a chat template; give --chat_template FILE")
    args.seq_len = args.seq_len or SEQ_LEN
    return fields


def prepare(args: argparse.Namespace, files: list[TextFile], fields: Fields, output: Path) -> dict[str, Any]:
    """Write ``output`` from ``files``; return what the manifest says of it."""
    tokenizer, text, (end, end_id) = _tokenizer(args, files, fields, output)
    pipeline.use_tokenizer(str(output), fields, end_id)
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    with Progress("prepare", args.max_rows, " rows") as progress:
        try:
            made = Preparation(args, output, fields, vocab_size, end_id, _left_out(args), progress.update)
            made.run(files, pipeline.processes_for(args.processes, files))
        except OSError as error:
            raise DataError(
                f"{output}: cannot be written ({error.strerror}); free some space, start again, and it goes on"
            ) from None
    train, test = (made.packers[split] for split in SPLITS)
    little, of, remedy = (
        (f"too few {fields.kind}", "", "--validation_fraction") if fields.answers
        else ("too little text", f" of {args.seq_len} tokens", "--seq_len")
    )  # fmt: skip
    if train.rows == 0:
        raise DataError(f"{', '.join(args.input)}: {little} for a row{of}; lower {remedy}")
    if args.validation_fraction and test.rows == 0:
        raise DataError(
            f"{', '.join(args.input)}: {little} for one validation row{of}; "
            "raise --validation_fraction, or set it to 0 for no validation set"
        )
    if args.output_type == "arrow":
        for split, shards in made.shards.items():
            if shards:
                writing.finish_arrow(output / split, split, shards, ["input_ids", *["labels"] * fields.answers])
    return {
        "format": FORMAT, "seq_len": _row_tokens(args, made), "vocab_size": vocab_size, "eos_token": end,
        "tokenizer_sha256": hashlib.sha256(text).hexdigest(),
        "splits": {
            split: {**packer.totals(), "shards": made.shards[split]} for split, packer in made.packers.items()
        },
        "unigram_entropy_nats": {
            "train": entropy(train.counts),
            "test": entropy(test.counts) if test.rows else None,
            "test_under_train": entropy(test.counts, train.counts) if test.rows else None,
        },
    }  # fmt: skip


def _row_tokens(args: argparse.Namespace, made: Preparation) -> int:
    """Return the tokens of the longest row."""
    return max(packer.longest if isinstance(packer, Collector) else args.seq_len for packer in made.packers.values())


def _tokenizer(
    args: argparse.Namespace, files: list[TextFile], fields: Fields, output: Path
) -> tuple[Tokenizer, bytes, tuple[str, int]]:
    """Load or train the tokenizer and write it beside the shards; return (it, its file, its end token with id)."""
    made = output / "tokenizer.json"
    if args.tokenizer:
        tokenizer = tokenizers.load(args.tokenizer)
    elif made.exists():
        # Trained by a run that was interrupted.
        tokenizer = tokenizers.load(str(made))
    else:
        tokenizer = tokenizers.train(
            _training_sample(args, files, fields), args.train_tokenizer, args.special_tokens, args.min_frequency
        )
    end, end_id = tokenizers.end_token(tokenizer, args.eos_token, args.tokenizer)
    text = tokenizer.to_str(pretty=True).encode() + b"\n"
    # With it transformers loads the folder, end token and all.
    loading = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "clean_up_tokenization_spaces": False}
    writing.write_json(output / "tokenizer_config.json", loading)
    with atomic_file(str(made)) as file:
        file.write(text)
    if fields.answers:
        # Whole, with its chat template: it also goes with the models that are trained on these rows.
        whole = chat_tokenizer(args.tokenizer or str(output), args.chat_template, fields)
        whole.save_pretrained(str(output))
        tokenizer, text = whole.backend_tokenizer, made.read_bytes()
    return tokenizer, text, (end, end_id)


def _left_out(args: argparse.Namespace) -> LeftOut | None:
    return LeftOut() if args.bad_rows == "skip" else None


def _training_sample(args: argparse.Namespace, files: list[TextFile], fields: Fields) -> Iterator[str]:
    """Yield as many training documents, spread over all files, as a vocabulary of the wanted size needs."""
    wanted = args.train_tokenizer * TOKENIZER_SAMPLE_PER_ENTRY
    every = max(1, sum(file.size for file in files) // wanted)
    for (_, _, number), _, document in numbered(files, fields, Position(), _left_out(args)):
        if number % every == 0 and not held_out(number, args.validation_fraction):
            text = "\n".join(texts_of(document))
            yield text
            wanted -= len(text)
            if wanted < 0:
                return


def _request(args: argparse.Namespace, files: list[TextFile]) -> dict[str, Any]:
    """Return what the output depends on; a call that repeats it finds its work done."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0{file.version}\n".encode())
    given = {key: value for key, value in vars(args).items() if key not in NOT_IN_REQUEST}
    template = given.pop("chat_template")
    if template:
        given["chat_template_sha256"] = hashlib.sha256(place(template).read_bytes()).hexdigest()
    tokenizer = Path(args.tokenizer or "")
    tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if args.tokenizer and tokenizer.is_file():
        given["tokenizer_sha256"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    if args.output_type == "cache":
        given["token_files"] = token_file.VERSION
    return {"format": FORMAT, **given, "files": len(files), "files_sha256": digest.hexdigest()}


def _read_manifest(output: Path) -> dict[str, Any]:
    """Return the manifest of an earlier preparation, empty without one; ConfigError where something else is."""
    try:
        manifest: dict[str, Any] = json.loads((output / MANIFEST).read_text())
        if manifest.get("made_by") == MAKER:
            return manifest
    except (OSError, ValueError, AttributeError):
        pass
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output}: is not empty and was not made by this command; give another folder")
    return {}


def _begin(output: Path, before: dict[str, Any], request: dict[str, Any]) -> None:
    """Mark the output as being made, then remove what an earlier preparation left, unless it was of the same."""
    # Without a malformed document the outcome is the same whether such ones stop the work or are left out.
    goes_on = not before.get("complete") and before.get("request") in (request, {**request, "bad_rows": "stop"})
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not goes_on:
            for name in (PROGRESS, "tokenizer.json", "chat_template.jinja"):
                (output / name).unlink(missing_ok=True)
        writing.write_json(output / MANIFEST, {"made_by": MAKER, "complete": False, "request": request})
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror})") from None
    saved = saved_progress(output)
    for split in SPLITS:
        kept = {str(shard["name"]).rpartition(".")[0] for shard in saved[split]["shards"]}
        for path in (output / split).glob("*"):
            half_written = path.name.startswith(f".{split}-") and path.suffix == ".tmp"
            if half_written or (OURS.fullmatch(path.name) and path.stem not in kept):
                path.unlink()


def _print_summary(output: Path, manifest: dict[str, Any]) -> None:
    for split, totals in manifest["splits"].items():
        counted = totals.get("counted_tokens")
        of = f"{manifest['seq_len']} tokens" if counted is None else (
            f"{totals['tokens']} tokens in all, {counted} of them counted, the longest of {manifest['seq_len']},"
        )
        print(
            f"{output / split}: {totals['rows']} rows of {of} "
            f"in {len(totals['shards'])} shards, from {totals['documents']} documents"
        )
    nats = manifest["unigram_entropy_nats"]
    print(
        f"{output / 'tokenizer.json'}: {manifest['vocab_size']} tokens, "
        f"unigram entropy {nats['train']:.3f} nats per token"
    )
