"""The data of a run's report, read from the run folder while the run goes on, after it ended, or after a kill."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from smp_train.errors import ConfigError
from smp_train.storage.json_lines import read_lines
from smp_train.telemetry.goodput import goodput, in_words
from smp_train.telemetry.metrics import FILE_NAME, NAMED_FROM, history, is_number, read_metrics
from smp_train.telemetry.run_folder import RunFolder

POINTS = 1000
"""About this many steps of a run are drawn; in a longer run, each interval's extremes of the fields `EXTREMES`."""
EXTREMES = ("loss", "grad_norm", "step_sec")
HUNG_SECONDS = 600.0
"""A run counts as hung after this many seconds without a record, or 3 times its longest pause if that is longer."""
ENDLESS = 10**9
"""``total_steps`` of a run that ends with its data."""
PALETTES = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#22303c", "#c8c8c8", "#f0e442"),
    "dark": ("#3b8fe0", "#e8743b", "#2bb58c", "#d68fb8", "#e6a817", "#8fd3f4", "#f2f5f7", "#66727e", "#f5ec6e"),
}
"""Colours of runs and of parts of a step in each theme: Okabe and Ito's, which colour-blind readers distinguish."""
NOT_SHOWN = ("event", "step", "time", "nonfinite", "perplexity")


