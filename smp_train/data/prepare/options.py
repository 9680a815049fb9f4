"""The flags of ``smp-train prepare``, read and checked without numpy, so that help and mistakes do not need it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec

from smp_train.arguments.verb_parser import VerbParser, at_least
from smp_train.data.manifest import MANIFEST
from smp_train.errors import ConfigError, install

ABOUT = "``smp-train prepare``: text or conversations in, token shards out, with a tokenizer and a manifest."
SEQ_LEN = 512
KINDS = ("shards", "cache", "arrow")


def parser() -> argparse.ArgumentParser:
    """Return the parser of this verb's flags."""
    found = VerbParser(prog="smp-train prepare", description=ABOUT, allow_abbrev=False)
    add = found.add_argument
    add(
        "--input", nargs="+", required=True,
        help="files or folders of .jsonl(.gz) .json(.gz) .parquet .txt .md .rst .py, s3://, or a name on the hub",
    )  # fmt: skip
    add("--dataset_config_name", help="configuration of a data set of the hub, as en")
    add("--split", default="train", help="split of a data set of the hub (default: %(default)s)")
    add(
        "--text_column", metavar="FIELD",
        help="field of the text or of the chats, or two, PROMPT,COMPLETION (default: text, messages, or "
        "prompt,completion, whichever is there)",
    )  # fmt: skip
    add("--chat_template", metavar="FILE", help="chat template; default: the tokenizer's own")
    add("--output", required=True, help="folder for train/, test/, tokenizer.json and " + MANIFEST)
    add("--pattern", nargs="+", default=[], help="which files of a folder, as '*.py'; default: by suffix")
    add("--exclude", nargs="+", default=[], help="names of files and folders to leave out, as 'test*'")
    which = found.add_mutually_exclusive_group(required=True)
    which.add_argument("--tokenizer", help="tokenizer.json, a folder with one, or a name on the hub")
    which.add_argument("--train_tokenizer", type=at_least(1), metavar="SIZE", help="train a byte-level BPE here")
    add("--special_tokens", nargs="+", default=[], help="for --train_tokenizer: entries that are never split")
    add(
        "--min_frequency", type=at_least(0), default=0,
        help="for --train_tokenizer: of a pair that is merged (default: 0)",
    )  # fmt: skip
    add("--trust_remote_code", type=int, choices=(0, 1), default=0, help="run the tokenizer's own code")
    add(
        "--bad_rows", choices=("stop", "skip"), default="stop",
        help="a document that is broken, no text, not UTF-8 or has a NUL stops this, or is left out (default: stop)",
    )  # fmt: skip
    add("--eos_token", help="token that ends a document; default: the tokenizer's own")
    add(
        "--seq_len", type=at_least(2),
        help=f"tokens per row of text (default: {SEQ_LEN}); a conversation is a row of its own",
    )  # fmt: skip
    add("--rows_per_shard", type=at_least(1), default=1024, help="rows per file (default: %(default)s)")
    add("--max_rows", type=at_least(1), help="training rows to make at most; default: all there are")
    add("--validation_fraction", type=float, default=0.1, help="share of documents held out (default: 0.1)")
    add("--validation_shards", type=at_least(0), help="validation files to make at most; default: no limit")
    add(
        "--output_type", choices=KINDS, default="shards",
        help="JSON lines, the token cache training makes of them, or a Hugging Face data set (default: %(default)s)",
    )  # fmt: skip
    add("--processes", type=at_least(1), help="to tokenise and write in; default: one for each core, where worth it")
    add("--zip", type=int, choices=(0, 1), default=1, help="gzip the shards (default: %(default)s)")
    add("--overwrite", type=int, choices=(0, 1), default=0, help="replace an earlier preparation")
    return found


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Return the verb's flags. Raises `ConfigError` for all that needs no data to be seen."""
    args = parser().parse_args([_underscored(word) for word in argv])
    if not 0 <= args.validation_fraction < 1:
        raise ConfigError(f"--validation_fraction {args.validation_fraction}: must be in [0, 1)")
    for flag in ("special_tokens", "min_frequency"):
        if getattr(args, flag) and not args.train_tokenizer:
            raise ConfigError(f"--{flag} needs --train_tokenizer")
    if args.output_type == "arrow" and not find_spec("pyarrow"):
        raise ConfigError(f"--output_type arrow needs the package pyarrow: {install('hf')}")
    return args


def _underscored(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if word.startswith("--") else word
