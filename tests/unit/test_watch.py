"""Who is missing in a hung run, by what is known of each rank; and what a rank's slot shows of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from smp_train.distributed import detect, failures, heartbeat, watch
from smp_train.distributed.heartbeat import BACKWARD, DATA, FORWARD
from smp_train.distributed.watch import Report

WAITING = Report("node-1", 7, FORWARD, waits="gloo:all_gather 84 of group 0 default_pg")


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([WAITING, WAITING._replace(condition="stopped", waits=None), WAITING], [1]),
        # A killed one is the cause of whatever else is wrong.
        ([WAITING._replace(condition="silent"), WAITING, WAITING._replace(condition="gone")], [2]),
        ([WAITING, WAITING._replace(condition="cut off"), WAITING._replace(condition="cut off")], [1, 2]),
        # All answer: the one that waits in no collective.
        ([WAITING, WAITING, WAITING._replace(waits="")], [2]),
        # Nothing is known of collectives: the one that is behind.
        ([Report("a", 8, DATA), Report("a", 7, BACKWARD), Report("a", 8, DATA)], [1]),
        ([Report("a", 7, FORWARD), Report("a", 7, FORWARD)], []),
    ],
)
def test_who_is_missing(ranks: list[Report], found: list[int]) -> None:
    reports = dict(enumerate(ranks))
    assert watch.missing(reports) == found
    line = watch.verdict(reports)
    assert "\n" not in line
    assert [rank for rank in reports if f"rank {rank} on {reports[rank].host} " in line] == found
    assert ("no rank is missing" in line) == (not found)
    assert not re.search(r"\b1 others", line)
    many = {rank: WAITING._replace(condition="cut off") for rank in range(3000)}
    assert len(watch.verdict({**many, 3000: WAITING})) < 2000


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> heartbeat.Board:
    """Return the board of rank 5, the second of three on its node."""
    monkeypatch.setattr(heartbeat, "board", None)
    return heartbeat.open_board(f"test-{uuid.uuid4().hex}", 1, 3, rank=5, logs=tmp_path)


def test_a_board_that_cannot_be_opened_again_leaves_none(
    board: heartbeat.Board, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:  # fmt: skip
    """The slots of another number of ranks would be read otherwise."""
    monkeypatch.setattr(heartbeat, "_path", lambda name: str(tmp_path / "no folder" / name))
    with pytest.raises(OSError, match="No such file"):
        heartbeat.open_board("again", 0, 2, rank=4, logs=tmp_path)
    assert heartbeat.board is None


def test_a_slot_shows_step_phase_and_usual_time(board: heartbeat.Board) -> None:
    other = heartbeat.Board(board.memory, 2, 6, board.logs)
    assert board.usual() is None
    for step in range(1, 6):
        heartbeat.enter(DATA, step)
        heartbeat.enter(BACKWARD)
    assert board.usual() is not None
    first, second = other.read()
    assert (first.rank, first.pid, first.step, first.phase) == (5, os.getpid(), 5, BACKWARD)
    assert (second.rank, second.step, second.note) == (6, 0, {})
    other.note({"end": "why"})
    assert heartbeat.ending() == {"end": "why"}
    heartbeat.end()
    heartbeat.enter(DATA, 6)
    assert other.read()[0].phase == heartbeat.END


def test_the_watcher_has_ended_before_the_process_group_does(board: heartbeat.Board) -> None:
    """It may be asking torch about that group, and no thread of it may outlive the interpreter."""
    watch.Watcher(board, detect({}), report_seconds=30, end_seconds=0)
    watching = [thread for thread in threading.enumerate() if thread.name == "smp-train-watch"]
    assert watching
    heartbeat.end()
    assert not any(thread.is_alive() for thread in watching)


DUMP = """2026-11-23 00:00:01 I [train_lib] Batch 1
Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/x/queue.py", line 180 in get

Current thread 0x00007f02 (most recent call first):
  File "/x/kernel.py", line 7 in launch
  File "/x/model.py", line 8 in forward
  File "/x/train.py", line 9 in step
"""


def test_a_crash_is_read_from_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    assert failures.crash_in(log) == ""
    log.write_text("x" * 100_000 + DUMP)
    assert failures.crash_in(log) == "launch (kernel.py:7) < forward (model.py:8) (Segmentation fault)"
    log.write_text(DUMP + "2026-11-23 00:00:02 I [build_run] the next start\n")
    assert failures.crash_in(log) == ""


HOLDS_THE_LOCK = """
import ctypes, sys, time, uuid
from pathlib import Path
from smp_train.distributed import detect, heartbeat, watch
logs = Path(sys.argv[1])
board = heartbeat.open_board(f"test-{uuid.uuid4().hex}", 0, 1, rank=0, logs=logs)
watch.Watcher(board, detect({}), report_seconds=0.3, end_seconds=0)
began = board.read()[0].tick
while board.read()[0].tick == began:
    time.sleep(0.01)
def in_c():
    ctypes.PyDLL(None).sleep(600)
in_c()
"""


def test_a_process_whose_watcher_cannot_run_shows_its_stack(tmp_path: Path) -> None:
    """As C code holds the interpreter's lock; and what the kernel reports about the process."""
    log = tmp_path / "rank-0.log"
    with subprocess.Popen([sys.executable, "-c", HOLDS_THE_LOCK, tmp_path]) as process:
        try:
            while not failures.stack_in(log).startswith("in_c (<string>:"):
                assert process.poll() is None
            for number, state in ((signal.SIGSTOP, "stopped"), (signal.SIGKILL, "gone")):  # unwaited for: a zombie
                assert failures.process_state(process.pid) in ("", "blocked", "stopped")
                process.send_signal(number)
                while failures.process_state(process.pid) != state:
                    pass
        finally:
            process.kill()
    assert failures.process_state(process.pid) == "gone"
