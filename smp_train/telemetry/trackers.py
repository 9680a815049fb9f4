"""Trackers of a run on rank 0: TensorBoard, Weights & Biases, MLflow.

Each has a thread and a queue of its own: a step never waits for a disk or a server. A tracker that fails is left out
with one warning, and training goes on; `metrics.jsonl` has all numbers. Imports no torch.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from smp_train.arguments import Arguments
from smp_train.errors import first_line, install, redacted
from smp_train.telemetry.logging_utils import get_logger
from smp_train.telemetry.metrics import is_number

EXTRAS = {"tensorboard": "tracking", "wandb": "wandb", "mlflow": "mlflow"}
"""Trackers, and the package's extra that brings each."""
PROJECT = "smp-train"
NOT_TRACKED = {"command", "sources", "pid", "samples"}
"""Fields of `run.json` that trackers do not get."""
MAX_TEXT = 500
"""Characters of a text; MLflow takes no longer parameters everywhere."""
BATCH = 100
"""Parameters, and tags, that a server of MLflow takes in one request."""
QUEUED = 10_000
"""Records kept for a slow tracker; those beyond are lost to it."""
CLOSE_SECONDS, FAILED_SECONDS = 30.0, 5.0
"""Longest wait at the end of a run for what is queued, and at the end of one that failed."""

log = get_logger()


class Tracker(Protocol):
    """Receives the numbers of one attempt. An exception in a method ends this tracker alone."""

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin, or continue the curves of the run's earlier attempts, with the flat resolved configuration."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take finite numbers after ``step`` updates, by names such as ``train/loss``."""

    def event(self, record: Mapping[str, Any]) -> None:
        """Take an event of `metrics.jsonl`, whose numbers `log` has had."""

    def close(self, ended: str) -> None:
        """End: ``ended`` is the run's last event, ``finish`` or ``stop``, or empty where it failed."""


