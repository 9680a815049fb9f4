"""``smp-train data``: look at a data set, name all that is wrong with it, prove that a run used it exactly once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from smp_train.arguments.verb_parser import VerbParser, at_least
from smp_train.data import manifest
from smp_train.data.audit import audit
from smp_train.data.survey import ANY_VOCABULARY, look
from smp_train.data.text.opening import holds_text, refuse_documents
from smp_train.data.text.survey import look_at_documents
from smp_train.errors import DataError

SHOWN = 100


def parser() -> argparse.ArgumentParser:
    """Return the parser of this verb's flags."""
    found = VerbParser(prog="smp-train data", description=__doc__, allow_abbrev=False)
    verbs = found.add_subparsers(dest="verb", required=True, parser_class=VerbParser)
    for name, about in (
        ("inspect", "counts, lengths, range of the vocabulary, a sample"),
        ("verify", "every problem, with file and line; exit code 3 when there is one"),
    ):
        one = verbs.add_parser(name, help=about, description=about)
        one.add_argument("path", help="folder or file of shards, Hugging Face data set, or prepared tokens; or s3://")
        one.add_argument("--vocab_size", type=at_least(1), default=ANY_VOCABULARY, help="ids must be below it")
        one.add_argument(
            "--max_context_width", type=at_least(2), help="rows that it cuts to nothing to learn are problems"
        )
        one.add_argument("--cache_dir", help="where objects of S3 are put for a while")
        if name == "inspect":
            one.add_argument(
                "--tokenizer", help="tokenizer.json, or a folder: shows a sample as text, and reads text and chats"
            )
            one.add_argument("--text_column", help="of text and chats: as of smp-train prepare")
            one.add_argument("--chat_template", metavar="FILE", help="of chats: as of smp-train prepare")
    one = verbs.add_parser("audit", help="check the data_audit files of a run for repeats and gaps")
    one.add_argument("run", help="run folder of a run with --data_audit 1")
    one.add_argument("--rows", type=at_least(1), help="samples in the data set; default: as run.json says")
    return found


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises ConfigError and DataError."""
    args = parser().parse_args(list(argv))
    if args.verb == "audit":
        return audit(Path(args.run), args.rows)
    if args.verb == "inspect" and args.tokenizer and holds_text(args.path, args.text_column):
        survey = look_at_documents(
            args.path, args.tokenizer, args.max_context_width, column=args.text_column, template=args.chat_template
        )
    else:
        refuse_documents(args.path)
        survey = look(args.path, args.vocab_size, args.cache_dir, args.max_context_width)
    if args.verb == "verify":
        differences = manifest.differences(args.path, checksums=True)
        survey.problems += [f"{args.path}: {problem} (by {manifest.MANIFEST})" for problem in differences]
    for problem in survey.problems[:SHOWN]:
        print(problem)
    if len(survey.problems) > SHOWN:
        print(f"... and {len(survey.problems) - SHOWN} more")
    if args.verb == "inspect":
        print(survey.text(args.tokenizer))
    else:
        print(f"{args.path}: {survey.rows} rows in {survey.shards} files, {len(survey.problems)} problems")
    return DataError.exit_code if survey.problems and args.verb == "verify" else 0
