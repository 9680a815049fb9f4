"""The run folder: configuration (`run.json`), result (`DONE`, `STOPPED`) and stop request (`STOP`); for rank 0 only."""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import smp_train
from smp_train.arguments.run_name import is_run_name
from smp_train.errors import redacted
from smp_train.storage.folder import FolderStorage
from smp_train.telemetry.logging_utils import writing

KEEP_STOP = "SMP_TRAIN_KEEP_STOP"


class RunFolder:
    """Paths and markers of one run. The constructor does not touch the disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run_json = self.path / "run.json"
        self.attempts = self.path / "attempts.jsonl"
        self.logs = self.path / "logs"
        self.done = self.path / "DONE"
        self.stopped = self.path / "STOPPED"
        self.stop = self.path / "STOP"

    def create(self) -> None:
        """Create the folder, and remove the `STOP` of an earlier attempt.

        With `KEEP_STOP` in the environment a `STOP` stays: the launcher has removed an earlier one, so this one was
        written during the start. `DONE` and `STOPPED` stay until `reopen`, as an attempt may fail before it trains.
        Raises `ConfigError` if the folder cannot be created or written to.
        """
        with self._writing():
            self.logs.mkdir(parents=True, exist_ok=True)
            if not os.environ.get(KEEP_STOP):
                self.stop.unlink(missing_ok=True)

    def earlier_attempts(self) -> int:
        """Return the number of earlier starts of this run. Raises OSError if `attempts.jsonl` cannot be read."""
        return len(self.attempts.read_bytes().splitlines()) if self.attempts.exists() else 0

    def write_run(self, *, config: Mapping[str, Any], mesh: Mapping[str, Any] | None = None, **facts: Any) -> None:
        """Write `run.json`, and append the same record to `attempts.jsonl`, which has a line per start of this run.

        The record has the resolved ``config``, the size of each dimension of the ``mesh``, versions, the command line
        and ``facts``. Environment variables and queries of URLs are left out: they may hold credentials.
        """
        with self._writing():
            record = {
                "attempt": self.earlier_attempts() + 1,
                "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "command": shlex.join(sys.orig_argv),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "versions": versions(),
                "mesh": dict(mesh or {}),
                "config": dict(config),
                **facts,
            }
            with self.attempts.open("a", encoding="utf-8") as file:
                file.write(redacted(json.dumps(record, default=str)) + "\n")
            self._put(self.run_json, redacted(json.dumps(record, default=str, indent=2)))

    def read_run(self) -> dict[str, Any]:
        """Return the content of `run.json`, or an empty mapping if it is missing or unreadable."""
        try:
            record = json.loads(self.run_json.read_bytes())
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def run_name(self) -> str:
        """Return the name of the run that last started in this folder, or an empty string."""
        run = self.read_run().get("run")
        name = str(run.get("name", "")) if isinstance(run, dict) else ""
        return name if is_run_name(name) else ""

    def mark_done(self, step: int) -> None:
        """Record that the run has finished, with ``step`` updates done."""
        self._mark(self.done, step)
        self._remove(self.stopped)

    def mark_stopped(self, step: int) -> None:
        """Record that the run has saved and stopped on request, with ``step`` updates done."""
        self._mark(self.stopped, step)
        self._remove(self.done, self.stop)

    def reopen(self) -> None:
        """Remove `DONE` and `STOPPED`: the run continues, for example to a higher ``--max_steps``."""
        self._remove(self.done, self.stopped)

    def _mark(self, marker: Path, step: int) -> None:
        with self._writing():
            self._put(marker, json.dumps({"step": step, "time": time.time()}))

    def _put(self, path: Path, text: str) -> None:
        FolderStorage(str(self.path)).put(path.name, f"{text}\n".encode())

    def _remove(self, *markers: Path) -> None:
        with self._writing():
            for marker in markers:
                marker.unlink(missing_ok=True)

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path, "the run folder")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, this package, torch and transformers; None for a package not installed."""
    installed: dict[str, str | None] = {"python": platform.python_version(), "smp_train": smp_train.__version__}
    for name in ("torch", "transformers"):
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed[name] = None
    return installed
