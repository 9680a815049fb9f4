"""Where the time goes: phases of a planted clock and of planted events, and which rank the others wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp_train.distributed import heartbeat
from smp_train.distributed.heartbeat import BACKWARD, DATA, FORWARD, LOG, OUTCOME, PHASES, UPDATE, VOTE
from smp_train.telemetry.step_times import StepTimes, summary

RANKS: Any = SimpleNamespace(hostname="here")


@pytest.fixture(autouse=True)
def no_listener_stays():
    yield
    heartbeat.end()


def row(steps: int = 1, ahead: float = 0.0, talk: float = 0.0, **seconds: float) -> list[float]:
    phases = {"data": DATA, "vote": VOTE, "forward": FORWARD, "backward": BACKWARD, "update": UPDATE, "log": LOG}
    found = [0.0] * len(PHASES)
    for name, value in seconds.items():
        found[phases[name]] = value * steps
    return [*found, talk * steps, 0.0, ahead * steps, steps]


READS_LATE = row(steps=2, data=0.1, vote=0.6, forward=1, backward=2), row(steps=2, data=0.7, forward=1, backward=2)
SLOW_FORWARD = row(steps=2, forward=3, talk=1.5, backward=1), row(steps=2, forward=3, talk=0.5, backward=1)


@pytest.mark.parametrize(
    ("rows", "phase", "seconds", "share"),
    [(READS_LATE, DATA, 0.6, 0.6 / 3.7), (SLOW_FORWARD, FORWARD, 1.0, 0.25)],  # its collectives do not wait
)
def test_the_rank_that_waits_least_is_named(rows: Any, phase: int, seconds: float, share: float) -> None:
    usual, late = rows
    found = summary([usual, usual, late, usual], ["a", "a", "b", "b"], with_host=False)
    assert (found["slowest_rank"], found["slowest_host"], found["slowest_phase"]) == (2, "b", PHASES[phase])
    assert (found["slowest_sec"], found["slowest_share"]) == pytest.approx((seconds, share))
    assert sum(found["time_shares"].values()) == pytest.approx(1)
    assert found["host_ahead_sec"] is None
    assert set(summary([row(steps=0)] * 2, ["a", "a"]).values()) == {None}
    alone = summary([row(forward=1, ahead=0.25)], ["a"], with_host=True)
    assert (alone["slowest_rank"], alone["host_ahead_sec"]) == (None, 0.25)


def test_a_rank_is_named_once_when_it_stays_late(caplog: pytest.LogCaptureFixture) -> None:
    times = StepTimes(RANKS, torch.device("cpu"))
    late = [row(vote=1, forward=1), row(data=1, forward=1)]
    even = [row(forward=1), row(forward=1)]
    for rows in (late, late, even, late, late, late, late):
        times._name_slowest(summary(rows, ["a", "b"]))
    assert [record.all_ranks for record in caplog.records] == [True]  # type: ignore[attr-defined]
    assert "rank 1 on b" in caplog.messages[0]
    assert PHASES[DATA] in caplog.messages[0]


class Event:
    """An event whose device passes it when the test says so."""

    passed: float = 0
    made = 0

    def __init__(self, enable_timing: bool) -> None:
        Event.made += 1

    def record(self) -> None:
        self.at = next(self.times)  # type: ignore[attr-defined]

    def query(self) -> bool:
        return self.at <= Event.passed

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "the device has not come so far: reading would fail"
        return end.at - self.at


def test_events_are_read_once_the_device_has_passed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Event, "times", iter(range(0, 10_000_000, 1000)), raising=False)
    times = StepTimes(RANKS, torch.device("cuda"))
    for step in range(50):
        Event.passed = 6000 * step - 7000  # behind the host
        for phase in (DATA, VOTE, FORWARD):
            heartbeat.enter(phase)
        with heartbeat.collective():
            pass
        heartbeat.enter(OUTCOME)
    assert Event.made < 20
    times._on_gpu = False  # the rest is as on a CPU
    times._read_marks()
    assert sum(times._sums[: len(PHASES)]) == (6000 * 49 - 7000) // 1000
    Event.passed = 10_000_000
    monkeypatch.setattr(dist, "all_reduce", lambda everyone: None)
    times.gather()
    shares = times.fields()["time_shares"]
    assert {name: round(6 * share, 1) for name, share in shares.items() if share} == {
        "data": 1, "wait_for_ranks": 1, "forward": 3, "host": 1
    }  # fmt: skip
