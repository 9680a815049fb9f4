"""Long work shows how far it is: lines, and on a terminal a line below whole log lines."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading

import pytest

from smp_train import progress
from smp_train.progress import Progress
from smp_train.telemetry.screen import STATUS_SECONDS, Screen
from tests import harness
from tests.training import flags, steps, train


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.001)


def until(capsys, *words):
    """Wait for a line with all words on stderr, and return it."""
    found = []
    while not any(all(word in line for word in words) for line in found):
        found += capsys.readouterr().err.splitlines()
    return next(line for line in found if all(word in line for word in words))


def test_lines_say_how_far_the_work_is_also_while_it_is_silent(capsys):
    with Progress("reading", 3_000_000, "B") as work:
        until(capsys, "reading: 0 of 3 MB")
        work.update(2_000_000)
        until(capsys, "reading: 2 of 3 MB, ", " s")
        work.set_count(4_000_000, 8_000_000)
        until(capsys, "4 of 8 MB")
    with Progress("saving"):
        assert re.fullmatch(r"saving: \d+ s", until(capsys, "saving"))
    with Progress("Reading s3://key:secret@bucket/x"):
        assert "secret" not in until(capsys, "Reading s3://")


def test_without_a_terminal_a_line_a_minute_says_when_it_ends_and_saves(monkeypatch, caplog):
    from smp_train.telemetry import screen

    now = [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(screen.get_logger(), "propagate", True)
    shown = Screen()
    record = {"step": 10, "loss": 2.0, "tokens_per_sec": 5.0, "step_sec": 2.0, "data_wait_sec": 0.1}
    with caplog.at_level("INFO", logger="smp_train"):
        shown.figures(record, next_save=20, saving=False)  # an evaluation, say: nothing was opened
        shown.step(1)
        shown = screen.Screen()
        shown.open(0, 100, bar=True)
        now[0] += STATUS_SECONDS
        shown.step(6)  # before the first record
        shown.figures(record, next_save=20, saving=True)
        shown.step(10)
        now[0] += STATUS_SECONDS
        shown.step(11)  # logged or not
        shown.step(12)
    assert [record.getMessage() for record in caplog.records] == [
        "Step 6 of 100: ETA 0:15:40",
        "Step 11 of 100: ETA 0:02:58, loss 2.0000, 5 tokens/s, data wait 5.0 %, next save at 20, saving",
    ]


def train_on_a_terminal(command_line):
    """Train with a terminal as stdout and stderr, and return what was written to it."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    read = []

    def reader():
        while data := os.read(master, 65536):
            read.append(data)
            if b"\0" in data:
                return

    thread = threading.Thread(target=reader)
    thread.start()
    sys.stdout, sys.stderr = os.fdopen(slave, "w", buffering=1), os.fdopen(os.dup(slave), "w", buffering=1)
    os.environ["TERM"] = "xterm"
    code = train(command_line)
    sys.stdout.write("\0")
    sys.stdout.flush()
    thread.join()
    return code, b"".join(read).decode()


def test_log_lines_stand_whole_above_the_progress_line_of_a_terminal(tmp_path):
    ((code, text),) = harness.run(train_on_a_terminal, 1, flags(tmp_path, max_steps=6, checkpoint_freq=4))
    assert code == 0
    assert "step 6 of 6 |" in text
    assert "next save at 6" in text
    # As the screen shows them: a carriage return starts the line anew, over what was there.
    lines = [line.split("\r")[-1] for line in text.replace("\r\n", "\n").split("\n")]
    batches = [line for line in lines if re.search(r"^\S+ \S+ I \[\w+\] Batch \d+ Loss: \S+, Speed: .*GiB", line)]
    assert len(batches) == len(steps(tmp_path)) == 6
    for word in (str(tmp_path / "run"), "metrics.jsonl", "smp-train report", str(tmp_path / "checkpoints")):
        assert sum(word in line for line in lines if "Run folder" in line) == 2, "at the start and at the end"
