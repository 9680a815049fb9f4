"""Cells of a measurement on a borrowed device: in order of worth, within a time, each in a process that may die."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from smp_train.distributed import host

OK, WRONG, FAILED, SKIPPED, LEFT_OUT = "ok", "wrong", "failed", "skipped", "left out"
TITLES = ("cell", "state", "seconds")
ERROR_CHARACTERS = 300
TRACEBACK_LINES = 20


class Skip(Exception):
    """What a cell needs is not here; the message names it."""


class Wrong(Exception):
    """A cell's numbers are not what they must be; ``figures`` are recorded all the same."""

    def __init__(self, why: str, **figures: Any) -> None:
        super().__init__(why)
        self.figures = figures


@dataclass(frozen=True)
class Cell:
    """One measurement: ``work(**given)`` returns its figures by name, or raises `Skip`, `Wrong` or its failure."""

    name: str
    work: Callable[..., Mapping[str, Any]]
    """A function of a module, which a fresh process imports."""
    given: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 20.0
    """Expected on the device, with what it compiles: a cell that no longer fits in the time is left out."""
    needed: bool = False
    """Other cells need what it makes."""


class Worker:
    """A process that runs one cell after another; one that dies or hangs is replaced by a fresh one.

    One process, because a start takes ten seconds. What the cells print goes to a file.
    """

    def __init__(self, log: Path, environ: Mapping[str, str] = MappingProxyType({})) -> None:
        """``environ``: variables of the process, where the user has not set them."""
        self.log, self.environ = log, dict(environ)
        self._process: Any = None
        self._pipe: Any = None

    def run(self, cell: Cell, seconds: float) -> dict[str, Any]:
        """Run a cell and return its record; it fails where it takes more than ``seconds``."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs, str(self.log), self.environ))
            self._process.start()
            theirs.close()
        began = time.perf_counter()
        state, figures = FAILED, {"why": f"still running after {seconds:.0f} s"}
        poisoned, hangs = True, True
        try:
            self._pipe.send((cell.work, dict(cell.given)))
            if self._pipe.poll(seconds):
                hangs = False
                state, figures, poisoned = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(10)
            figures = {"why": f"the process ended with code {self._process.exitcode}; see {self.log.name}"}
        if poisoned:
            self.close(patience=0 if hangs else 5)
        return {"cell": cell.name, "state": state, "seconds": time.perf_counter() - began, **figures}

    def close(self, *, patience: float = 0.0) -> None:
        """End the process and all that it started, after ``patience`` seconds in which it may end by itself."""
        if self._process is not None:
            self._pipe.close()
            self._process.join(patience)
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
            self._process = None


def _serve(pipe: Any, log: str, environ: dict[str, str]) -> None:
    """Run cells as they come; tell of each how it ended and whether this process is of no more use."""
    os.setsid()
    os.environ |= {**environ, **os.environ}
    host.prepare()  # a cell may use the device before its run does
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    while True:
        try:
            work, given = pipe.recv()
        except EOFError:
            return
        print(f"--- {work.__module__}.{work.__name__} {given}", file=sys.stderr, flush=True)
        poisoned = False
        try:
            answer: tuple[str, dict[str, Any]] = OK, dict(work(**given))
        except Skip as why:
            answer = SKIPPED, {"why": str(why)}
        except Wrong as why:
            answer = WRONG, {**why.figures, "why": str(why)}
        except BaseException as failure:
            traceback.print_exc()
            line = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
            last = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
            answer = FAILED, {"why": line[:ERROR_CHARACTERS], "traceback": last}
            # A fault of the device stays with the process, and a failed run leaves its process group behind.
            poisoned = True
        release()
        pipe.send((*answer, poisoned))


def release() -> None:
    """Give up what the last cell held on the device, and what it compiled."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch is not None:
        torch._dynamo.reset()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def run_cells(
    part: str, cells: Iterable[Cell], *, seconds: float, log: Path, see: Callable[[dict[str, Any]], None],
    environ: Mapping[str, str] = MappingProxyType({}),
) -> list[dict[str, Any]]:  # fmt: skip
    """Run the cells of a part in turn within ``seconds`` and return their records; ``see`` is shown each.

    A cell whose expected seconds do not fit in what is left is left out; a cheaper one after it may still be run.
    """
    worker, records = Worker(log, environ), []
    ends = time.monotonic() + seconds
    try:
        for cell in cells:
            left = ends - time.monotonic()
            if cell.seconds <= left:
                record = worker.run(cell, left)
            else:
                record = {"cell": cell.name, "state": LEFT_OUT, "why": f"{left:.0f} s were left of {seconds:.0f}"}
            records.append({"part": part, **record})
            see(records[-1])
    finally:
        worker.close(patience=10)
    return records


def table(records: Sequence[Mapping[str, Any]], *, lead: Sequence[str] = TITLES) -> str:
    """Return records as a table in Markdown: the columns ``lead``, then others as their names come up, ``why`` last.

    What is no number, text or truth value, such as a list, is in the JSON file alone.
    """
    names = dict.fromkeys(lead)
    for record in records:
        names |= {name: None for name, value in record.items() if value is None or isinstance(value, int | float | str)}
    columns = [name for name in names if name not in ("part", "why")]
    if any("why" in record for record in records):
        columns.append("why")
    rows = [columns, ["---"] * len(columns)]
    rows += [[_shown(record.get(name)) for name in columns] for record in records]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    return "" if value is None or isinstance(value, list | dict) else str(value).replace("|", "\\|")
