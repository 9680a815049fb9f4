"""`smp-train chaos`: which processes it disturbs, what it reports and refuses, and a whole drill."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smp_train.errors import ConfigError
from smp_train.launch import chaos, disturb
from tests.training import flags

SUPERVISOR = """
import json, subprocess, sys, time
def start():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
ranks, step = [start(), start()], 0
metrics = open(sys.argv[1] + "/metrics.jsonl", "a", buffering=1)
while True:
    step += 1
    metrics.write(json.dumps({"step": step, "time": time.time(), "step_sec": 0.01}) + "\\n")
    time.sleep(0.01)
    for rank, process in enumerate(ranks):
        if open("/proc/%d/stat" % process.pid).read().split()[2] == "T":
            metrics.write(json.dumps({"event": "finish", "step": step, "time": time.time()}) + "\\n")
            process.wait()
        if process.poll() is not None:
            ranks[rank], step = start(), step - 2
            event = {"event": "recovery", "step": step, "time": time.time(), "seconds": 0.5, "replaced": [rank]}
            metrics.write(json.dumps(event | {"reason": "rank %d was killed" % rank}) + "\\n")
            if len(sys.argv) > 2:
                sys.exit(1)
"""


@pytest.fixture
def supervisor(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    """A stand-in that replaces two processes; they are in its session and end with it."""
    (tmp_path / "run.json").write_text(json.dumps({"total_steps": 10**6, "config": {"recovery": "in_place"}}))
    words = [sys.executable, "-c", SUPERVISOR, str(tmp_path), *getattr(request, "param", [])]
    process = subprocess.Popen(words, start_new_session=True)
    yield process
    for pid in [*disturb.ranks(process.pid), process.pid]:
        subprocess.run(["kill", "-KILL", str(pid)], check=False)
    process.wait()


def test_each_disturbance_is_followed_to_its_recovery(tmp_path: Path, supervisor: subprocess.Popen[bytes]) -> None:
    found = disturb.disturb(tmp_path, supervisor.pid, 3, ["kill"], random.Random(1))
    assert len({each["pid"] for each in found}) == 3
    for each in found:
        assert each["after_step"] >= disturb.FIRST_STEP
        assert each["repeated"] == 2
        assert each["reason"] == f"rank {each['replaced'][0]} was killed"
        assert each["down_sec"] < 30
    assert [each["after_step"] for each in found] == sorted(each["after_step"] for each in found)
    assert len(disturb.ranks(supervisor.pid)) == 2


@pytest.mark.parametrize("supervisor", [["ends"]], indirect=True)
def test_a_run_that_ends_is_not_disturbed_again(tmp_path: Path, supervisor: subprocess.Popen[bytes]) -> None:
    found = disturb.disturb(tmp_path, supervisor.pid, 3, ["kill"], random.Random(1))
    assert len(found) == 1


def test_a_run_that_has_finished_ends_though_a_rank_was_frozen(
    tmp_path: Path, supervisor: subprocess.Popen[bytes]
) -> None:
    assert disturb.disturb(tmp_path, supervisor.pid, 2, ["freeze"], random.Random(1)) == []
    assert len(disturb.ranks(supervisor.pid)) == 2  # neither is frozen


def test_the_report_names_what_was_not_recovered_or_differs() -> None:
    recovered = {"kind": "kill", "after_step": 7, "replaced": [3], "down_sec": 1.25, "step": 5, "repeated": 2}
    result: dict[str, Any] = {
        "disturbances": [recovered, {"kind": "freeze", "after_step": 9}], "steps": 9, "different_steps": [8],
        "ok": False,
    }  # fmt: skip
    lines = [" ".join(line.split()) for line in chaos.report(result).splitlines()]
    assert lines[2:] == [
        "7 rank 3 was killed 1.2 s 5 2", "9 rank ? was frozen not recovered", "",
        "1 of 9 steps differ from the undisturbed run, first 8", "FAILED: recovered from 1 of 2 disturbances",
    ]  # fmt: skip
    result |= {"disturbances": [recovered], "different_steps": [], "last_loss": 5.5, "ok": True}
    assert "bit for bit" in chaos.report(result)
    assert chaos.report(result).endswith("ok: recovered from 1 of 1 disturbances")


@pytest.mark.parametrize(("words", "message"), [
    (["--kinds", "kill,disk", "--", "--nproc=2"], "--kinds disk: is not kill or freeze"),
    (["--kinds", "all", "--", "--nproc=2"], "--kinds all: is not kill or freeze; give"),
    ([], "give -- and the flags"),
    (["--run", "somewhere"], "somewhere: is no folder of a run with --recovery in_place"),
    (["--", "--nnodes=2", "--use_synthetic_data=1"], "--nnodes"),
    (["--", "--max_stepz=2"], "unknown flag --max_stepz"),
])  # fmt: skip
def test_mistakes_are_refused_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        chaos.main(words)
    assert not [*tmp_path.rglob("*.log")]


def test_a_run_without_recovery_in_place_is_left_alone(tmp_path: Path, supervisor: subprocess.Popen[bytes]) -> None:
    assert disturb.Follower(tmp_path, supervisor.pid).reaches(step=1)
    with pytest.raises(ConfigError, match="none of its ranks is on this machine"):
        chaos.main(["--run", str(tmp_path)])
    (tmp_path / "run.json").write_text(json.dumps({"total_steps": 10**6, "config": {"recovery": "off"}}))
    with pytest.raises(ConfigError, match="is no folder of a run with --recovery in_place"):
        chaos.main(["--run", str(tmp_path)])
    assert len(disturb.ranks(supervisor.pid)) == 2


@pytest.mark.slow
def test_a_drill_shows_that_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = flags(tmp_path, max_steps=30, sharding_strategy="no_shard", run_name="unused", distributed_backend="gloo")
    assert chaos.main(["--kills", "2", "--seed", "1", "--json", "--", "--nproc=2", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["steps"], result["different_steps"]) == (True, 30, [])
    assert [each["repeated"] for each in result["disturbances"]] == [0, 0]
    assert result["goodput"]["disturbed"]["recovery_sec"] > 0
    assert not (tmp_path / "run").exists()
