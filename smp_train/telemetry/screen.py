"""The screen of rank 0 during training: a progress line on a terminal, else the rest of the run in a line a minute."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from smp_train.progress import bar_class
from smp_train.telemetry.logging_utils import get_logger

STATUS_SECONDS = 60.0
"""Between status lines where there is no terminal."""
FORM = "step {n_fmt} of {total_fmt} |{bar}| ETA {remaining}{postfix}"


class Screen:
    """Shows the step, and from each logged one its loss, speed, wait for data and the next save. Never waits."""

    def __init__(self) -> None:
        """Show nothing until `open`."""
        self._bar: Any = None
        self._total, self._spoke = 0, 0.0

    def open(self, step: int, total: int, *, bar: bool) -> None:
        """Begin after ``step`` of ``total``; with a ``bar`` where there is a terminal."""
        self._total, self._spoke = total, time.monotonic()
        bar_of = bar_class() if bar else None
        if bar_of is not None:
            self._bar = bar_of(initial=step, total=total, bar_format=FORM, dynamic_ncols=True, leave=False)

    def step(self) -> None:
        """Count a step."""
        if self._bar is not None:
            self._bar.update()

    def figures(self, record: Mapping[str, Any], *, next_save: int, saving: bool) -> None:
        """Show a logged step's record, the step of the next save, and whether one is being written."""
        speed, seconds, loss = (record.get(name) for name in ("tokens_per_sec", "step_sec", "loss"))
        shown = [] if seconds is None else [f"data wait {100 * record['data_wait_sec'] / seconds:.1f} %"]
        shown += [f"next save at {next_save}", *(["saving"] if saving else [])]
        if self._bar is not None:
            numbers = [f"loss {loss:.4f}", *([] if speed is None else [f"{speed:,.0f} tokens/s"])]
            self._bar.set_postfix_str(", ".join([*numbers, *shown]), refresh=False)
        elif self._total and time.monotonic() - self._spoke >= STATUS_SECONDS:
            self._spoke, left = time.monotonic(), self._total - record["step"]
            shown = [] if seconds is None else [f"ETA {timedelta(seconds=round(left * seconds))}", *shown]
            get_logger().info("Step %d of %d: %s", record["step"], self._total, ", ".join(shown))

    def close(self) -> None:
        """Remove the line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
