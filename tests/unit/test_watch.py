"""Who is missing in a hung run, by what is known of each rank; and what a rank's slot shows of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from smp_train.distributed import heartbeat, watch
from smp_train.distributed.heartbeat import BACKWARD, DATA, FORWARD, VOTE
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
        ([Report("a", 7, VOTE, waits="x"), Report("a", 7, DATA, waits="")], [1]),
        # Nothing is known of collectives: the one that is behind.
        ([Report("a", 8, DATA), Report("a", 7, BACKWARD), Report("a", 8, DATA)], [1]),
        ([Report("a", 7, FORWARD), Report("a", 7, FORWARD)], []),
        ([WAITING, WAITING], []),
    ],
)
def test_who_is_missing(ranks: list[Report], found: list[int]) -> None:
    reports = dict(enumerate(ranks))
    assert watch.missing(reports) == found
    line = watch.verdict(reports)
    assert "\n" not in line
    assert [rank for rank in reports if f"rank {rank} on {reports[rank].host} " in line] == found
    assert ("no rank is missing" in line) == (not found)


def test_thousands_are_not_listed() -> None:
    reports = {rank: WAITING._replace(condition="cut off") for rank in range(3000)}
    assert len(watch.verdict({**reports, 3000: WAITING})) < 2000


def test_a_slot_shows_step_phase_and_usual_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "_board", None)
    monkeypatch.setattr(heartbeat, "_path", lambda name: str(tmp_path / name))
    board = heartbeat.open_board("x", 1, 3, rank=5)
    other = heartbeat.Board(board.memory, 2, 6)
    assert board.usual() is None
    for step in range(1, 6):
        heartbeat.at(DATA, step)
        heartbeat.at(BACKWARD)
    assert board.usual() is not None
    heartbeat.unlink("x")
    first, second = other.read()
    assert (first.rank, first.pid, first.step, first.phase) == (5, os.getpid(), 5, BACKWARD)
    assert (second.rank, second.step, second.answer) == (6, 0, {})
    other.answer({"end": "why"})
    assert heartbeat.ordered() == {"end": "why"}
    heartbeat.end()
    heartbeat.at(DATA, 6)
    assert other.read()[0].phase == heartbeat.END
    assert os.listdir(tmp_path) == []


def test_a_process_that_is_stopped_or_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    assert heartbeat.state(process.pid) in ("", "blocked")
    process.send_signal(19)
    while heartbeat.state(process.pid) != "stopped":
        time.sleep(0.01)
    process.kill()
    while heartbeat.state(process.pid) != "gone":  # unwaited for, it is a zombie
        time.sleep(0.01)
    process.wait()
    assert heartbeat.state(process.pid) == "gone"


def test_the_main_threads_stack() -> None:
    found: list[tuple[str, bool]] = []
    thread = threading.Thread(target=lambda: found.append(watch.stack()))
    thread.start()
    thread.join()
    ((text, compiling),) = found
    assert "threading.py" in text  # it starts the thread, or waits for it
    assert "<lambda>" not in text
    assert not compiling
