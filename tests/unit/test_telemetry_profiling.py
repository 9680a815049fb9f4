"""Profiles of chosen steps: which steps, which files, and nothing at all when nobody asked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smp_train.arguments import parse
from smp_train.telemetry import verdict
from smp_train.telemetry.profiling import Profiler


def profile(folder: Path, steps: int, *flags: str) -> Profiler:
    profiler = Profiler(parse(["--use_synthetic_data=1", *flags], {}).args, folder, rank=3)
    for number in range(101, 101 + steps):
        with profiler.step(number):
            torch.ones(2, 2) @ torch.ones(2, 2)
    profiler.close()
    return profiler


@pytest.mark.parametrize(("start", "count", "steps"), [(1, 1, 3), (6, 3, 9), (2, 5, 4)])
def test_the_steps_asked_for_are_recorded(tmp_path: Path, start: int, count: int, steps: int) -> None:
    profile(tmp_path, steps, "--use_profiler", f"--profile_start={start}", f"--profile_steps={count}")
    trace = json.loads(gzip.decompress((tmp_path / "profile/trace-rank3.json.gz").read_bytes()))
    marks = [event["name"] for event in trace["traceEvents"] if str(event.get("name", "")).startswith("ProfilerStep#")]
    recorded = {f"ProfilerStep#{position - 1}" for position in range(start, min(start + count, steps + 1))}
    # A run that ends inside leaves the step it would have made next, empty.
    assert set(marks) == recorded | ({f"ProfilerStep#{steps}"} if start + count - 1 > steps else set())
    assert "aten::mm" in (tmp_path / "profile/operators-rank3.txt").read_text()
    text, _, *rows = (tmp_path / "profile/verdict.txt").read_text().splitlines()
    assert text.startswith(f"Profile of steps {100 + start} to {100 + min(start + count - 1, steps)}:")
    assert any("aten::mm" in line for line in rows)


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


def event(name: str, start: float, end: float, device: str = "CPU") -> Any:
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=span, device_type=f"DeviceType.{device}")


STEPS = [event("ProfilerStep*", 0, 1000), event("ProfilerStep#6", 1000, 2000)]


def test_shares_of_a_gpu_are_of_its_kernels() -> None:
    gpu = [
        event("ProfilerStep#5", 0, 9000, "CUDA"), event("FSDP::all_gather", 0, 9000, "CUDA"),
        event("gemm", 100, 500, "CUDA"), event("gemm", 400, 700, "CUDA"), event("Memcpy", 1100, 1700, "CUDA"),
        event("ncclDevKernel_AllGather", 600, 1000, "CUDA"), event("ncclDevKernel_ReduceScatter", 1900, 2100, "CUDA"),
    ]  # fmt: skip
    found = verdict.shares([*STEPS, event("aten::mm", 0, 2000), *gpu])
    assert found == pytest.approx((1000e-6, 600e-6, 300e-6, 250e-6))


def test_shares_of_a_cpu_are_between_its_first_and_last_step() -> None:
    cpu = [event("aten::mm", 500, 900), event("aten::t", 600, 700), event("gloo:all_reduce", 800, 1400)]
    cpu += [event("aten::mm", 1900, 2500), event("c10d::allreduce_", 0, 2000)]
    assert verdict.shares([*STEPS, *cpu]) == pytest.approx((1000e-6, 250e-6, 300e-6, 250e-6))
    assert verdict.shares(cpu) is None


@pytest.mark.parametrize(
    ("compute", "talking", "exposed", "by"),
    [(0.5, 0.6, 0.41, "communication"), (0.9, 0.6, 0.05, "compute"), (0.5, 0.3, 0.1, "the host or the data")],
)
def test_the_verdict_has_shares_a_bound_and_the_slowest_rank(
    compute: float, talking: float, exposed: float, by: str
) -> None:
    usual = verdict.Shares(2.0, 2 * compute, 2 * talking, 2 * exposed)
    text = verdict.paragraph([usual] * 3, ["a", "a", "b"], 6, 8)
    assert f"{100 * exposed:.0f} % exposed" in text
    assert f"Bound by {by}: {verdict.ADVICE[by]}" in text
    assert "rank" not in text.replace("ranks", "")
    # The others' communication is time waited for the slow rank, whose own bound is the run's.
    late = verdict.Shares(2.0, 0.2, 0.1, 0.1)
    text = verdict.paragraph([usual, usual, late], ["a", "a", "b"], 6, 8)
    assert "rank 2 on b" in text
    assert "Bound by the host or the data of rank 2: " in text


def test_the_dearest_are_ten_operators_by_their_own_time() -> None:
    times = [(f"aten::{n}", n, 20 - n) for n in range(1, 16)] + [(name, 99, 99) for name in verdict.RANGES]
    rows = [SimpleNamespace(key=name, self_cpu_time_total=a, self_device_time_total=b) for name, a, b in times]
    on_cpu, on_gpu = (verdict.dearest(rows, on_gpu=on_gpu) for on_gpu in (False, True))
    assert [name for name, _ in on_cpu] == [f"aten::{n}" for n in range(15, 5, -1)]
    assert on_gpu[0] == ("aten::1", pytest.approx(19 / sum(20 - n for n in range(1, 16))))
