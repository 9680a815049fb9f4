"""The run folder: what was run (`run.json`), how it ended (`DONE`, `STOPPED`), the wish to end it (`STOP`).

Everything here is for rank 0 and contains no collectives.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import smp_train
from smp_train.arguments.run_name import is_run_name
from smp_train.errors import ConfigError, redacted

KEEP_STOP = "SMP_TRAIN_KEEP_STOP"


class RunFolder:
    """Paths and markers of one run. Building it touches nothing on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.run_json = self.path / "run.json"
        self.attempts = self.path / "attempts.jsonl"
        self.logs = self.path / "logs"
        self.done = self.path / "DONE"
        self.stopped = self.path / "STOPPED"
        self.stop = self.path / "STOP"

    def create(self) -> None:
        """Make the folder, or take it over from an earlier attempt, whose `STOP` no longer holds.

        With `KEEP_STOP` in the environment a `STOP` stays: the launcher has taken away one that was not meant for this
        attempt, so this one came while it was starting.

        `DONE` and `STOPPED` stay until `reopen`: an attempt that fails before it trains leaves them true.

        Raises:
            ConfigError: when the folder cannot be made or written to.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            if not os.environ.get(KEEP_STOP):
                self.stop.unlink(missing_ok=True)
        except OSError as failure:
            raise self._unwritable(failure) from None

    def earlier_attempts(self) -> int:
        """Return how often this run has been started before. OSError when that cannot be read."""
        return len(self.attempts.read_bytes().splitlines()) if self.attempts.exists() else 0

    def write_run(
        self,
        *,
        config: Any,
        mesh: Mapping[str, Any] | None = None,
        command: Sequence[str] | None = None,
        **facts: Any,
    ) -> None:
        """Write `run.json` and append the same to `attempts.jsonl`, one line per start of this run.

        Args:
            config: the resolved configuration, a mapping or a dataclass.
            mesh: name -> size of each dimension, and the world size.
            command: the command line; this process's own when not given.
            facts: further entries, such as ``reference_lines={"unigram entropy": 5.3}`` for the report.

        The environment is not written, on purpose: it holds credentials. Nor are the queries of URLs.
        """
        record = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": shlex.join(sys.orig_argv if command is None else command),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": versions(),
            "mesh": dict(mesh or {}),
            "config": _plain(config),
            **facts,
        }
        try:
            record = {"attempt": self.earlier_attempts() + 1, **record}
            with self.attempts.open("a", encoding="utf-8") as file:
                file.write(redacted(json.dumps(record, default=str)) + "\n")
            _write_atomic(self.run_json, redacted(json.dumps(record, default=str, indent=2)) + "\n")
        except OSError as failure:
            raise self._unwritable(failure) from None

    def read_run(self) -> dict[str, Any]:
        """Return `run.json`, empty when there is none."""
        return _read(self.run_json)

    def run_name(self) -> str:
        """Return the name of the run that was started here last, empty where none is known."""
        run = self.read_run().get("run")
        name = str(run.get("name", "")) if isinstance(run, dict) else ""
        return name if is_run_name(name) else ""

    def mark_done(self, step: int) -> None:
        """Say that the run has finished, with ``step`` updates done."""
        self._mark(self.done, step)
        self.stopped.unlink(missing_ok=True)

    def mark_stopped(self, step: int) -> None:
        """Say that the run has saved and stopped on request, with ``step`` updates done."""
        self._mark(self.stopped, step)
        self.done.unlink(missing_ok=True)
        self.stop.unlink(missing_ok=True)

    def reopen(self) -> None:
        """Withdraw `DONE` and `STOPPED`: the run goes on, for example to a higher ``--max_steps``."""
        self.done.unlink(missing_ok=True)
        self.stopped.unlink(missing_ok=True)

    def done_step(self) -> int | None:
        """Return the step at which an earlier attempt finished, None when none has."""
        return _read(self.done).get("step")

    def stopped_step(self) -> int | None:
        """Return the step at which the last attempt stopped on request, None when it has not."""
        return _read(self.stopped).get("step")

    def stop_requested(self) -> bool:
        """Tell whether someone has put a file `STOP` into the folder: one stat call."""
        return self.stop.exists()

    def _mark(self, marker: Path, step: int) -> None:
        _write_atomic(marker, json.dumps({"step": step, "time": time.time()}) + "\n")

    def _unwritable(self, failure: OSError) -> ConfigError:
        return ConfigError(f"{self.path}: cannot write the run folder ({failure.strerror}); set --run_dir")


def versions() -> dict[str, str | None]:
    """Return the versions of what a result depends on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "smp_train": smp_train.__version__}
    for name in ("torch", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _plain(config: Any) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_atomic(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one, also when this process or the machine dies here."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
