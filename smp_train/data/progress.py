"""How far a long piece of work is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_SECONDS = 30.0
"""Between lines where there is no terminal."""


class Progress:
    """Counts ``unit``s of work: bytes, rows. Nothing is shown where ``shown`` is False."""

    def __init__(self, what: str, total: int | None, unit: str, shown: bool = True) -> None:
        self._bar: Any = None
        self._what, self._total, self._unit, self._shown = what, total, unit.strip(), shown
        self._done = 0
        self._due = time.monotonic() + LINE_SECONDS
        if shown and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, desc=what, unit=unit, unit_scale=True, dynamic_ncols=True, leave=False)

    def update(self, done: int) -> None:
        """Count ``done`` more units."""
        self._done += done
        if self._bar is not None:
            self._bar.update(done)
        elif self._shown and time.monotonic() >= self._due:
            of = f" of {self._total}" if self._total else ""
            print(f"{self._what}: {self._done}{of} {self._unit}", file=sys.stderr, flush=True)
            self._due = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
