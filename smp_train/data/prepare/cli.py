"""``smp-train prepare``: text in, token shards out, with a tokenizer and a manifest."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from smp_train.data.prepare import tokenizer as tokenizers
from smp_train.data.prepare.documents import find_files, held_out, read_documents
from smp_train.data.prepare.shards import ShardWriter, entropy
from smp_train.data.token_cache import atomic_file
from smp_train.data.utils import Progress
from smp_train.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MANIFEST = "_manifest.json"
MAKER = "smp-train prepare"
FORMAT = 1
BATCH_CHARACTERS = 1 << 19
TOKENIZER_SAMPLE_PER_ENTRY = 512
"""Bytes of text a tokenizer is trained on, for each entry of its vocabulary."""
OURS = re.compile(r"(train|test)-\d{5}\.json(\.gz)?")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"smp-train prepare: {message}; see smp-train prepare --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of this verb's flags."""
    found = _Parser(prog="smp-train prepare", description=__doc__, allow_abbrev=False)
    add = found.add_argument
    add("--input", nargs="+", required=True, help="files or folders of .txt .md .rst .py .jsonl(.gz)")
    add("--output", required=True, help="folder for train/, test/, tokenizer.json and " + MANIFEST)
    add("--pattern", nargs="+", default=[], help="which files of a folder, as '*.py'; default: by suffix")
    add("--exclude", nargs="+", default=[], help="names of files and folders to leave out, as 'test*'")
    which = found.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", help="tokenizer.json, a folder with one, or a name on the hub")
    which.add_argument("--train_tokenizer", type=int, metavar="SIZE", help="train a byte-level BPE here")
    add("--eos_token", help="token that ends a document; default: the tokenizer's own")
    add("--seq_len", type=int, default=512, help="tokens per row (default: %(default)s)")
    add("--rows_per_shard", type=int, default=1024, help="rows per file (default: %(default)s)")
    add("--max_rows", type=int, help="training rows to make at most; default: all there are")
    add("--validation_fraction", type=float, default=0.1, help="share of documents held out (default: 0.1)")
    add("--validation_shards", type=int, help="validation files to make at most; default: no limit")
    add("--zip", type=int, choices=(0, 1), default=1, help="gzip the shards (default: %(default)s)")
    add("--overwrite", type=int, choices=(0, 1), default=0, help="replace an earlier preparation")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises ConfigError and DataError."""
    args = parser().parse_args([_underscored(word) for word in argv])
    for flag in ("seq_len", "rows_per_shard"):
        if getattr(args, flag) < (2 if flag == "seq_len" else 1):
            raise ConfigError(f"--{flag} {getattr(args, flag)}: too small")
    if not 0 <= args.validation_fraction < 1:
        raise ConfigError(f"--validation_fraction {args.validation_fraction}: must be in [0, 1)")
    files = find_files(args.input, args.pattern, args.exclude)
    output = Path(args.output)
    request = _request(args, files)
    if _already_made(output, request, bool(args.overwrite)):
        print(f"{output}: already prepared from the same input")
        return 0
    _clear(output, request)
    manifest = prepare(args, files, output)
    _write_json(output / MANIFEST, {"made_by": MAKER, "complete": True, "request": request, **manifest})
    _print_summary(output, manifest)
    return 0


def _underscored(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word


def prepare(args: argparse.Namespace, files: list[tuple[Path, str]], output: Path) -> dict[str, Any]:
    """Write ``output`` from ``files``; return what the manifest says of it."""
    tokenizer = (
        tokenizers.load(args.tokenizer)
        if args.tokenizer
        else tokenizers.train(_training_sample(args, files), args.train_tokenizer)
    )
    end, end_id = tokenizers.end_token(tokenizer, args.eos_token, args.tokenizer)
    text = tokenizer.to_str(pretty=True).encode()
    with atomic_file(str(output / "tokenizer.json")) as file:
        file.write(text + b"\n")
    with atomic_file(str(output / "tokenizer_config.json")) as file:
        file.write(tokenizers.configuration(end).encode())
    # What a document says about ends of documents is text like any other.
    tokenizer.encode_special_tokens = True
    vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    shards = args.validation_shards
    limits = {"train": args.max_rows, "test": None if shards is None else shards * args.rows_per_shard}
    with Progress("prepare", args.max_rows, " rows") as progress:
        writers = {
            split: ShardWriter(
                output / split,
                split,
                seq_len=args.seq_len,
                rows_per_shard=args.rows_per_shard,
                max_rows=limit,
                vocab_size=vocab_size,
                zipped=bool(args.zip),
                advance=progress.update,
            )
            for split, limit in limits.items()
        }
        _fill(writers, tokenizer, end_id, files, args.validation_fraction)
    train, test = writers["train"], writers["test"]
    if train.rows == 0:
        raise DataError(
            f"{', '.join(args.input)}: too little text for a row of {args.seq_len}; lower --seq_len"
        )
    if args.validation_fraction and test.rows == 0:
        raise DataError(
            f"{', '.join(args.input)}: too little text for one validation row of {args.seq_len} tokens; "
            "raise --validation_fraction, or set it to 0 for no validation set"
        )
    return {
        "format": FORMAT,
        "seq_len": args.seq_len,
        "vocab_size": vocab_size,
        "eos_token": end,
        "tokenizer_sha256": hashlib.sha256(text + b"\n").hexdigest(),
        "splits": {split: _split_totals(writer) for split, writer in writers.items()},
        "unigram_entropy_nats": {
            "train": entropy(train.counts),
            "test": entropy(test.counts) if test.rows else None,
            "test_under_train": entropy(test.counts, train.counts) if test.rows else None,
        },
    }


def _split_totals(writer: ShardWriter) -> dict[str, Any]:
    return {
        "documents": writer.documents,
        "rows": writer.rows,
        "tokens": writer.rows * writer.seq_len,
        "tokens_dropped": writer.dropped,
        "shards": writer.shards,
    }


def _numbered(files: list[tuple[Path, str]]) -> Iterator[tuple[int, str]]:
    number = 0
    for path, _ in files:
        for text in read_documents(path):
            yield number, text
            number += 1


def _training_sample(args: argparse.Namespace, files: list[tuple[Path, str]]) -> Iterator[str]:
    """Yield as many training documents, spread over all files, as a vocabulary of the wanted size needs."""
    wanted = args.train_tokenizer * TOKENIZER_SAMPLE_PER_ENTRY
    every = max(1, sum(path.stat().st_size for path, _ in files) // wanted)
    for number, text in _numbered(files):
        if number % every == 0 and not held_out(number, args.validation_fraction):
            yield text
            wanted -= len(text)
            if wanted < 0:
                return


def _fill(
    writers: dict[str, ShardWriter],
    tokenizer: Tokenizer,
    end: int,
    files: list[tuple[Path, str]],
    validation_fraction: float,
) -> None:
    train, test = writers["train"], writers["test"]
    waiting: list[tuple[int, str]] = []
    size = 0

    def write() -> None:
        encoded = tokenizer.encode_batch_fast([text for _, text in waiting], add_special_tokens=False)
        for (number, _), encoding in zip(waiting, encoded, strict=True):
            # A document goes to one side whole. Once validation has all it wants, the rest is for training.
            writer = test if held_out(number, validation_fraction) and not test.full else train
            if not writer.full:
                writer.add([*encoding.ids, end])
        waiting.clear()

    for document in _numbered(files):
        waiting.append(document)
        size += len(document[1])
        if size >= BATCH_CHARACTERS:
            write()
            size = 0
            if train.full and (test.full or test.max_rows is None or not validation_fraction):
                break
    write()
    train.finish()
    test.finish()


def _request(args: argparse.Namespace, files: list[tuple[Path, str]]) -> dict[str, Any]:
    """Return what the output depends on; a call that repeats it finds its work done."""
    digest = hashlib.sha256()
    for path, name in files:
        status = path.stat()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    given = {key: value for key, value in vars(args).items() if key not in ("input", "output", "overwrite")}
    return {"format": FORMAT, **given, "files": len(files), "files_sha256": digest.hexdigest()}


def _already_made(output: Path, request: dict[str, Any], overwrite: bool) -> bool:
    """Tell whether the output is there already; raise ConfigError when something else is."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    try:
        manifest = json.loads((output / MANIFEST).read_text())
    except (OSError, ValueError):
        manifest = {}
    if manifest.get("made_by") != MAKER:
        raise ConfigError(
            f"--output {output}: is not empty and was not made by this command; give another folder"
        )
    if not manifest.get("complete"):
        return False
    if manifest.get("request") == request and all(
        (output / split / shard["name"]).is_file()
        and (output / split / shard["name"]).stat().st_size == shard["bytes"]
        for split, totals in manifest["splits"].items()
        for shard in totals["shards"]
    ):
        return True
    if not overwrite:
        raise ConfigError(
            f"--output {output}: holds a preparation of other input or flags; "
            "give another folder, or --overwrite 1"
        )
    return False


def _clear(output: Path, request: dict[str, Any]) -> None:
    """Mark the output as being made, then remove the shards of an earlier preparation."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        _write_json(output / MANIFEST, {"made_by": MAKER, "complete": False, "request": request})
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror})") from None
    for split in ("train", "test"):
        if (output / split).is_dir():
            for name in os.listdir(output / split):
                if OURS.fullmatch(name):
                    os.unlink(output / split / name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with atomic_file(str(path)) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


def _print_summary(output: Path, manifest: dict[str, Any]) -> None:
    for split, totals in manifest["splits"].items():
        print(
            f"{output / split}: {totals['rows']} rows of {manifest['seq_len']} tokens "
            f"in {len(totals['shards'])} shards, from {totals['documents']} documents"
        )
    nats = manifest["unigram_entropy_nats"]
    print(
        f"{output / 'tokenizer.json'}: {manifest['vocab_size']} tokens, "
        f"unigram entropy {nats['train']:.3f} nats per token"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
