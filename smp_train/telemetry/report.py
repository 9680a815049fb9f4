"""The verb ``smp-train report``: write a page of one run or several from their run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from smp_train.arguments.verb_parser import VerbParser, positive
from smp_train.telemetry import page
from smp_train.telemetry.run_data import read_runs

LIVE_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``smp-train report RUN...``: write the page and print its path."""
    parser = VerbParser(prog="smp-train report", description="Write a page of one run or several.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder: what --run_dir was, or runs/<run_name>")
    parser.add_argument("--out", help="the page (default: RUN/report.html)")
    parser.add_argument(
        "--live", nargs="?", type=positive, const=LIVE_SECONDS, metavar="SECONDS",
        help=f"write the page again every so often (default {LIVE_SECONDS:g} s) until the run ends",
    )  # fmt: skip
    options = parser.parse_args(argv)
    alone = len(options.runs) == 1
    out = Path(options.out or (Path(options.runs[0]) / page.FILE_NAME if alone else page.FILE_NAME))
    if options.live is None:
        page.write_page(read_runs(options.runs), out)
        print(out)
    else:
        print(out, flush=True)
        page.follow(options.runs, out, options.live)
    return 0
