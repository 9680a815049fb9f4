"""Stop requests: a signal, or a file in the run folder."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

from smp_train.distributed import heartbeat

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
REPEAT_SECONDS = 5.0
"""A launcher may deliver one request twice, directly and through its children; within this time it counts once."""

logger = logging.getLogger("smp_train.run.stop")

_requested = threading.Event()


class StopRequest:
    """Remembers that this process was asked to stop, so that the loop can finish its step, save, and leave.

    A signal that comes more than `REPEAT_SECONDS` after the first ends the process at once, with the exit
    code of that signal. A save under way stays uncommitted.

    Signals are read by a thread: Python runs handlers in the main thread only, and not while it waits inside a
    collective, for example for a rank that hangs.
    """

    def __init__(self, stop_file: Path) -> None:
        """Watch for ``stop_file`` and install the signal handlers; main thread only."""
        self.reason: str | None = None
        self._since = 0.0
        self._stop_file = stop_file
        self._incoming, self._outgoing = os.pipe()
        os.set_blocking(self._outgoing, False)
        self._previous_fd = signal.set_wakeup_fd(self._outgoing, warn_on_full_buffer=False)
        # Python writes a signal's number to the pipe only if the signal has a handler; this handler does nothing else.
        self._previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._thread = threading.Thread(target=self._watch, name="smp-train-stop", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while numbers := os.read(self._incoming, 64):
            for number in numbers:
                if number in SIGNALS:
                    self._on_signal(number)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self.reason is None:
            self.reason, self._since = signal.Signals(number).name, now
            _requested.set()
            if heartbeat.ending():  # the run is already ending, without a save
                return
            logger.info(
                "%s: asked to stop; finishing the step and saving. A signal more than %g s from now ends this process "
                "at once, without saving", self.reason, REPEAT_SECONDS,
            )  # fmt: skip
        elif now - self._since > REPEAT_SECONDS:
            os._exit(128 + number)

    def is_requested(self, *, look_for_file: bool) -> bool:
        """Return whether to stop after this step; ``look_for_file`` on one rank only, to spare a shared file system."""
        if self.reason is None and look_for_file and self._stop_file.exists():
            self.reason = f"the file {self._stop_file}"
        return self.reason is not None

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._outgoing)
        self._thread.join()
        os.close(self._incoming)


def ignore_repeats() -> None:
    """Ignore further signals after a stop request: everything is saved and the interpreter is shutting down."""
    if _requested.is_set():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def wait_for_request(seconds: float) -> None:
    """Wait until a launcher asks this process to stop, at most ``seconds``; main thread only."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: _requested.set())
    _requested.wait(seconds)