class RunData:
    """A run's records, attempts, settings and state; superseded records of earlier attempts are left out."""

    def __init__(self, folder: str | Path) -> None:
        """Read a run folder. Raises `ConfigError` if it has neither `metrics.jsonl` nor `run.json`."""
        self.folder = RunFolder(folder)
        self.run = self.folder.read_run()
        is_starting = self.run and not (self.folder.path / FILE_NAME).exists()
        self.all = [] if is_starting else read_metrics(self.folder.path)
        records = history(self.all)
        self.steps = [record for record in records if "event" not in record and "step" in record]
        self.events = [record for record in records if "event" in record and "step" in record]
        self.name = str((self.run.get("config") or {}).get("run_name") or self.folder.path.resolve().name)

    @cached_property
    def state(self) -> str:
        """One of ``running``, ``finished``, ``stopped``, ``died`` (its process is gone) and ``hung`` (no record)."""
        for marker, state in ((self.folder.done, "finished"), (self.folder.stopped, "stopped")):
            with suppress(OSError):
                # A marker older than run.json is from an earlier attempt; a start removes it once it trains.
                if not self.run or marker.stat().st_mtime >= self.folder.run_json.stat().st_mtime:
                    return state
        if not self.run:
            return "died"
        if self.run.get("host") == socket.gethostname():
            try:
                os.kill(int(self.run["pid"]), 0)
            except PermissionError:  # the process belongs to another user
                pass
            except (ProcessLookupError, KeyError, ValueError):
                return "died"
        pauses = [end - start for start, end in pairwise(self.times)]
        return "hung" if self.silence() > max(HUNG_SECONDS, 3 * max(pauses, default=0)) else "running"

    @cached_property
    def times(self) -> list[float]:
        """Start of the last attempt, and the times of its records."""
        times: list[float] = []
        for record in self.all:
            times = [] if record.get("event") in ("start", "resume") else times
            times += [record["time"]] if is_number(record.get("time")) else []
        began = self.folder.run_json.stat().st_mtime if self.run else 0
        return times if times and times[-1] >= began else [began]

    def silence(self) -> float:
        """Return the seconds since the last record."""
        return max(0.0, time.time() - self.times[-1])

    def starts(self) -> list[dict[str, Any]]:
        """Return the record of each start in `attempts.jsonl`."""
        with suppress(OSError):
            return read_lines(self.folder.attempts)
        return []

    def attempts(self) -> list[dict[str, Any]]:
        """Return the attempts that trained: their times, first and last steps, ends and events."""
        attempts: list[dict[str, Any]] = []
        for record in self.all:
            if "step" not in record or "time" not in record:
                continue
            if record.get("event") in ("start", "resume") or not attempts:
                start = {"began": record["time"], "first": record["step"], "how": "killed or failed", "events": []}
                attempts.append(start)
            attempts[-1].update(ended=record["time"], last=record["step"])
            if "event" in record:
                attempts[-1]["events"].append([record["event"], record["time"], record["step"]])
            if record.get("event") in ("finish", "stop"):
                attempts[-1]["how"] = {"finish": "finished", "stop": "stopped"}[record["event"]]
        if attempts and self.state in ("running", "hung"):
            attempts[-1]["how"] = self.state
        return attempts

    def columns(self) -> dict[str, list[Any]]:
        """Return the numbers of about `POINTS` steps by field; shares of a step are in per cent."""
        drawn = thinned(self.steps)
        fields = dict.fromkeys(key for record in drawn for key in record if key not in NOT_SHOWN)
        columns = {key: [record.get(key) for record in drawn] for key in fields}
        columns = {key: values for key, values in columns.items() if any(map(is_number, values))}
        losses = [record["loss"] for record in self.steps if record.get("loss") is not None]
        window = max(1, len(losses) // 40) | 1
        means = iter(smooth(losses, window))
        mean_at = {record["step"]: next(means) for record in self.steps if record.get("loss") is not None}
        shares = [_shares(record) for record in drawn]
        for name in dict.fromkeys(name for parts in shares for name in parts):
            columns[f"share {name}"] = [parts.get(name) for parts in shares]
        return {
            "step": [record["step"] for record in drawn],
            "time": [record.get("time") for record in drawn],
            "loss_mean": [mean_at.get(record["step"]) for record in drawn],
            **columns,
        }

    def headline(self) -> dict[str, str]:
        """Return the figures at the top of the page by name: state, progress, times and losses."""
        last, state = self.steps[-1] if self.steps else {}, self.state
        step, total = last.get("step", 0), self.run.get("total_steps") or ENDLESS
        lasted = sum(attempt["ended"] - attempt["began"] for attempt in self.attempts())
        figures = {"state": state, "step": f"{step:,}"}
        if total < ENDLESS:
            figures["step"] += f" of {total:,}"
        figures["elapsed"] = duration(lasted + (self.silence() if state in ("running", "hung") else 0))
        if (left := self.left()) is not None:
            figures["time left"] = duration(left)
            figures["ends about"] = day_and_time(time.time() + left)
        elif state not in ("running", "hung") and self.all and (ended := self.times[-1]):
            figures["last record" if state == "died" else "ended"] = day_and_time(ended)
        if losses := self.losses():
            figures["loss"] = three(recent(losses))
        if validation := self.validation():
            best_step, lowest = min(validation, key=lambda step_and_loss: step_and_loss[1])
            figures["validation loss"] = three(validation[-1][1])
            if lowest < validation[-1][1]:
                figures["validation loss"] += f", best {three(lowest)} at step {best_step:,}"
        return figures

    def left(self) -> float | None:
        """Return the seconds to the last step at this attempt's pace, with its saves and validations."""
        began, total = self.times[0], self.run.get("total_steps") or ENDLESS
        steps = [record for record in self.steps if is_number(record.get("time")) and record["time"] >= began]
        if self.state != "running" or total >= ENDLESS or len(steps) < 2:
            return None
        pace = (steps[-1]["time"] - steps[0]["time"]) / (steps[-1]["step"] - steps[0]["step"])
        return max(0.0, (total - steps[-1]["step"]) * pace - self.silence())

    def losses(self) -> list[float]:
        """Return the finite losses of the steps."""
        return [record["loss"] for record in self.steps if is_number(record.get("loss"))]

    def validation(self) -> list[tuple[int, float]]:
        """Return the step and loss of each validation."""
        return [(event["step"], event["loss"]) for event in self._events("evaluate") if is_number(event.get("loss"))]

    def _events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def health(self) -> dict[str, Any]:
        """Return whether the run is well, and sentences with the reasons."""
        losses, spikes, diverged = self.losses(), self._events("spike"), self._events("diverged")
        state, validation, silence = self.state, self.validation(), duration(self.silence())
        well, sentences = True, []
        if state in ("died", "hung"):
            well = False
            sentences.append(f"No record for {silence}{'' if state == 'hung' else ', and its process is gone'}.")
            sentences.append(f"See {self.folder.logs}.")
        if losses:
            well = well and (len(losses) < 20 or recent(losses) <= max(losses[:5]))
            sentences.append(f"The loss went from {three(losses[0])} to {three(recent(losses))}.")
        for event in diverged[-1:]:
            well = False
            sentences.append(f"It diverged at step {event['step']:,}; first suspect: --lr {event['lr']:g}.")
        if len(validation) > 1:
            last, lowest = validation[-1][1], min(loss for _, loss in validation)
            rises = last > 1.02 * lowest
            well = well and not rises
            trend = "rises: it may overfit" if rises else f"is {'near' if last > lowest else 'at'} its lowest"
            sentences.append(f"The validation loss {trend}.")
        if spikes:
            well = well and spikes[-1].get("action") != "stop"
            sentences.append(f"{plural(len(spikes), 'spike')}, the last at step {spikes[-1]['step']:,}.")
        elif not diverged:
            sentences.append("No spikes in loss or gradient norm.")
        if self.steps and (rows := self.steps[-1].get("truncated_rows")):
            targets = self.steps[-1]["truncated_targets"]
            sentences.append(f"{plural(rows, 'row')} longer than the context lost {targets:,} tokens to learn.")
        if (restarts := len(self.attempts()) - 1) > 0:
            sentences.append(f"{plural(restarts, 'restart')}.")
        if recoveries := self._events("recovery"):
            times = f"{len(recoveries)} time{'s' * (len(recoveries) != 1)}"
            sentences.append(f"Recovered in place {times}, the last at step {recoveries[-1]['step']:,}.")
        return {"well": well, "sentences": " ".join(sentences)}

    def facts(self) -> dict[str, str]:
        """Return the speed, memory, model and data by name."""
        config, last = self.run.get("config") or {}, self.steps[-1] if self.steps else {}
        facts: dict[str, str] = {}
        for name, key, scale, unit in (
            ("tokens/s", "tokens_per_sec", 1, ""), ("step time", "step_sec", 1, " s"), ("MFU", "mfu", 100, " %"),
        ):  # fmt: skip
            values = [record[key] for record in self.steps if record.get(key) is not None]
            if values:
                facts[name] = f"{three(scale * median(values))}{unit}"
        for name, key, unit in (("memory", "memory_gib", " GiB"), ("tokens", "tokens", "")):
            if last.get(key) is not None:
                facts[name] = three(last[key]) + unit
        columns = [shares for record in self.steps if (shares := _shares(record))]
        names = dict.fromkeys(name for shares in columns for name in shares)
        parts = {name: median(shares.get(name, 0) for shares in columns) for name in names}
        in_collectives = [share for record in self.steps if (share := record.get("communication_share")) is not None]
        if in_collectives:  # it overlaps the other parts of a step
            parts["communication (in forward and backward)"] = 100 * median(in_collectives)
        if len(parts) > 1:
            shown = sorted((name for name in parts if parts[name] >= 1), key=lambda name: -parts[name])
            facts["parts of a step"] = ", ".join(f"{name} {parts[name]:.0f} %" for name in shown)
        late = [record for record in self.steps if (record.get("slowest_share") or 0) >= NAMED_FROM]
        if late:
            slowest = Counter((each["slowest_rank"], each["slowest_host"], each["slowest_phase"]) for each in late)
            ((rank, host, phase), count) = slowest.most_common(1)[0]
            seconds = median(record["slowest_sec"] for record in late if record["slowest_rank"] == rank)
            facts["waited for"] = f"rank {rank} on {host}, in {phase}: {three(seconds)} s a step"
            facts["waited for"] += f", in {count} of {len(self.steps)} records"
        if measured := goodput(self.all):
            facts["goodput"] = in_words(measured)
        facts["model"] = str(self.run.get("model") or config.get("model_type") or "")
        if self.run.get("parameters"):
            facts["parameters"] = three(self.run["parameters"])
        data = config.get("training_dir") or config.get("dataset") or []
        sources = [data] if isinstance(data, str) else map(str, data)
        facts["data"] = "synthetic tokens" if config.get("use_synthetic_data") else ", ".join(sources)
        mesh = self.run.get("mesh") or {}
        facts["ranks"] = str(mesh.get("world_size", ""))
        facts["host"] = str(self.run.get("host", ""))
        return {name: value for name, value in facts.items() if value}

    def to_json(self) -> dict[str, Any]:
        """Return the data of the page."""
        starts = self.starts()
        return {
            "name": self.name, "headline": self.headline(), "health": self.health(), "facts": self.facts(),
            "columns": self.columns(), "attempts": self.attempts(), "events": self.events[-2000:],
            "config": _settings(self.run),
            "given": [name for name, source in (self.run.get("sources") or {}).items() if source != "default"],
            "starts": [
                {"host": start.get("host"), "started": start.get("started"), "changes": changes(previous, start)}
                for previous, start in zip([{}, *starts], starts, strict=False)
            ],
        }  # fmt: skip


def recent(losses: Sequence[float]) -> float:
    """Return the mean of the last five losses, since a single batch may be far off."""
    return sum(losses[-5:]) / len(losses[-5:])


def three(value: float) -> str:
    """Return a number with three significant digits, and a letter for thousands and more."""
    value = float(f"{value:.3g}")
    for letter, unit, least in (("T", 1e12, 1e12), ("B", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(value) >= least:
            return f"{value / unit:g}{letter}"
    return f"{value:#.3g}" if 0.1 <= abs(value) < 100 else f"{value:g}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}{'s' * (count != 1)}"


def day_and_time(seconds: float) -> str:
    """Return a time in UTC, with the day unless it is today."""
    then, today = time.gmtime(seconds), time.gmtime(time.time())
    return time.strftime("%H:%M UTC" if then[:3] == today[:3] else "%b %d, %H:%M UTC", then)


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    whole = round(seconds)
    for large, small, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size} {large}" + (f" {whole % size // part} {small}" if whole % size // part else "")
    return f"{whole} s"


def changes(previous: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings that differ between two starts as [old, new]; empty for a first start."""
    old, new = _settings(previous), _settings(current)
    return {key: [old.get(key), new[key]] for key in new if previous and old.get(key) != new[key]}


def thinned(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return about `POINTS` of the records, in order: each interval's last record and its extremes."""
    size = -(-len(steps) // (POINTS // 4))
    if len(steps) <= POINTS:
        return list(steps)
    drawn: set[int] = set()
    for first in range(0, len(steps), size):
        part = range(first, min(first + size, len(steps)))
        drawn.add(part[-1])
        for key in EXTREMES:
            having = [i for i in part if steps[i].get(key) is not None]
            if having:
                drawn |= {min(having, key=lambda i: steps[i][key]), max(having, key=lambda i: steps[i][key])}
    return [steps[i] for i in sorted(drawn)]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving mean over ``window`` values (odd); near both ends, over fewer values."""
    sums, half, count = [0.0, *accumulate(values)], window // 2, len(values)
    ends = ((max(0, i - half), min(count, i + half + 1)) for i in range(count))
    return [(sums[last] - sums[first]) / (last - first) for first, last in ends]


def read_runs(folders: Sequence[str]) -> list[RunData]:
    """Return the runs; runs of equal names are named by their folders. Raises `ConfigError`."""
    runs = [RunData(folder) for folder in folders]
    if len({run.folder.path.resolve() for run in runs}) < len(runs):
        raise ConfigError("smp-train report: one run folder is named twice; name each once")
    names = [run.name for run in runs]
    for run in runs:
        run.name = str(run.folder.path) if names.count(run.name) > 1 else run.name
    return runs


def _shares(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a step's time in per cent: ``time_shares``, or without it the wait for data."""
    if isinstance(record.get("time_shares"), Mapping):
        shares = {str(name).replace("_", " "): share for name, share in record["time_shares"].items()}
        return {name: 100 * share for name, share in shares.items() if is_number(share)}
    seconds, waited = record.get("step_sec"), record.get("data_wait_sec")
    return {"data": 100 * waited / seconds} if seconds and waited is not None else {}


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    facts = {f"mesh.{name}": size for name, size in (run.get("mesh") or {}).items()}
    facts |= {f"version.{name}": version for name, version in (run.get("versions") or {}).items()}
    return {**(run.get("config") or {}), **facts}
