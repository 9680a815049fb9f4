"""The screen of rank 0 during training: a progress line on a terminal, else one status line a minute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from smp_train.progress import bar_class
from smp_train.telemetry.logging_utils import get_logger

STATUS_SECONDS = 60.0
"""Seconds between two status lines without a terminal."""
FORM = "step {n_fmt} of {total_fmt} |{bar}| ETA {remaining}{postfix}"


class Screen:
    """Shows the step, and the last logged loss, speed, wait for data and next save. Never waits for the device."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._first, self._total = 0, 0
        self._began = self._spoke = 0.0
        self._seconds: float | None = None
        self._shown: list[str] = []

    def open(self, step: int, total: int, *, bar: bool) -> None:
        """Begin after ``step`` of ``total``; show a ``bar`` if there is a terminal."""
        self._first, self._total = step, total
        self._began = self._spoke = time.monotonic()
        bar_of = bar_class() if bar else None
        if bar_of is not None:
            self._bar = bar_of(initial=step, total=total, bar_format=FORM, dynamic_ncols=True, leave=False)

    def step(self, step: int) -> None:
        """Show that ``step`` is done."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
        elif self._total and now - self._spoke >= STATUS_SECONDS:
            self._spoke = now
            seconds = self._seconds or (now - self._began) / max(1, step - self._first)
            eta = f"ETA {timedelta(seconds=round((self._total - step) * seconds))}"
            get_logger().info("Step %d of %d: %s", step, self._total, ", ".join([eta, *self._shown]))

    def figures(self, record: Mapping[str, Any], *, next_save: int, saving: bool) -> None:
        """Show a logged step's record, the step of the next save, and whether a save is being written."""
        speed, loss = (record.get(name) for name in ("tokens_per_sec", "loss"))
        self._seconds = record.get("step_sec") or self._seconds
        numbers = [f"loss {loss:.4f}", *([] if speed is None else [f"{speed:,.0f} tokens/s"])]
        shown = [f"data wait {100 * record['data_wait_sec'] / self._seconds:.1f} %"] if speed and self._seconds else []
        self._shown = [*numbers, *shown, f"next save at {next_save}", *(["saving"] if saving else [])]
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._shown), refresh=False)

    def close(self) -> None:
        """Remove the line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
