"""`report.html`, a page of one run or several; it contains its data, style and script and fetches nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import smp_train
from smp_train.errors import ConfigError, redacted
from smp_train.telemetry.run_data import PALETTES, RunData
from smp_train.telemetry.run_folder import write_atomic

FILE_NAME = "report.html"


def write_page(runs: Sequence[RunData], path: str | Path) -> Path:
    """Write the page atomically, and return its path. Raises `ConfigError` if it cannot be written."""
    data = {
        "runs": [run.to_json() for run in runs], "written": time.time(), "version": smp_train.__version__,
        "palette": PALETTES,
    }  # fmt: skip
    parts = resources.files("smp_train.telemetry")
    page, script = (parts.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.js"))
    # Inside <script> a "<" could end it.
    text = redacted(json.dumps(data, default=str)).replace("<", "\\u003c")
    try:
        write_atomic(Path(path), page.replace("@SCRIPT@", script).replace("@DATA@", text))
    except OSError as failure:
        raise ConfigError(f"{path}: cannot write the report ({failure.strerror}); set --out") from None
    return Path(path)
