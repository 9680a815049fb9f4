"""The rank that the others wait for is in metrics.jsonl, by a clock on which one rank reads data slowly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import harness
from tests.training import flags, steps, train


def train_with_a_slow_rank(command_line: list[str]) -> None:
    from smp_train import distributed
    from smp_train.distributed.heartbeat import DATA
    from smp_train.telemetry import step_times

    rank = distributed.detect().rank
    times = step_times.StepTimes
    mark, seconds = times.mark, [0.0]

    def marked(self: Any, phase: int) -> None:
        seconds[0] += 1 + (5 if self._phase == DATA and rank == 1 else 0)
        mark(self, phase)

    times.mark = marked  # type: ignore[method-assign]
    step_times.time = type(  # type: ignore[assignment]
        "Clock", (), {"perf_counter": staticmethod(lambda: seconds[0])}
    )
    assert train(command_line) == 0


def test_the_slowest_rank_is_named(tmp_path: Path) -> None:
    words = flags(tmp_path / "full", logging_freq=2, max_steps=4)
    harness.run(train_with_a_slow_rank, 2, words)
    records = steps(tmp_path / "full")
    assert [record["step"] for record in records] == [2, 4]
    for record in records:
        assert (record["slowest_rank"], record["slowest_phase"]) == (1, "reading data")
        assert record["slowest_host"]
        assert record["slowest_sec"] == 5
        assert 0.99 < sum(record["time_shares"].values()) < 1.01
        assert record["time_shares"]["data"] > record["time_shares"]["forward"]


def test_collectives_of_shards_are_timed(tmp_path: Path) -> None:
    harness.run(train, 2, flags(tmp_path, max_steps=2, logging_freq=2))
    (record,) = steps(tmp_path)
    assert 0 < record["communication_share"] < 1


def test_minimal_telemetry_measures_no_phases(tmp_path: Path) -> None:
    harness.run(train, 1, flags(tmp_path, max_steps=1, telemetry="minimal"))
    assert "time_shares" not in steps(tmp_path)[0]
