"""Long work shows how far it is, in lines."""

import re

import pytest

from smp_train import progress
from smp_train.progress import Progress
from smp_train.telemetry.screen import STATUS_SECONDS, Screen


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


def test_secrets_of_urls_are_not_shown(capsys):
    with Progress("Reading s3://key:secret@bucket/x"):
        assert "secret" not in until(capsys, "Reading s3://")


def test_a_line_a_minute_says_when_it_ends_and_saves(monkeypatch, caplog):
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
        shown.open(0, 100)
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
