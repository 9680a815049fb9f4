"""Validation inside a run and by itself: what it leaves behind, and that a stop does not wait for its end."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from smp_train.checkpoints.cli import main as checkpoint_verb
from tests import harness
from tests.system.command import write_shard
from tests.training import flags, records, steps, train

LONG = {"validation_freq": 2, "validation_batches": 400, "val_batch_size": 1, "max_steps": 4, "checkpoint_freq": 100}


def train_and_stop_in_validation(command_line: list[str]) -> tuple[int, int]:
    """Train; rank 1 gets SIGTERM as the first validation begins. Return the exit code and the batches read in it."""
    from smp_train import train_utils
    from smp_train.data.indexed import ValidationData
    from smp_train.run import stop

    whole, read = ValidationData.batches, 0
    heard = threading.Event()
    on_signal = stop.StopRequest._on_signal

    def hear(self: Any, number: int) -> None:
        on_signal(self, number)
        heard.set()

    def batches(self: Any) -> Any:
        nonlocal read
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
            heard.wait()  # a thread's work, which may be late
        for batch in whole(self):
            read += 1
            yield batch

    ValidationData.batches = batches  # type: ignore[method-assign]
    stop.StopRequest._on_signal = hear  # type: ignore[method-assign]
    train_utils.READ_TOGETHER = 1
    return train(command_line), read


def test_a_stop_does_not_wait_for_the_end_of_a_validation(tmp_path: Path) -> None:
    results = harness.run(train_and_stop_in_validation, 2, flags(tmp_path, **LONG))
    assert [code for code, _ in results] == [0, 0]
    assert max(read for _, read in results) < LONG["validation_batches"]
    assert [record["step"] for record in steps(tmp_path)] == [1, 2]
    assert [record.get("event") for record in records(tmp_path) if "event" in record] == ["start", "save", "stop"]
    assert json.loads((tmp_path / "run" / "STOPPED").read_text())["step"] == 2
    assert (tmp_path / "checkpoints" / "run" / "llama_v2-2steps" / "COMMITTED").exists()


def test_evaluation_by_itself_changes_nothing_but_the_marker(tmp_path: Path) -> None:
    for name in ("data", "test"):
        write_shard(tmp_path / name / "0.jsonl", 8)
    held_out = {"use_synthetic_data": None, "test_dir": tmp_path / "test"}
    training = {**held_out, "training_dir": tmp_path / "data"}
    harness.run(train, 2, flags(tmp_path, **training, max_steps=2, checkpoint_freq=2, validation_freq=2))
    (trained,) = (r["loss"] for r in records(tmp_path) if r.get("event") == "evaluate")
    changes = {**held_out, "evaluate_only": 1, "run_dir": tmp_path / "again" / "run"}
    found = {"resume_from_checkpoint": tmp_path / "checkpoints"}
    before = sorted(path for path in (tmp_path / "checkpoints").rglob("*"))
    harness.run(train, 2, flags(tmp_path, **changes, **found, max_steps=2))
    events = {r["event"]: r for r in records(tmp_path / "again") if "event" in r}
    assert events["evaluate"]["loss"] == pytest.approx(trained, rel=1e-6)
    assert events["finish"]["step"] == 2
    assert json.loads((tmp_path / "again" / "run" / "DONE").read_text())["step"] == 2
    assert sorted(path for path in (tmp_path / "checkpoints").rglob("*")) == before


# A rate at which float32 weights do not change: the first validation stays the best.
STALE = {"lr": 1e-30, "min_lr": 0, "weight_decay": 0, "validation_freq": 1, "num_kept_checkpoints": 1, "keep_best": 1}


def test_early_stopping_and_the_best_checkpoint(tmp_path: Path) -> None:
    patient = flags(tmp_path, **STALE, max_steps=9, checkpoint_freq=2, early_stopping=3)
    resume = [f"--resume_from_checkpoint={tmp_path / 'checkpoints'}"]
    harness.run(train, 2, patient)
    assert [record["step"] for record in steps(tmp_path)] == [1, 2, 3, 4]
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == 4
    kept = sorted(path.parent.name for path in (tmp_path / "checkpoints" / "run").glob("*/COMMITTED"))
    assert kept == ["llama_v2-1steps", "llama_v2-4steps"]
    meta = tmp_path / "checkpoints/run/llama_v2-4steps/meta.json"
    best = json.loads(meta.read_text())["best"]
    assert (best["step"], best["since"]) == (1, 3)
    prune = ["prune", str(tmp_path / "checkpoints"), "--keep", "1"]
    assert checkpoint_verb(prune) == 0
    assert len(list((tmp_path / "checkpoints" / "run").glob("*/COMMITTED"))) == 2
    harness.run(train, 2, [*patient, *resume])
    assert len(steps(tmp_path)) == 4
    harness.run(train, 2, [*patient, *resume, "--early_stopping=5"])
    assert json.loads((tmp_path / "run" / "DONE").read_text())["step"] == 6
    assert (tmp_path / "checkpoints/run/llama_v2-1steps/COMMITTED").exists()
