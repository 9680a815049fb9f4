"""Progress of long work: a line every few seconds."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from smp_train.errors import redacted

T = TypeVar("T")

LINE_SECONDS = 10.0
"""Interval of the lines."""


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
        """Prepare to count ``unit``s, bytes ("B") or others; ``moved`` is a count that other code keeps."""
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
        while not self._ended.wait(LINE_SECONDS):
            self._write_line()

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
