"""Trackers get a run's numbers, never hold it up, and fail with one warning."""

import json
import logging
import math
import os
import sys
import threading

import pytest

from smp_train.arguments import parse
from smp_train.telemetry import trackers
from smp_train.telemetry.logging_utils import get_logger
from smp_train.telemetry.metrics import MetricsWriter
from smp_train.telemetry.trackers import Trackers, chosen
from tests import harness
from tests.training import flags, steps, train


class Spy:
    """Keeps what it is given; raises at a call of a name, or waits in it."""

    def __init__(self, fails="", waits=None):
        self.seen, self._fails, self._waits = [], fails, waits

    def _take(self, name, *given):
        if self._waits is not None:
            self._waits.wait()
        if name == self._fails:
            raise RuntimeError(f"the server is gone {'<html>' * 999}\nand more")
        self.seen.append((name, *given))

    def start(self, config):
        self._take("start", config)

    def log(self, metrics, step):
        self._take("log", metrics, step)

    def event(self, record):
        self._take("event", record["event"])

    def close(self, ended):
        self._take("close", ended)


def written(tmp_path, config=None, **spies):
    """Write a few records with trackers, and close."""
    writer = MetricsWriter(tmp_path)
    writer.trackers = Trackers({name: ("wandb", spy) for name, spy in spies.items()}, config or {})
    writer.event("start", step=0)
    for step in (1, 2, 3):
        writer.step({"step": step, "loss": 4.0 / step, "grad_norm": math.nan, "shares": {"data": 0.5}})
    writer.event("evaluate", step=3, loss=1.5)
    writer.event("save", step=3, checkpoint="s3://key:planted@bucket/x", seconds=2.0)
    writer.event("finish", step=3)
    writer.close()


@pytest.fixture
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level(logging.WARNING, logger="smp_train")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_tracker_gets_configuration_numbers_and_events_in_order(tmp_path, warnings):
    spy = Spy()
    written(tmp_path, {"lr": 0.1, "mesh": {"shard": 2}, "training_dir": "s3://a:planted@b/c?X-Sig=planted"}, one=spy)
    name, goodput, step = spy.seen.pop(-3)
    assert (name, step) == ("log", 3)
    assert goodput["finish/goodput"] + goodput["finish/recovery_sec"] <= 1
    assert spy.seen == [
        ("start", {"lr": 0.1, "mesh.shard": 2, "training_dir": "s3://...@b/c?..."}),
        ("event", "start"),
        *(("log", {"train/loss": 4.0 / step, "train/shares.data": 0.5}, step) for step in (1, 2, 3)),
        ("log", {"validation/loss": 1.5}, 3), ("event", "evaluate"),
        ("log", {"save/seconds": 2.0}, 3), ("event", "save"),
        ("event", "finish"), ("close", "finish"),
    ]  # fmt: skip
    assert warnings() == []


@pytest.mark.parametrize("fails", ["start", "log", "event", "close"])
def test_a_tracker_that_raises_is_left_out_with_one_warning(tmp_path, warnings, fails):
    bad, good = Spy(fails), Spy()
    written(tmp_path, bad=bad, good=good)
    (warning,) = warnings()
    assert "wandb" in warning
    assert "the server is gone" in warning
    assert len(warning) < 2 * trackers.MAX_TEXT
    assert good.seen[-1] == ("close", "finish")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 7


def test_a_tracker_that_hangs_holds_up_neither_steps_nor_the_end(tmp_path, warnings, monkeypatch):
    released = threading.Event()
    hung, good = Spy(waits=released), Spy()
    with monkeypatch.context() as little:
        little.setattr(trackers, "QUEUED", 4)
        little.setattr(trackers, "CLOSE_SECONDS", 0.01)
        written(tmp_path, hung=hung)
    (warning,) = warnings()
    assert "slower" in warning
    released.set()
    written(tmp_path, good=good)
    assert good.seen[-1] == ("close", "finish")


def test_a_package_that_is_missing_is_one_warning_that_names_the_remedy(tmp_path, warnings, monkeypatch):
    for package in ("wandb", "mlflow.environment_variables", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    args = parse(["--report_to", "wandb", "mlflow", "tensorboard"], {}).args
    writer = MetricsWriter(tmp_path)
    writer.trackers = Trackers(chosen(args, name="n", id="0" * 8, folder=tmp_path, step=0), {})
    writer.step({"step": 1, "loss": 1.0})
    writer.close()
    said = sorted(warnings())
    assert len(said) == 3
    remedies = {"mlflow": "mlflow", "tensorboard": "tracking", "wandb": "wandb"}
    for line, (name, extra) in zip(said, remedies.items(), strict=True):
        assert line.startswith(name)
        assert f"pip install '.[{extra}]'" in line


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("", []), ("--report_to none --tensorboard_dir b", []), ("--tensorboard_dir b", ["b"]),
        ("--report_to tensorboard", ["r/tensorboard"]), ("--report_to tensorboard --tensorboard_dir b c", ["b", "c"]),
        ("--report_to wandb mlflow", ["wandb", "mlflow"]),
    ],
)  # fmt: skip
def test_flags_choose_trackers(line, names, tmp_path):
    assert [*chosen(parse(line.split(), {}).args, name="n", id="i", folder="r", step=0)] == names


def train_with_secrets(command_line):
    os.environ.update(WANDB_MODE="offline", WANDB_PROJECT="mine", AWS_SECRET_ACCESS_KEY="planted-in-environment")
    return train(command_line)


@pytest.mark.slow
def test_attempts_of_a_run_are_one_curve_in_tensorboard_and_wandb_and_hold_no_secret(tmp_path):
    pytest.importorskip("wandb")
    board = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = {
        "report_to": None, "mlflow_tracking_uri": "http://me:planted-password@127.0.0.1:9/?key=planted-query",
        "checkpoint_freq": 2, "run_name": "mine", "num_kept_checkpoints": 9,
    }  # fmt: skip
    line = [*flags(tmp_path, **options), "--report_to", "wandb", "tensorboard"]
    harness.run(train_with_secrets, 2, [*line, "--max_steps=4"])
    back = f"--resume_from_checkpoint={tmp_path / 'checkpoints' / 'mine' / 'llama_v2-2steps'}"
    harness.run(train_with_secrets, 2, [*line, "--max_steps=6", back])

    losses = {record["step"]: record["loss"] for record in steps(tmp_path)}  # a later attempt's replaces an earlier's
    events = board.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    curve = [(each.step, each.value) for each in events.Scalars("train/loss")]
    assert curve == [(step, pytest.approx(loss)) for step, loss in losses.items()]
    for name in ("perplexity", "lr", "grad_norm", "memory_gib", "data_wait_sec", "tokens_per_sec"):
        assert len(events.Scalars(f"train/{name}")) == 6

    attempts = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len(attempts) == 2
    run = json.loads((tmp_path / "run" / "run.json").read_text())["run"]
    for content in (path.read_bytes() for path in attempts):
        assert all(text.encode() in content for text in (run["id"], "mine", "train/loss", "max_steps"))

    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"planted" not in path.read_bytes(), path
    for log in (tmp_path / "run" / "logs").iterdir():
        assert " W [trackers]" not in log.read_text()
