"""Being asked to stop: by a signal, or by a file in the run folder."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
REPEAT_SECONDS = 5.0
"""A launcher may deliver one request twice, itself and through its children: not yet an order to drop everything."""


class StopRequest:
    """Remembers that this process was asked to stop, so that the loop can finish its step, save, and leave.

    A signal that comes more than `REPEAT_SECONDS` after the first ends the process at once, with the exit
    code of that signal: whoever sends it does not want to wait. What was being saved stays uncommitted.
    """

    def __init__(self, stop_file: Path) -> None:
        """Watch for ``stop_file`` and install the signal handlers; main thread only."""
        self.reason: str | None = None
        self._since = 0.0
        self._stop_file = stop_file
        self._previous = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.reason is None:
            self.reason, self._since = signal.Signals(number).name, now
        elif now - self._since > REPEAT_SECONDS:
            os._exit(128 + number)

    def is_requested(self, *, look_for_file: bool) -> bool:
        """Tell whether to stop after this step; ``look_for_file`` on one rank only, to spare a shared file system."""
        if self.reason is None and look_for_file and self._stop_file.exists():
            self.reason = f"the file {self._stop_file}"
        return self.reason is not None

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
