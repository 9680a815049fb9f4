"""Requests to stop: which are seen, and when a second one ends the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smp_train.run.stop import SIGNALS, StopRequest


def wait_for(stop: StopRequest) -> bool:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if stop.is_requested(look_for_file=False):
            return True
        time.sleep(0.001)
    return False


@pytest.mark.parametrize("number", SIGNALS)
def test_signals(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smp_train.run.stop.REPEAT_SECONDS", 600.0)  # else a slow machine would end this process
    before = signal.getsignal(number)
    stop = StopRequest(tmp_path / "STOP")
    try:
        assert not stop.is_requested(look_for_file=True)
        os.kill(os.getpid(), number)
        assert wait_for(stop)
        assert stop.reason == number.name
        os.kill(os.getpid(), number)  # at once: the same request, by another way
    finally:
        stop.close()
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_file(tmp_path: Path) -> None:
    stop = StopRequest(tmp_path / "STOP")
    try:
        (tmp_path / "STOP").touch()
        assert not stop.is_requested(look_for_file=False)
        assert stop.is_requested(look_for_file=True)
        assert "STOP" in str(stop.reason)
        assert stop.is_requested(look_for_file=False)
    finally:
        stop.close()


# Blocks where no handler runs, as a collective does: C code that does not come back when a signal arrives.
BLOCKED = """
import ctypes, sys
from pathlib import Path
from smp_train.run import stop
stop.REPEAT_SECONDS = float(sys.argv[1])
stop.StopRequest(Path("nowhere"))
print("ready", flush=True)
mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
library.pthread_mutex_lock(mutex)
library.pthread_mutex_lock(mutex)
"""


def test_a_second_signal_ends_a_process_that_waits_for_others() -> None:
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", BLOCKED, "0.2"], env={"PYTHONPATH": root}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        code = None
        while code is None and time.monotonic() < began + 120:
            process.send_signal(signal.SIGTERM)
            try:
                code = process.wait(0.02)
            except subprocess.TimeoutExpired:
                continue
        assert code == 128 + signal.SIGTERM
        assert time.monotonic() - began > 0.2
    finally:
        process.kill()
        process.wait()
