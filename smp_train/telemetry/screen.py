"""The status line of rank 0 during training: once a minute, the step, the time left and the next save."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from smp_train.telemetry.logging_utils import get_logger

STATUS_SECONDS = 60.0
"""Seconds between two status lines."""


class Screen:
    """Logs the step, and the last logged loss, speed, wait for data and next save. Never waits for the device."""

    def __init__(self) -> None:
        self._first, self._total = 0, 0
        self._began = self._logged = 0.0
        self._seconds: float | None = None
        self._figures: list[str] = []

    def open(self, step: int, total: int) -> None:
        """Begin after ``step`` of ``total``."""
        self._first, self._total = step, total
        self._began = self._logged = time.monotonic()

    def step(self, step: int) -> None:
        """Log the status if ``step`` is the first one to end after `STATUS_SECONDS`."""
        now = time.monotonic()
        if self._total and now - self._logged >= STATUS_SECONDS:
            self._logged = now
            seconds = self._seconds or (now - self._began) / max(1, step - self._first)
            left = f"ETA {timedelta(seconds=round((self._total - step) * seconds))}"
            get_logger().info("Step %d of %d: %s", step, self._total, ", ".join([left, *self._figures]))

    def figures(self, record: Mapping[str, Any], *, next_save: int, saving: bool) -> None:
        """Keep a logged step's numbers, the step of the next save, and whether a save is being written."""
        speed, loss = (record.get(name) for name in ("tokens_per_sec", "loss"))
        self._seconds = record.get("step_sec") or self._seconds
        numbers = [f"loss {loss:.4f}", *([] if speed is None else [f"{speed:,.0f} tokens/s"])]
        waits = [f"data wait {100 * record['data_wait_sec'] / self._seconds:.1f} %"] if speed and self._seconds else []
        self._figures = [*numbers, *waits, f"next save at {next_save}", *(["saving"] if saving else [])]