class TensorBoard:
    """Event files in a folder; steps after the one that a resume begins at are purged."""

    def __init__(self, folder: str, step: int) -> None:
        self._folder, self._step = folder, step

    def start(self, config: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        from torch.utils.tensorboard import SummaryWriter

        # What its own thread fails at is raised by the next `log`, too: no traceback besides.
        hook = threading.excepthook
        threading.excepthook = lambda at: None if type(at.thread).__module__.startswith("tensorboard.") else hook(at)
        self._writer = SummaryWriter(self._folder, purge_step=self._step + 1)
        rows = "".join(f"| {name} | {value} |\n" for name, value in config.items())
        self._writer.add_text("configuration", f"| setting | value |\n|---|---|\n{rows}", self._step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def event(self, record: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        self._writer.add_text(f"event/{record['event']}", event_text(record), record["step"])

    def close(self, ended: str) -> None:
        """See `Tracker`."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases whose id is the run's own, so that every attempt continues it, offline too.

    It is sent neither the command line, the code, the environment, git's remote nor the console.
    """

    def __init__(self, project: str | None, name: str, id: str, folder: Path) -> None:
        self._project, self._name, self._id, self._folder = project, name, id, folder

    def start(self, config: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        import wandb

        # Silent: it would ask for a key on the terminal, and write beside the log.
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
        # Steps after a resume's come again, which W&B's own step, that only grows, would drop.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if not self._run.offline:
            log.info("Weights & Biases: %s", self._run.url)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        self._run.log({**metrics, "step": step})

    def event(self, record: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        self._run.log({f"event/{record['event']}": event_text(record), "step": record["step"]})

    def close(self, ended: str) -> None:
        """See `Tracker`."""
        self._run.finish(exit_code=0 if ended else 1)


class MLflow:
    """A run of MLflow, found again by a tag with the run's own id, so that every attempt continues it."""

    TAG = "smp_train.run"

    def __init__(self, uri: str | None, experiment: str | None, name: str, id: str) -> None:
        self._uri, self._experiment, self._name, self._id = uri, experiment, name, id

    def start(self, config: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        from mlflow.entities import Param, RunTag
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
        from mlflow.tracking import MlflowClient

        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns at every retry
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        # The client alone: mlflow's global run would add the command line and git's state.
        self._client = MlflowClient(tracking_uri=self._uri)
        name = self._experiment or MLFLOW_EXPERIMENT_NAME.get() or PROJECT
        experiment = self._client.get_experiment_by_name(name)
        at = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        found = self._client.search_runs([at], filter_string=f"tags.`{self.TAG}` = '{self._id}'", max_results=1)
        run = found[0] if found else self._client.create_run(at, run_name=self._name, tags={self.TAG: self._id})
        self._run, before = run.info.run_id, run.data.params
        self._client.update_run(self._run, status="RUNNING")
        given = {re.sub(r"[^\w\-. /]", "_", key): str(value)[:MAX_TEXT] for key, value in config.items()}
        new = [Param(key, value) for key, value in given.items() if key not in before]
        # A parameter is written once.
        changed = [RunTag(f"changed.{key}", value) for key, value in given.items() if before.get(key, value) != value]
        for at in range(0, max(len(new), len(changed)), BATCH):
            self._client.log_batch(self._run, params=new[at : at + BATCH], tags=changed[at : at + BATCH])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """See `Tracker`."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run, [Metric(name, value, now, step) for name, value in metrics.items()])

    def event(self, record: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        self._client.set_tag(self._run, f"last.{record['event']}", event_text(record))

    def close(self, ended: str) -> None:
        """See `Tracker`."""
        self._client.set_terminated(self._run, {"finish": "FINISHED", "stop": "KILLED"}.get(ended, "FAILED"))


class Feed:
    """Passes records to one tracker in a thread."""

    def __init__(self, name: str, tracker: Tracker, config: Mapping[str, Any]) -> None:
        self._name, self._tracker, self._config = name, tracker, config
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUED)
        self._warned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call of the tracker's; never waits."""
        if self._thread.is_alive():
            try:
                self._queue.put_nowait(call)
            except queue.Full:
                self._warn(f"is slower than the run; it loses what is beyond {QUEUED} records")

    def close(self, ended: str, until: float) -> None:
        """Let the tracker take what is queued, until a time of `time.monotonic`, and end it."""
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
        except BaseException as failure:  # of this thread alone
            self._warn(f"failed and gets no more records; training goes on ({first_line(failure)[:MAX_TEXT]})")

    def _warn(self, what: str) -> None:
        if not self._warned:
            log.warning("%s %s", self._name, what)
        self._warned = True


class Trackers:
    """All trackers of a run, for `MetricsWriter`."""

    def __init__(self, trackers: Mapping[str, tuple[str, Tracker]], config: Mapping[str, Any]) -> None:
        """Start trackers, each under a name of `EXTRAS`, by any key."""
        config = flat(json.loads(redacted(json.dumps(config, default=str))))
        self._feeds = [(tracker, Feed(name, tracker, config)) for name, tracker in trackers.values()]

    def step(self, record: Mapping[str, Any]) -> None:
        """Pass on a logged step."""
        self._log("train", record)

    def event(self, record: Mapping[str, Any]) -> None:
        """Pass on an event and its numbers."""
        self._log("validation" if record["event"] == "evaluate" else record["event"], record)
        for tracker, feed in self._feeds:
            feed.put(lambda tracker=tracker: tracker.event(record))  # type: ignore[misc]

    def close(self, ended: str) -> None:
        """End the trackers after what is queued."""
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
    """Return the trackers that the flags name: for a run of this name and id that begins after ``step`` updates."""
    wanted = ["tensorboard"] if args.report_to is None and args.tensorboard_dir else args.report_to or []
    if "all" in wanted:
        wanted = [each for each in EXTRAS if importlib.util.find_spec(each)]
    found: dict[str, tuple[str, Tracker]] = {}
    if "tensorboard" in wanted:
        for each in args.tensorboard_dir or ["{run_dir}/tensorboard"]:
            place = each.replace("{run_dir}", str(folder))
            found[place] = ("tensorboard", TensorBoard(place, step))
    if "wandb" in wanted:
        found["wandb"] = ("wandb", WeightsAndBiases(args.wandb_project, name, id, folder))
    if "mlflow" in wanted:
        found["mlflow"] = ("mlflow", MLflow(args.mlflow_tracking_uri, args.mlflow_experiment_name, name, id))
    return found


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings under names such as ``mesh.shard``."""
    return {name: value for key, each in record.items() for name, value in _leaves(f"{prefix}{key}", each)}


def event_text(record: Mapping[str, Any]) -> str:
    """Return an event's fields on one line, cut off at `MAX_TEXT`, without secrets of URLs."""
    rest = (f"{name} {value}" for name, value in record.items() if name not in ("event", "time"))
    return redacted(f"{record['event']}: {', '.join(rest)}")[:MAX_TEXT]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from flat(value, f"{name}.").items()
    else:
        yield name, value


