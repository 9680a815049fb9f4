"""MLflow against a server on this machine: one run of several attempts, and a server that goes. In .venv-mlflow."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from smp_train.telemetry import trackers
from smp_train.telemetry.logging_utils import get_logger
from smp_train.telemetry.metrics import MetricsWriter
from smp_train.telemetry.trackers import MLflow, Trackers

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from tests.harness import free_port

    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    uri = f"http://127.0.0.1:{port}"
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--default-artifact-root", str(folder / "artifacts"),
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        for _ in range(1800):
            try:
                urllib.request.urlopen(f"{uri}/health", timeout=5)
                break
            except OSError:
                assert process.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
        yield uri, process
    finally:
        end(process)


def end(process):
    """Kill the server and its workers."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(autouse=True)
def warnings(monkeypatch, caplog):
    monkeypatch.setattr(get_logger(), "propagate", True)
    caplog.set_level(logging.WARNING, logger="smp_train")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("smp_train")]


def attempt(folder, uri, steps, config, *, end="finish"):
    folder.mkdir(exist_ok=True)
    writer = MetricsWriter(folder)
    writer.trackers = Trackers({"mlflow": ("mlflow", MLflow(uri, "experiment", "mine", "0123abcd"))}, config)
    for step in steps:
        writer.step({"step": step, "loss": 4.0 / step, "perplexity": 2.0, "lr": 0.1, "mfu": None})
    writer.event("evaluate", step=steps[-1], loss=1.5)
    if end:
        writer.event(end, step=steps[-1])
    writer.close()


def test_attempts_are_one_run_with_settings_numbers_and_events(server, tmp_path, warnings, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(trackers, "FAILED_SECONDS", 300)
    uri, _ = server
    more = {f"flag_{number}": number for number in range(150)}
    config = {"lr": 0.1, "training_dir": "s3://key:planted@b/x?sig=planted", "mesh": {"shard": 2}, **more}
    attempt(tmp_path, uri, [1, 2, 3], config, end="")
    client = MlflowClient(uri)
    at = client.get_experiment_by_name("experiment").experiment_id
    (run,) = client.search_runs([at])
    assert run.info.status == "FAILED"
    attempt(tmp_path, uri, [3, 4], {**config, "lr": 0.2})
    (run,) = client.search_runs([at])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "mine")
    assert run.data.params == {"lr": "0.1", "training_dir": "s3://...@b/x?...", "mesh.shard": "2"} | {
        name: str(number) for name, number in more.items()
    }
    assert run.data.tags["changed.lr"] == "0.2"
    assert "step 4" in run.data.tags["last.evaluate"]
    assert "planted" not in str(run.to_dictionary())
    curve = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss")]
    assert sorted(curve) == [(1, 4.0), (2, 2.0), (3, 4 / 3), (3, 4 / 3), (4, 1.0)]
    assert [each.value for each in client.get_metric_history(run.info.run_id, "validation/loss")] == [1.5, 1.5]
    assert warnings() == []


def test_a_server_that_goes_is_one_warning(server, tmp_path, warnings, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    uri, process = server
    writer = MetricsWriter(tmp_path)
    writer.trackers = Trackers({"mlflow": ("mlflow", MLflow(uri, "other", "mine", "4567abcd"))}, {})
    writer.step({"step": 1, "loss": 4.0})
    while writer.trackers._feeds[0][1]._queue.qsize():
        time.sleep(0.05)
    end(process)
    for step in range(2, 50):
        writer.step({"step": step, "loss": 4.0})
    writer.event("finish", step=50)
    writer.close()
    (warning,) = warnings()
    assert warning.startswith("mlflow failed")
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 50
