"""Trackers of a run on rank 0: TensorBoard, Weights & Biases, MLflow.

Each tracker has its own thread and queue, so a step never waits for a disk or a server. If a tracker fails, one warning
is logged and training goes on without it; `metrics.jsonl` has all numbers. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from smp_train.arguments import Arguments
from smp_train.errors import first_line, install, redacted
from smp_train.telemetry.logging_utils import get_logger
from smp_train.telemetry.metrics import is_number

EXTRAS = {"tensorboard": "tracking", "wandb": "wandb", "mlflow": "mlflow"}
"""Trackers that need a package, and the extra of this package that installs it."""
PROJECT = "smp-train"
NOT_TRACKED = {"command", "sources", "pid", "samples"}
"""Fields of `run.json` that are not sent to trackers."""
MAX_TEXT = 500
"""Longest text in characters: the limit of MLflow's parameters on some servers."""
BATCH = 100
"""One request to an MLflow server has at most this many parameters and this many tags."""
QUEUED = 10_000
"""The queue of a slow tracker holds at most this many records; further records are dropped."""
CLOSE_SECONDS, FAILED_SECONDS = 30.0, 5.0
"""Longest wait for queued records at the end of a run, and at the end of a failed run."""

log = get_logger()


class Tracker(Protocol):
    """Receives the numbers of one attempt. An exception in a method stops this tracker, not the run."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin the run, or continue an earlier attempt's curves; ``config`` is flat."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record finite numbers after ``step`` updates, by names such as ``train/loss``."""

    def event(self, record: Mapping[str, Any]) -> None:
        """Record an event of `metrics.jsonl`; `log` has recorded its numbers. Its URLs may hold secrets."""

    def close(self, ended: str) -> None:
        """End the run; ``ended`` is its last event, ``finish`` or ``stop``, or empty if it failed."""


class TensorBoard(Tracker):
    """Event files in a folder. A resume purges the steps that it will train again."""

    def __init__(self, folder: str, step: int) -> None:
        self._folder, self._step = folder, step

    def start(self, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=self._step + 1)
        rows = "".join(f"| {name} | {value} |\n" for name, value in config.items())
        self._writer.add_text("configuration", f"| setting | value |\n|---|---|\n{rows}", self._step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def event(self, record: Mapping[str, Any]) -> None:
        self._writer.add_text(f"event/{record['event']}", event_text(record), record["step"])

    def close(self, ended: str) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases with this run's id, so that every attempt continues it, even offline.

    The command line, the code, the environment, git's remote and the console's output are not sent.
    """

    def __init__(self, project: str | None, name: str, id: str, folder: Path) -> None:
        self._project, self._name, self._id, self._folder = project, name, id, folder

    def start(self, config: Mapping[str, Any]) -> None:
        import wandb

        # Silent, as it would otherwise ask for a key on the terminal and print between log lines.
        private: dict[str, Any] = {
            "silent": True, "console": "off", "disable_git": True, "disable_code": True, "save_code": False,
            "disable_job_creation": True, "x_disable_meta": True, "x_save_requirements": False,
            "finish_timeout": CLOSE_SECONDS,
        }  # fmt: skip
        known = wandb.Settings.model_fields
        settings = wandb.Settings(**{name: value for name, value in private.items() if name in known})
        project = self._project or wandb.setup(settings=settings).settings.project or PROJECT
        self._run = wandb.init(
            project=project, name=self._name, id=self._id, resume="allow", dir=self._folder, settings=settings
        )
        self._run.config.update(dict(config), allow_val_change=True)
        # After a resume steps repeat. W&B drops records whose step does not grow, so the step is logged as a metric.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            log.info("Weights & Biases: %s", self._run.url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "step": step})

    def event(self, record: Mapping[str, Any]) -> None:
        self._run.log({f"event/{record['event']}": event_text(record), "step": record["step"]})

    def close(self, ended: str) -> None:
        self._run.finish(exit_code=0 if ended else 1)


class MLflow(Tracker):
    """A run of MLflow, found again by a tag with this run's id, so that every attempt continues it."""

    TAG = "smp_train.run"

    def __init__(self, uri: str | None, experiment: str | None, name: str, id: str) -> None:
        self._uri, self._experiment, self._name, self._id = uri, experiment, name, id

    def start(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
        from mlflow.tracking import MlflowClient

        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns at every retry
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        # mlflow's global run would also upload the command line and the state of the git checkout; its client does not.
        self._client = MlflowClient(tracking_uri=self._uri)
        name = self._experiment or MLFLOW_EXPERIMENT_NAME.get() or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        runs = self._client.search_runs([number], filter_string=f"tags.`{self.TAG}` = '{self._id}'", max_results=1)
        run = runs[0] if runs else self._client.create_run(number, run_name=self._name, tags={self.TAG: self._id})
        self._run, logged = run.info.run_id, run.data.params
        self._client.update_run(self._run, status="RUNNING")
        settings = {re.sub(r"[^\w\-. /]", "_", key): str(value)[:MAX_TEXT] for key, value in config.items()}
        new = [Param(key, value) for key, value in settings.items() if key not in logged]
        # A parameter of MLflow cannot be changed, so a changed setting becomes a tag.
        changed = [RunTag(f"changed.{key}", text) for key, text in settings.items() if logged.get(key, text) != text]
        for first in range(0, max(len(new), len(changed)), BATCH):
            last = first + BATCH
            self._client.log_batch(self._run, params=new[first:last], tags=changed[first:last])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in metrics.items()])

    def event(self, record: Mapping[str, Any]) -> None:
        self._client.set_tag(self._run, f"last.{record['event']}", event_text(record))

    def close(self, ended: str) -> None:
        self._client.set_terminated(self._run, {"finish": "FINISHED", "stop": "KILLED"}.get(ended, "FAILED"))


