"""The verb ``smp-train report``: `report.html`, a page of one run or several.

The page contains its data, style and script, and fetches nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import smp_train
from smp_train.arguments.verb_parser import VerbParser, positive
from smp_train.errors import redacted
from smp_train.storage.folder import FolderStorage
from smp_train.telemetry.logging_utils import writing
from smp_train.telemetry.run_data import PALETTES, RunData, read_runs

FILE_NAME = "report.html"
LIVE_SECONDS = 10.0
GRACE_SECONDS = 60.0
"""How long the page is updated after the run's process has died: a launcher may restart the process."""


def flags() -> VerbParser:
    """Return the parser of the verb's flags."""
    parser = VerbParser(prog="smp-train report", description="Write a page of one run or several.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder: what --run_dir was, or runs/<run_name>")
    parser.add_argument("--out", help="the page (default: RUN/report.html)")
    parser.add_argument(
        "--live", nargs="?", type=positive, const=LIVE_SECONDS, metavar="SECONDS",
        help=f"write the page again every so often (default {LIVE_SECONDS:g} s) until the run ends",
    )  # fmt: skip
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``smp-train report RUN...``: write the page and print its path."""
    options = flags().parse_args(argv)
    alone = len(options.runs) == 1
    out = Path(options.out or (Path(options.runs[0]) / FILE_NAME if alone else FILE_NAME))
    if options.live is None:
        write_page(read_runs(options.runs), out)
        print(out)
    else:
        print(out, flush=True)
        follow(options.runs, out, options.live)
    return 0


def write_page(runs: Sequence[RunData], path: str | Path, *, live: float = 0) -> Path:
    """Write the page atomically. The page reloads itself every ``live`` seconds, unless that is 0.

    Raises `ConfigError` if it cannot be written.
    """
    data = {
        "runs": [run.to_json() for run in runs], "written": time.time(), "version": smp_train.__version__, "live": live,
        "palette": PALETTES,
    }  # fmt: skip
    parts = resources.files("smp_train.telemetry")
    page, script = (parts.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    # Inside <script> a "<" could end it.
    text = redacted(json.dumps(data, default=str)).replace("<", "\\u003c")
    path = Path(path)
    with writing(path, "the report", "--out"):
        page = page.replace("@SCRIPT@", script).replace("@DATA@", text)
        FolderStorage(str(path.parent)).put(path.name, page.encode())
    return path


def follow(folders: Sequence[str], path: str | Path, every: float) -> None:
    """Write the page every so many seconds until all runs have ended; the last page does not reload itself."""
    ended_at: float | None = None
    while True:
        runs = read_runs(folders)
        states = {run.state for run in runs}
        if states & {"running", "hung"}:
            ended_at = None
        elif ended_at is None:
            ended_at = time.monotonic()
        marked = states <= {"finished", "stopped"}
        over = ended_at is not None and (marked or time.monotonic() - ended_at >= GRACE_SECONDS)
        write_page(runs, path, live=0 if over else every)
        if over:
            return
        time.sleep(every)
