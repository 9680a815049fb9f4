"""The rank that the others wait for, and the shares of a step's time, are in metrics.jsonl (rule: test_step_times)."""

from __future__ import annotations

from pathlib import Path

from tests import harness
from tests.training import flags, steps, train


def test_metrics_have_the_slowest_rank_and_the_shares_of_time(tmp_path: Path) -> None:
    harness.run(train, 2, flags(tmp_path, max_steps=4, logging_freq=2))
    records = steps(tmp_path)
    assert [record["step"] for record in records] == [2, 4]
    for record in records:
        assert {"slowest_rank", "slowest_host", "slowest_phase", "slowest_sec"} <= record.keys()
        assert 0.99 < sum(record["time_shares"].values()) < 1.01
        assert 0 < record["communication_share"] < 1


def test_minimal_telemetry_measures_no_phases(tmp_path: Path) -> None:
    harness.run(train, 1, flags(tmp_path, max_steps=1, telemetry="minimal"))
    assert "time_shares" not in steps(tmp_path)[0]
