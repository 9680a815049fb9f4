"""Progress of long work: a bar on a terminal, else a line every few seconds."""

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
"""Interval of lines without a terminal."""
BAR_SECONDS = 1.0
"""Delay of the bar, so that short work draws no bar; the bar is updated twice in this time."""


def bar_class() -> Any:
    """Return tqdm's bar if stderr is a terminal that can draw a bar, else None."""
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


class Count:
    """Units of work that this process has done, and their total if it is known."""

    done, total = 0, 0

    def begin(self, total: int) -> None:
        """Count from 0 again."""
        self.done, self.total = 0, total


MOVED = Count()
"""Bytes of the checkpoint that this process saves or loads, or has saved or loaded last."""


class Progress:
    """Shows in a thread how much of some work is done, or only its time; nothing if ``shown`` is False.

    The thread also shows it during one long call. Lines go to the log if it is set up, else to stderr.
    """

    def __init__(
        self, title: str, total: int | None = None, unit: str = "", shown: bool = True, moved: Count | None = None
    ) -> None:
        """Prepare to count in ``unit``s ("B": bytes), or to show the count ``moved``, which other code updates."""
        self._title, self._unit, self._shown = redacted(title), unit.strip(), shown
        self._count = moved or Count()
        if moved is None:
            self._count.begin(total or 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def update(self, done: int) -> None:
        """Count ``done`` more units."""
        self._count.done += done

    def set_count(self, done: int, total: int) -> None:
        """Set the units done and their total."""
        self._count.done, self._count.total = done, total

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """Yield each item, and count it when the next one is asked for."""
        for item in items:
            yield item
            self._count.done += 1

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
        new_bar = bar_class()
        if new_bar is None:
            while not self._ended.wait(LINE_SECONDS):
                self._write_line()
        elif not self._ended.wait(BAR_SECONDS):
            unit = self._unit if self._unit == "B" else f" {self._unit}"
            form = None if self._unit else "{desc}: {elapsed}"
            options = {"unit_scale": True, "dynamic_ncols": True, "leave": False, "bar_format": form}
            with new_bar(desc=self._title, total=self._count.total or None, unit=unit, **options) as bar:
                bar.start_t -= BAR_SECONDS
                while not self._ended.wait(BAR_SECONDS / 2):
                    bar.n, bar.total = self._count.done, self._count.total or None
                    bar.refresh()

    def _write_line(self) -> None:
        amount = f"{time.monotonic() - self._began:.0f} s"
        if self._unit:
            scale, unit = (1e6, "MB") if self._unit == "B" else (1, self._unit)
            total = f" of {self._count.total / scale:,.0f}" if self._count.total else ""
            amount = f"{self._count.done / scale:,.0f}{total} {unit}, {amount}"
        log = logging.getLogger("smp_train")
        if log.handlers and log.isEnabledFor(logging.INFO):
            log.info("%s: %s", self._title, amount)
        else:
            print(f"{self._title}: {amount}", file=sys.stderr, flush=True)