class Feed:
    """A thread with a queue that passes records to one tracker."""

    def __init__(self, name: str, tracker: Tracker, config: Mapping[str, Any]) -> None:
        self._name, self._tracker, self._config = name, tracker, config
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUED)
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call of a method of the tracker; never waits."""
        if self._thread.is_alive():
            try:
                self._queue.put_nowait(call)
            except queue.Full:
                self._warn(f"is slower than the run; records beyond {QUEUED} are dropped")

    def close(self, ended: str, until: float) -> None:
        """End the tracker once its queue is empty, or at the time ``until`` of `time.monotonic`."""
        self.put(lambda: self._tracker.close(ended))
        with suppress(queue.Full):  # the thread is a daemon: it ends with the process
            self._queue.put_nowait(None)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self._warn("has not taken all records; the run ends without it")

    def _run(self) -> None:
        try:
            self._tracker.start(self._config)
            while (call := self._queue.get()) is not None:
                call()
        except ImportError as missing:
            self._warn(f"is not installed ({first_line(missing)}): {install(EXTRAS[self._name])}; training goes on")
        except BaseException as failure:  # a thread's exception must not end the run
            self._warn(f"failed and gets no more records; training goes on ({first_line(failure)[:MAX_TEXT]})")

    def _warn(self, message: str) -> None:
        if not self._warned:
            log.warning("%s %s", self._name, message)
        self._warned = True


class Trackers:
    """All trackers of a run, for `MetricsWriter`."""

    def __init__(self, trackers: Mapping[str, tuple[str, Tracker]], config: Mapping[str, Any]) -> None:
        """Start trackers; each value is a tracker's name (as in `EXTRAS` if it needs a package) and the tracker."""
        config = flat(json.loads(redacted(json.dumps(config, default=str))))
        self._feeds = [(tracker, Feed(name, tracker, config)) for name, tracker in trackers.values()]

    def step(self, record: Mapping[str, Any]) -> None:
        """Pass a logged step to all trackers."""
        self._log("train", record)

    def event(self, record: Mapping[str, Any]) -> None:
        """Pass an event and its numbers to all trackers."""
        self._log("validation" if record["event"] == "evaluate" else record["event"], record)
        for tracker, feed in self._feeds:
            feed.put(lambda tracker=tracker: tracker.event(record))  # type: ignore[misc]

    def close(self, ended: str) -> None:
        """End all trackers, once they have taken their queued records."""
        until = time.monotonic() + (CLOSE_SECONDS if ended else FAILED_SECONDS)
        for _, feed in self._feeds:
            feed.close(ended, until)

    def _log(self, group: str, record: Mapping[str, Any]) -> None:
        numbers = {f"{group}/{name}": value for name, value in flat(record).items() if is_number(value)}
        for name in ("step", "time"):
            numbers.pop(f"{group}/{name}", None)
        for tracker, feed in self._feeds if numbers else ():
            feed.put(lambda tracker=tracker: tracker.log(numbers, record["step"]))  # type: ignore[misc]


def chosen(args: Arguments, *, name: str, id: str, folder: Path, step: int) -> dict[str, tuple[str, Tracker]]:
    """Return the trackers that the flags name, for a run of this name and id that begins after ``step`` updates."""
    names = ["tensorboard"] if args.report_to is None and args.tensorboard_dir else args.report_to or []
    if "all" in names:
        names = [name for name in EXTRAS if importlib.util.find_spec(name)]
    trackers: dict[str, tuple[str, Tracker]] = {}
    if "tensorboard" in names:
        for template in args.tensorboard_dir or ["{run_dir}/tensorboard"]:
            location = template.replace("{run_dir}", str(folder))
            trackers[location] = ("tensorboard", TensorBoard(location, step))
    if "wandb" in names:
        trackers["wandb"] = ("wandb", WeightsAndBiases(args.wandb_project, name, id, folder))
    if "mlflow" in names:
        trackers["mlflow"] = ("mlflow", MLflow(args.mlflow_tracking_uri, args.mlflow_experiment_name, name, id))
    return trackers


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings under names such as ``mesh.shard``."""
    leaves: dict[str, Any] = {}
    for key, item in record.items():
        leaves |= flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return leaves


def event_text(record: Mapping[str, Any]) -> str:
    """Return an event's fields as one line of at most `MAX_TEXT` characters, without the secrets in URLs."""
    fields = (f"{name} {value}" for name, value in record.items() if name not in ("event", "time"))
    return redacted(f"{record['event']}: {', '.join(fields)}")[:MAX_TEXT]
