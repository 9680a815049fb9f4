"""How far a long piece of work is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from smp_train.errors import redacted

T = TypeVar("T")

LINE_SECONDS = 10.0
"""Between lines where there is no terminal."""
BAR_SECONDS = 1.0
"""Until the bar of a piece of work is drawn, so that short work draws none; half of it between updates."""


def bar_class() -> Any:
    """Return tqdm's bar where stderr is a terminal that can draw one, else None."""
    try:
        # Terminals of containers and batch systems may have no size, where tqdm draws nothing at all.
        drawn = sys.stderr.isatty() and 0 not in os.get_terminal_size(sys.stderr.fileno())
        if not drawn or os.environ.get("TERM") == "dumb":
            return None
        from tqdm import tqdm
    except (ImportError, OSError, ValueError):
        return None
    return tqdm


def without_bars(stream: Any) -> AbstractContextManager[Any]:
    """Return a context in which bars on the same terminal are cleared, so that a line on ``stream`` stands alone."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return nullcontext() if tqdm is None else tqdm.external_write_mode(file=stream)


class Moved:
    """Bytes of a checkpoint that this process has written or read, and how many there will be, for a `Progress`."""

    done, total = 0, 0

    def begin(self, total: int) -> None:
        """Count from 0 again."""
        self.done, self.total = 0, total


MOVED = Moved()
"""Of the last save or load."""


class Progress:
    """Counts ``unit``s of work: bytes (B), rows; or only the time. Nothing is shown where ``shown`` is False.

    A thread shows the count, also while the work is in one long call; with ``moved`` that of another thread. Lines go
    to the log where one is set up, else to stderr.
    """

    def __init__(
        self, what: str, total: int | None = None, unit: str = "", shown: bool = True, moved: Moved | None = None
    ) -> None:
        self._what, self._total, self._unit, self._shown = redacted(what), total, unit.strip(), shown
        self._done, self._moved = 0, moved
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def update(self, done: int) -> None:
        """Count ``done`` more units."""
        self._done += done

    def at(self, done: int, total: int) -> None:
        """Set the count, and what it will come to."""
        self._done, self._total = done, total

    def over(self, work: Iterable[T]) -> Iterator[T]:
        """Yield each piece of the work, and count it when the next one is asked for."""
        for each in work:
            yield each
            self._done += 1

    def __enter__(self) -> Progress:
        self._began = time.monotonic()
        if self._shown:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._shown:
            self._thread.join()

    def _show(self) -> None:
        bar_of = bar_class()
        if bar_of is None:
            while not self._ended.wait(LINE_SECONDS):
                self._say()
        elif not self._ended.wait(BAR_SECONDS):
            unit = self._unit if self._unit == "B" else f" {self._unit}"
            form = None if self._unit else "{desc}: {elapsed}"
            options = {"unit_scale": True, "dynamic_ncols": True, "leave": False, "bar_format": form}
            with bar_of(desc=self._what, total=self._total, unit=unit, **options) as bar:
                bar.start_t -= BAR_SECONDS
                while not self._ended.wait(BAR_SECONDS / 2):
                    self._look()
                    bar.n, bar.total = self._done, self._total
                    bar.refresh()

    def _look(self) -> None:
        if self._moved is not None:
            self.at(self._moved.done, self._moved.total)

    def _say(self) -> None:
        self._look()
        scale = 1e6 if self._unit == "B" else 1
        done, unit = f"{self._done / scale:,.0f}", "MB" if self._unit == "B" else self._unit
        of = f" of {self._total / scale:,.0f}" if self._total else ""
        line = f"{self._what}: {f'{done}{of} {unit}, ' if unit else ''}{time.monotonic() - self._began:.0f} s"
        log = logging.getLogger("smp_train")
        if log.handlers and log.isEnabledFor(logging.INFO):
            log.info(line)
        else:
            print(line, file=sys.stderr, flush=True)
