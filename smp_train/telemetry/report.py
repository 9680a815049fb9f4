"""The verb ``smp-train report``: write a page of one run or several from their run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smp_train.arguments.verb_parser import VerbParser
from smp_train.telemetry import page
from smp_train.telemetry.run_data import read_runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``smp-train report RUN...``: write the page and print its path."""
    parser = VerbParser(prog="smp-train report", description="Write a page of one run or several.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder: what --run_dir was, or runs/<run_name>")
    parser.add_argument("--out", help="the page (default: RUN/report.html)")
    options = parser.parse_args(argv)
    alone = len(options.runs) == 1
    out = Path(options.out or (Path(options.runs[0]) / page.FILE_NAME if alone else page.FILE_NAME))
    print(page.write_page(read_runs(options.runs), out))
    return 0
