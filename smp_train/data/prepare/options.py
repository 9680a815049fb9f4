"""The flags of ``smp-train prepare``, read and checked without numpy, so that help and mistakes do not need it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from smp_train.arguments.verb_parser import VerbParser, at_least
from smp_train.errors import ConfigError

ABOUT = "``smp-train prepare``: text or chats in, token shards out, with a tokenizer and a manifest."
SEQ_LEN = 512


def parser() -> argparse.ArgumentParser:
    """Return the parser of this verb's flags."""
    verb = VerbParser(prog="smp-train prepare", description=ABOUT, allow_abbrev=False)
    add = verb.add_argument
    add("--input", nargs="+", required=True, help="files, folders, s3://, or hub names, of what training reads")
    add("--dataset_config_name", help="configuration of a data set on the hub, such as en")
    add("--split", default="train", help="split of a data set on the hub (default: %(default)s)")
    add("--text_column", metavar="FIELD", help="field of the text or the chats, or PROMPT,COMPLETION, as in training")
    add("--chat_template", metavar="FILE", help="chat template; default: the tokenizer's own")
    add("--output", required=True, help="folder for train/, test/, tokenizer.json and _manifest.json")
    add("--pattern", nargs="+", default=[], help="which files of a folder, as '*.py'; default: by suffix")
    add("--exclude", nargs="+", default=[], help="names of files and folders to leave out, as 'test*'")
    tokenizer = verb.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument("--tokenizer", help="tokenizer.json, a folder with one, or a name on the hub")
    tokenizer.add_argument("--train_tokenizer", type=at_least(1), metavar="SIZE", help="train a byte-level BPE")
    add("--special_tokens", nargs="+", default=[], help="for --train_tokenizer: entries that are never split")
    add("--min_frequency", type=at_least(0), default=0, help="for --train_tokenizer: least frequency of a merged pair")
    add("--trust_remote_code", type=int, choices=(0, 1), default=0, help="run the tokenizer's own code")
    add("--bad_rows", choices=("stop", "skip"), default="stop", help="what a malformed record does (default: stop)")
    add("--eos_token", help="token that ends a document; default: the tokenizer's own")
    add("--seq_len", type=at_least(2), help=f"tokens per row of text (default: {SEQ_LEN}); chats keep their length")
    add("--rows_per_shard", type=at_least(1), default=1024, help="rows per file (default: %(default)s)")
    add("--max_rows", type=at_least(1), help="most training rows; default: no limit")
    add("--validation_fraction", type=float, default=0.1, help="share of records held out (default: 0.1)")
    add("--validation_shards", type=at_least(0), help="most validation files; default: no limit")
    add("--processes", type=at_least(1), help="processes that tokenize; default: one per core")
    add("--zip", type=int, choices=(0, 1), default=1, help="gzip the shards (default: %(default)s)")
    add("--overwrite", type=int, choices=(0, 1), default=0, help="replace an earlier preparation")
    return verb


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Return the verb's flags. Raises ConfigError for mistakes that are visible without reading data."""
    args = parser().parse_args([_with_underscores(argument) for argument in argv])
    if not 0 <= args.validation_fraction < 1:
        raise ConfigError(f"--validation_fraction {args.validation_fraction}: must be in [0, 1)")
    for flag in ("special_tokens", "min_frequency"):
        if getattr(args, flag) and not args.train_tokenizer:
            raise ConfigError(f"--{flag} needs --train_tokenizer")
    return args


def _with_underscores(argument: str) -> str:
    name, equals, value = argument.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if argument.startswith("--") else argument
