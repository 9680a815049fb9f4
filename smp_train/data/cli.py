"""``smp-train data``: inspect a data set, report everything that is wrong with it, prove that a run used it once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from smp_train.arguments.verb_parser import VerbParser, at_least
from smp_train.data import manifest
from smp_train.data.audit import audit
from smp_train.data.files import Selection, list_files
from smp_train.data.rows import ANY_VOCABULARY, Recipe
from smp_train.data.survey import survey
from smp_train.errors import DataError, first_few

SHOWN = 100


def parser() -> argparse.ArgumentParser:
    """Return the parser of this verb's flags."""
    verb = VerbParser(prog="smp-train data", description=__doc__, allow_abbrev=False)
    verbs = verb.add_subparsers(dest="verb", required=True, parser_class=VerbParser)
    for name, about in (
        ("inspect", "counts, lengths, range of token ids, a sample; exit code 3 when there is a problem"),
        ("verify", "every problem, with file and line; exit code 3 when there is one"),
    ):
        add = verbs.add_parser(name, help=about, description=about).add_argument
        add("path", help="folder, file, s3:// or name on the hub, with records of any kind")
        add("--vocab_size", type=at_least(1), default=ANY_VOCABULARY, help="token ids must be below it")
        add("--max_context_width", type=at_least(2), help="rows without a counted token within it are problems")
        add("--tokenizer", help="tokenizer.json, a folder, or a name on the hub; for text and chats")
        add("--text_column", metavar="FIELD", help="field of the text or the chats, as in training")
        add("--chat_template", metavar="FILE", help="replaces the tokenizer's chat template")
        add("--dataset_config_name", help="configuration of a data set on the hub")
        add("--split", default="train", help="split to read where there are several (default: train)")
    run_audit = verbs.add_parser("audit", help="check the data_audit files of a run for repeats and gaps")
    run_audit.add_argument("run", help="run folder of a run with --data_audit 1")
    run_audit.add_argument("--rows", type=at_least(1), help="samples in the data set; default: the number in run.json")
    return verb


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises ConfigError and DataError."""
    args = parser().parse_args(list(argv))
    if args.verb == "audit":
        return audit(Path(args.run), args.rows)
    selection = Selection(column=args.text_column, config=args.dataset_config_name, flag="PATH", check_manifest=False)
    files = list_files(args.path, selection, split=args.split)
    recipe = Recipe(files.kind, args.vocab_size, args.tokenizer, args.chat_template)
    report = survey(files, recipe, seq_len=args.max_context_width)
    if args.verb == "verify":
        sizes = {file.name: file.size for file in files.files}
        differences = manifest.differences(files.location, sizes, checksums=True)
        report.problems += [f"{files.location}: {problem} (by {manifest.MANIFEST})" for problem in differences]
    if report.problems:
        print(first_few(report.problems, "\n", most=SHOWN))
    if args.verb == "inspect":
        print(report.text(files, args.tokenizer))
    else:
        print(f"{args.path}: {len(report.lengths)} rows in {len(files.files)} files, {len(report.problems)} problems")
    return DataError.exit_code if report.problems else 0
