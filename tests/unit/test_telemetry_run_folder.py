"""The run folder over several attempts: what is kept, what is withdrawn, what never gets in."""

import json
import os
import platform
import sys
from importlib import metadata

import pytest

import smp_train
from smp_train.errors import ConfigError
from smp_train.telemetry.logging_utils import setup_logging
from smp_train.telemetry.run_folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "one")
    folder.create()
    return folder


def test_run_json_says_what_was_run_and_every_attempt_is_kept(folder, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["smp-train", "train", "--run_name", "a b"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame-4711")
    folder.write_run(config={"lr": 1e-4, "checkpoint_dir": ("a", "b")}, mesh={"shard": 2}, backend="native")
    run = json.loads((folder.path / "run.json").read_text())
    assert run["config"] == {"lr": 1e-4, "checkpoint_dir": ["a", "b"]}
    assert run["command"] == "smp-train train --run_name 'a b'"
    assert (run["attempt"], run["pid"], run["mesh"]) == (1, os.getpid(), {"shard": 2})
    assert run["backend"] == "native"
    assert {"started", "host"} <= set(run)
    assert run["versions"] == {
        "python": platform.python_version(), "smp_train": smp_train.__version__,
        **{name: metadata.version(name) for name in ("torch", "transformers")},
    }  # fmt: skip
    assert all("sesame-4711" not in file.read_text() for file in folder.path.glob("*.json*"))
    assert folder.read_run() == run
    assert folder.logs.is_dir()
    folder.write_run(config={"lr": 2.0})
    attempts = [json.loads(line) for line in folder.attempts.read_text().splitlines()]
    assert [(attempt["attempt"], attempt["config"]["lr"]) for attempt in attempts] == [(1, 1e-4), (2, 2.0)]
    assert folder.read_run() == attempts[-1]
    assert not [name for name in os.listdir(folder.path) if name.startswith(".")]


def markers(folder):
    """Return the steps in STOPPED and DONE, and whether there is a STOP."""
    steps = [json.loads(file.read_text())["step"] if file.exists() else None for file in (folder.stopped, folder.done)]
    return (*steps, folder.stop.exists())


def test_an_attempt_takes_the_folder_over_and_withdraws_the_markers_once_it_trains(folder, monkeypatch):
    assert markers(folder) == (None, None, False)
    folder.mark_stopped(7)
    folder.stop.touch()
    assert markers(folder) == (7, None, True)
    folder.create()
    assert markers(folder) == (7, None, False)
    folder.reopen()
    assert markers(folder) == (None, None, False)
    folder.mark_done(9)
    folder.stop.touch()
    folder.mark_stopped(12)
    assert markers(folder) == (12, None, False), "stopped or done, but not both"
    folder.mark_done(20)
    folder.create()
    assert markers(folder) == (None, 20, False)
    assert set(json.loads(folder.done.read_text())) == {"step", "time"}
    monkeypatch.setenv("SMP_TRAIN_KEEP_STOP", "1")  # a batch job exports it: a STOP is meant for this start
    folder.stop.touch()
    folder.create()
    assert folder.stop.exists()


def test_what_cannot_be_written_names_the_run_folder(folder, tmp_path):
    (folder.done / "in the way").mkdir(parents=True)
    (tmp_path / "taken").write_text("")
    for failing in (
        lambda: folder.mark_done(9), folder.reopen, RunFolder(tmp_path / "taken").create,
        lambda: RunFolder(tmp_path / "missing").write_run(config={}),
        lambda: setup_logging(0, log_dir=tmp_path / "taken"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"{tmp_path}.* cannot write .*--run_dir"):
            failing()
