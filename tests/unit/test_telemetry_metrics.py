"""metrics.jsonl through kills, resumes and numbers that are none; speed by hand-set clocks."""

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from smp_train.errors import ConfigError
from smp_train.telemetry import metrics
from smp_train.telemetry.goodput import goodput, in_words
from smp_train.telemetry.metrics import STEP_FIELDS, MetricsWriter, Throughput, history, peak_flops, read_metrics


def strict(text):
    """Parse as any JSON reader would: Python's own takes NaN, others do not."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def lines(folder):
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_line_is_on_disk_before_the_next_with_every_field(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.event("start", step=0)
    writer.step({"step": 1, "loss": 2.5, "grad_norm": math.inf, "lr": math.nan})
    first, second = lines(tmp_path)
    assert (first["event"], first["step"]) == ("start", 0)
    assert first["time"] > 1.7e9
    assert set(STEP_FIELDS) <= set(second)
    assert (second["step"], second["loss"], second["mfu"]) == (1, 2.5, None)
    assert (second["grad_norm"], second["lr"]) == (None, None)
    assert second["nonfinite"] == {"grad_norm": "inf", "lr": "nan"}
    assert "event" not in second


def test_a_line_torn_by_a_kill_costs_that_line_only(tmp_path):
    MetricsWriter(tmp_path).step({"step": 1})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 2, "lo')
    writer = MetricsWriter(tmp_path)
    writer.event("resume", step=1)
    writer.step({"step": 2})
    found = [(record["step"], record.get("event")) for record in read_metrics(tmp_path)]
    assert found == [(1, None), (1, "resume"), (2, None)]


def test_an_attempt_voids_what_came_after_its_first_step():
    def steps(*numbers, attempt):
        return [{"step": number, "loss": attempt} for number in numbers]

    killed = [
        {"event": "start", "step": 0}, *steps(1, 2, attempt=1), {"event": "save", "step": 2},
        *steps(3, 4, attempt=1), {"event": "evaluate", "step": 4},
    ]  # fmt: skip
    resumed = [{"event": "resume", "step": 2}, *steps(3, attempt=2)]
    counted = history(killed + resumed)
    assert [(r["step"], r["loss"]) for r in counted if "event" not in r] == [(1, 1), (2, 1), (3, 2)]
    assert [r["event"] for r in counted if "event" in r] == ["start", "save", "resume"]
    afresh = history([*killed, {"event": "start", "step": 0}])
    assert [r.get("event") for r in afresh] == ["start", "start"]


def test_what_is_not_written_or_refused(tmp_path):
    other = MetricsWriter(tmp_path, is_main=False)
    other.step({"step": 1})
    other.event("finish", step=1)
    other.close()
    assert list(tmp_path.iterdir()) == []
    for refused in (lambda: MetricsWriter(tmp_path / "missing"), lambda: read_metrics(tmp_path)):
        with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
            refused()
    with pytest.raises(ValueError, match="saved"):
        MetricsWriter(tmp_path).event("saved", step=1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fails_costs_one_warning_and_not_the_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(metrics.get_logger(), "propagate", True)
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    for step in range(3):
        writer.step({"step": step})
    writer.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: metrics are being lost (No space left on device)"
    ]


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def test_speed_is_of_the_window_without_pauses(clock):
    speed = Throughput(devices=4, flops_per_token=1e9, peak=1e12)
    clock.now += 1
    with speed.data_wait():
        clock.now += 1
    speed.add(samples=8, tokens=4000)
    with speed.pause():
        clock.now += 50
    clock.now += 2
    speed.add(samples=8, tokens=4000)
    assert speed.window() == pytest.approx(
        {
            "samples_per_sec": 4, "tokens_per_sec": 2000, "tokens_per_sec_per_device": 500,
            "tflops_per_device": 0.5, "mfu": 0.5, "step_sec": 2, "data_wait_sec": 0.5,
        }
    )  # fmt: skip
    clock.now += 1
    speed.add(samples=1, tokens=10)
    second = speed.window()
    assert (second["tokens_per_sec"], second["data_wait_sec"]) == (10, 0)
    assert set(speed.window().values()) == {None}, "no step"
    unknown = Throughput(devices=1, flops_per_token=1e6)
    clock.now += 1
    unknown.add(samples=1, tokens=10)
    found = unknown.window()
    assert (found["mfu"], found["tflops_per_device"]) == (None, pytest.approx(1e-5))


def test_a_pause_is_left_out_when_its_body_fails_and_waits_for_the_device_at_both_edges(clock):
    waits = []
    speed = Throughput(devices=1, synchronize=lambda: waits.append(clock.now))
    speed.add(samples=1, tokens=1)
    clock.now += 1
    with suppress(OSError), speed.pause():
        clock.now += 9
        raise OSError("disk")
    assert speed.window()["samples_per_sec"] == 1
    assert waits == [101, 110]


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("A10G", 70), ("L4", 121), ("A100-SXM4-40GB", 312), ("H100 80GB HBM3", 989.4), ("H100 PCIe", 756.5),
        ("H200 NVL", 835.5), ("GB200", 2500), ("H100 80GB HBM3 MIG 1g.10gb", None), ("A10", None), ("GB300", None),
    ],
)  # fmt: skip
def test_the_peak_is_by_the_whole_name(name, tflops):
    assert peak_flops(f"NVIDIA {name}") == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_goodput_counts_updates_that_are_in_the_weights(tmp_path):
    def step(number, time, seconds=1.0):
        return {"step": number, "time": time, "step_sec": seconds}

    first = [{"event": "start", "step": 0, "time": 100.0}, step(1, 101.0), step(2, 102.0)]
    assert goodput(first) == {
        "goodput": 1.0, "recovery_sec": 0, "repeated_sec": 0, "restart_sec": 0, "blocked_sec": 0,
    }  # fmt: skip
    # Half of step 3 was lost with a rank; the save after it took 3 seconds.
    recovered = {"event": "recovery", "step": 2, "seconds": 4.0, "time": 106.5}
    known = [*first, recovered, step(3, 107.5), {"event": "save", "step": 3, "time": 110.5}, step(4, 111.5)]
    assert goodput(known) == {
        "goodput": 4 / 11.5, "recovery_sec": 4, "repeated_sec": 0.5, "restart_sec": 0, "blocked_sec": 3,
    }  # fmt: skip
    # The next death loses a replica: back to step 3. Then the run is killed, and starts again at step 3.
    known += [{"event": "recovery", "step": 3, "seconds": 2.0, "time": 113.5}, step(4, 114.5)]
    known += [{"event": "resume", "step": 3, "time": 134.5}, step(4, 135.5)]
    known += [{"event": "finish", "step": 4, "time": 137.5}]
    assert goodput(known) == {
        "goodput": pytest.approx(4 / 37.5), "recovery_sec": 6, "repeated_sec": 2.5, "restart_sec": 20, "blocked_sec": 5,
    }  # fmt: skip
    assert in_words(goodput(known)) == (
        "10.7% (lost: 6.0 s recoveries, 2.5 s repeated steps, 20.0 s restarts, 5.0 s saves and validations)"
    )
    assert [record["step"] for record in history(known) if "event" not in record] == [1, 2, 3, 4]
    # Steps that are not logged count as well.
    sparse = [first[0], step(10, 110.0), {"event": "recovery", "step": 15, "seconds": 1.0, "time": 116.5}]
    assert goodput(sparse)["goodput"] == 15 / 16.5
    assert goodput([]) == goodput(first[:1]) == {}
    # A step that was interrupted by a hang of 20 s, and logged in the recovery.
    hung = [*first, step(3, 123.0, 21.0), {"event": "recovery", "step": 3, "seconds": 2.0, "time": 124.0}]
    assert goodput(hung) == {
        "goodput": 3 / 24, "recovery_sec": 21, "repeated_sec": 0, "restart_sec": 0, "blocked_sec": 0,
    }  # fmt: skip
    # The last events of a file have it.
    writer = MetricsWriter(tmp_path)
    writer.event("start", step=0)
    assert "goodput" not in writer.event("save", step=0, seconds=1.0)
    assert 0 <= writer.event("recovery", step=0, seconds=1.0)["goodput"] <= 1
    assert read_metrics(tmp_path)[-1]["recovery_sec"] > 0
