"""Profiles of chosen steps: which steps, which files, and nothing at all when nobody asked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from smp_train.arguments import parse
from smp_train.telemetry.profiling import Profiler


def profile(folder: Path, steps: int, *flags: str) -> Profiler:
    profiler = Profiler(parse(["--use_synthetic_data=1", *flags], {}).args, folder, rank=3)
    for number in range(101, 101 + steps):
        with profiler.step(number):
            torch.ones(2, 2) @ torch.ones(2, 2)
    profiler.close()
    return profiler


@pytest.mark.parametrize(("start", "count", "steps"), [(1, 1, 3), (2, 2, 9), (6, 3, 9), (2, 5, 4)])
def test_the_steps_asked_for_are_recorded(tmp_path: Path, start: int, count: int, steps: int) -> None:
    profile(tmp_path, steps, "--use_profiler", f"--profile_start={start}", f"--profile_steps={count}")
    trace = json.loads(gzip.decompress((tmp_path / "profile/trace-rank3.json.gz").read_bytes()))
    marks = [event["name"] for event in trace["traceEvents"] if str(event.get("name", "")).startswith("ProfilerStep#")]
    recorded = {f"ProfilerStep#{position - 1}" for position in range(start, min(start + count, steps + 1))}
    # A run that ends inside leaves the step it would have made next, empty.
    assert set(marks) == recorded | ({f"ProfilerStep#{steps}"} if start + count - 1 > steps else set())
    assert "aten::mm" in (tmp_path / "profile/operators-rank3.txt").read_text()


def test_without_a_flag_or_a_gpu_nothing_is_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile(tmp_path, 9)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    profile(tmp_path, 9, "--profile_nsys")
    assert [record.message for record in caplog.records] == [
        "--profile_nsys 1: there is no GPU here, and nothing to record"
    ]
