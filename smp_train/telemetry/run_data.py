"""What a report shows of a run, read from its folder while it runs, after it ended, or after it was killed."""

from __future__ import annotations

import json
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
from smp_train.telemetry.metrics import FILE_NAME, NAMED_FROM, history, is_number, read_metrics
from smp_train.telemetry.run_folder import RunFolder

POINTS = 1000
"""About as many steps of a run are drawn: of more, those with the extremes of `EXTREMES` in each interval."""
EXTREMES = ("loss", "grad_norm", "step_sec")
HUNG_SECONDS = 600.0
"""Seconds without a record after which a run is called hung, unless it has paused for a third as long before."""
ENDLESS = 10**9
"""Total steps of a run that ends with its data."""
PALETTES = {
    "light": ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#22303c", "#c8c8c8", "#f0e442"),
    "dark": ("#3b8fe0", "#e8743b", "#2bb58c", "#d68fb8", "#e6a817", "#8fd3f4", "#f2f5f7", "#66727e", "#f5ec6e"),
}
"""Colours of runs and of parts of a step by theme: Okabe and Ito's for colour-blind readers, and a grey."""
NOT_SHOWN = ("event", "step", "time", "nonfinite", "perplexity")


class RunData:
    """The records of a run that count, its attempts, settings and state."""

    def __init__(self, folder: str | Path) -> None:
        """Read a run folder. Raises `ConfigError` where there is neither `metrics.jsonl` nor `run.json`."""
        self.folder = RunFolder(folder)
        self.run = self.folder.read_run()
        there = self.run and not (self.folder.path / FILE_NAME).exists()  # it is being set up
        self.all = [] if there else read_metrics(self.folder.path)
        records = history(self.all)
        self.steps = [record for record in records if "event" not in record and "step" in record]
        self.events = [record for record in records if "event" in record and "step" in record]
        self.name = str((self.run.get("config") or {}).get("run_name") or self.folder.path.resolve().name)

    @cached_property
    def state(self) -> str:
        """One of ``running``, ``finished``, ``stopped``, ``died`` (its process is gone) and ``hung`` (no record)."""
        for marker, state in ((self.folder.done, "finished"), (self.folder.stopped, "stopped")):
            with suppress(OSError):
                # An older one is of an earlier attempt: a start removes it once it trains.
                if not self.run or marker.stat().st_mtime >= self.folder.run_json.stat().st_mtime:
                    return state
        if not self.run:
            return "died"
        if self.run.get("host") == socket.gethostname():
            try:
                os.kill(int(self.run["pid"]), 0)
            except PermissionError:  # it is another user's
                pass
            except (ProcessLookupError, KeyError, ValueError):
                return "died"
        pauses = [after - before for before, after in pairwise(self.times)]
        return "hung" if self.silence() > max(HUNG_SECONDS, 3 * max(pauses, default=0)) else "running"

    @cached_property
    def times(self) -> list[float]:
        """When the last attempt began, and the time of each of its records."""
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
        """Return what `attempts.jsonl` says of each start."""
        lines: list[Any] = []
        with suppress(OSError):
            for line in self.folder.attempts.read_bytes().splitlines():
                with suppress(ValueError):
                    lines.append(json.loads(line))
        return [line for line in lines if isinstance(line, dict)]

    def attempts(self) -> list[dict[str, Any]]:
        """Return the attempts that trained: when, from which step to which, how each ended, and its events."""
        found: list[dict[str, Any]] = []
        for record in self.all:
            if "step" not in record or "time" not in record:
                continue
            if record.get("event") in ("start", "resume") or not found:
                began = {"began": record["time"], "first": record["step"], "how": "killed or failed", "events": []}
                found.append(began)
            found[-1].update(ended=record["time"], last=record["step"])
            if "event" in record:
                found[-1]["events"].append([record["event"], record["time"], record["step"]])
            if record.get("event") in ("finish", "stop"):
                found[-1]["how"] = {"finish": "finished", "stop": "stopped"}[record["event"]]
        if found and self.state in ("running", "hung"):
            found[-1]["how"] = self.state
        return found

    def columns(self) -> dict[str, list[Any]]:
        """Return the numbers of the steps by field, thinned to about `POINTS`; shares of a step in per cent."""
        kept = thinned(self.steps)
        fields = dict.fromkeys(key for record in kept for key in record if key not in NOT_SHOWN)
        columns = {key: [record.get(key) for record in kept] for key in fields}
        columns = {key: values for key, values in columns.items() if any(map(is_number, values))}
        losses = [record["loss"] for record in self.steps if record.get("loss") is not None]
        window = max(1, len(losses) // 40) | 1
        means = iter(smooth(losses, window))
        mean_at = {record["step"]: next(means) for record in self.steps if record.get("loss") is not None}
        shares: list[dict[str, float]] = [_shares(record) for record in kept]
        for name in dict.fromkeys(name for each in shares for name in each):
            columns[f"share {name}"] = [each.get(name) for each in shares]
        return {
            "step": [record["step"] for record in kept],
            "time": [record.get("time") for record in kept],
            "loss_mean": [mean_at.get(record["step"]) for record in kept],
            **columns,
        }

    def headline(self) -> dict[str, str]:
        """Return what a reader wants to know first, by name: state, progress, time and losses."""
        last, state = self.steps[-1] if self.steps else {}, self.state
        step, total = last.get("step", 0), self.run.get("total_steps") or ENDLESS
        lasted = sum(each["ended"] - each["began"] for each in self.attempts())
        found = {"state": state, "step": f"{step:,}"}
        if total < ENDLESS:
            found["step"] += f" of {total:,}"
        found["elapsed"] = duration(lasted + (self.silence() if state in ("running", "hung") else 0))
        if (left := self.left()) is not None:
            found["time left"] = duration(left)
            found["ends about"] = day_and_time(time.time() + left)
        elif state not in ("running", "hung") and self.all and (ended := self.times[-1]):
            found["last record" if state == "died" else "ended"] = day_and_time(ended)
        if losses := self.losses():
            found["loss"] = three(recent(losses))
        if validation := self.validation():
            at, lowest = min(validation, key=lambda each: each[1])
            found["validation loss"] = three(validation[-1][1])
            if lowest < validation[-1][1]:
                found["validation loss"] += f", best {three(lowest)} at step {at:,}"
        return found

    def left(self) -> float | None:
        """Return the seconds to the last step at the pace of this attempt, saves and validations included."""
        began, total = self.times[0], self.run.get("total_steps") or ENDLESS
        steps = [each for each in self.steps if is_number(each.get("time")) and each["time"] >= began]
        if self.state != "running" or total >= ENDLESS or len(steps) < 2:
            return None
        pace = (steps[-1]["time"] - steps[0]["time"]) / (steps[-1]["step"] - steps[0]["step"])
        return max(0.0, (total - steps[-1]["step"]) * pace - self.silence())

    def losses(self) -> list[float]:
        """Return the finite losses of the steps."""
        return [each["loss"] for each in self.steps if is_number(each.get("loss"))]

    def validation(self) -> list[tuple[int, float]]:
        """Return step and loss of each validation."""
        evaluations = [each for each in self.events if each["event"] == "evaluate"]
        return [(each["step"], each["loss"]) for each in evaluations if is_number(each.get("loss"))]

    def health(self) -> dict[str, Any]:
        """Return whether the run is well, and the sentences that say why."""
        losses = self.losses()
        spikes, diverged = ([each for each in self.events if each["event"] == name] for name in ("spike", "diverged"))
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
            sentences.append("No spikes.")
        if (restarts := len(self.attempts()) - 1) > 0:
            sentences.append(f"{plural(restarts, 'restart')}.")
        return {"well": well, "sentences": " ".join(sentences)}

    def facts(self) -> dict[str, str]:
        """Return speed, memory and model by name."""
        config, last = self.run.get("config") or {}, self.steps[-1] if self.steps else {}
        found: dict[str, str] = {}
        for name, key, scale, unit in (
            ("tokens/s", "tokens_per_sec", 1, ""), ("step time", "step_sec", 1, " s"), ("MFU", "mfu", 100, " %"),
        ):  # fmt: skip
            values = [record[key] for record in self.steps if record.get(key) is not None]
            if values:
                found[name] = f"{three(scale * median(values))}{unit}"
        for name, key, unit in (("memory", "memory_gib", " GiB"), ("tokens", "tokens", "")):
            if last.get(key) is not None:
                found[name] = three(last[key]) + unit
        columns = [shares for record in self.steps if (shares := _shares(record))]
        names = dict.fromkeys(name for each in columns for name in each)
        parts = {name: median(each.get(name, 0) for each in columns) for name in names}
        talk = [each["communication_share"] for each in self.steps if each.get("communication_share") is not None]
        if talk:  # beside or in the parts
            parts["communication (in forward and backward)"] = 100 * median(talk)
        if len(parts) > 1:
            shown = sorted((name for name in parts if parts[name] >= 1), key=lambda name: -parts[name])
            found["parts of a step"] = ", ".join(f"{name} {parts[name]:.0f} %" for name in shown)
        late = [record for record in self.steps if (record.get("slowest_share") or 0) >= NAMED_FROM]
        if late:
            of = Counter((each["slowest_rank"], each["slowest_host"], each["slowest_phase"]) for each in late)
            ((rank, host, phase), count) = of.most_common(1)[0]
            seconds = median(each["slowest_sec"] for each in late if each["slowest_rank"] == rank)
            found["waited for"] = f"rank {rank} on {host}, in {phase}: {three(seconds)} s a step"
            found["waited for"] += f", in {count} of {len(self.steps)} records"
        found["model"] = str(self.run.get("model") or config.get("model_type") or "")
        if self.run.get("parameters"):
            found["parameters"] = three(self.run["parameters"])
        mesh = self.run.get("mesh") or {}
        found["ranks"] = str(mesh.get("world_size", ""))
        found["host"] = str(self.run.get("host", ""))
        return {name: value for name, value in found.items() if value}

    def to_json(self) -> dict[str, Any]:
        """Return all that the page draws."""
        starts = self.starts()
        return {
            "name": self.name, "headline": self.headline(), "health": self.health(), "facts": self.facts(),
            "columns": self.columns(), "attempts": self.attempts(),
            "events": self.events[-2000:], "config": _settings(self.run),
            "given": [name for name, source in (self.run.get("sources") or {}).items() if source != "default"],
            "starts": [
                {"host": one.get("host"), "started": one.get("started"), "changes": changes(before, one)}
                for before, one in zip([{}, *starts], starts, strict=False)
            ],
        }  # fmt: skip


def recent(losses: Sequence[float]) -> float:
    """Return the mean of the last five losses: one batch alone may be far off."""
    return sum(losses[-5:]) / len(losses[-5:])


def three(value: float) -> str:
    """Return a number with three significant digits, and a letter for thousands and more."""
    value = float(f"{value:.3g}")
    for letter, one, least in (("T", 1e12, 1e12), ("B", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if abs(value) >= least:
            return f"{value / one:g}{letter}"
    return f"{value:#.3g}" if 0.1 <= abs(value) < 100 else f"{value:g}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun."""
    return f"{count} {noun}{'s' * (count != 1)}"


def day_and_time(seconds: float) -> str:
    """Return a time in UTC, with its day unless that is today."""
    then, today = time.gmtime(seconds), time.gmtime(time.time())
    return time.strftime("%H:%M UTC" if then[:3] == today[:3] else "%b %d, %H:%M UTC", then)


def duration(seconds: float) -> str:
    """Return a time in its two largest units."""
    whole = round(seconds)
    for large, small, one, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if whole >= one:
            return f"{whole // one} {large}" + (f" {whole % one // part} {small}" if whole % one // part else "")
    return f"{whole} s"


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings and facts of two starts that differ, each as [before, after]; none without ``before``."""
    one, other = _settings(before), _settings(after)
    return {key: [one.get(key), other[key]] for key in other if before and one.get(key) != other[key]}


def thinned(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return about `POINTS` of the records, in order: of each interval its last one and its extremes."""
    size = -(-len(steps) // (POINTS // 4))
    if len(steps) <= POINTS:
        return list(steps)
    kept: set[int] = set()
    for at in range(0, len(steps), size):
        part = range(at, min(at + size, len(steps)))
        kept.add(part[-1])
        for key in EXTREMES:
            having = [i for i in part if steps[i].get(key) is not None]
            if having:
                kept |= {min(having, key=lambda i: steps[i][key]), max(having, key=lambda i: steps[i][key])}
    return [steps[i] for i in sorted(kept)]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving mean over ``window`` values (odd), over fewer towards both ends."""
    sums, half, count = [0.0, *accumulate(values)], window // 2, len(values)
    ends = ((max(0, i - half), min(count, i + half + 1)) for i in range(count))
    return [(sums[last] - sums[first]) / (last - first) for first, last in ends]


def read_runs(folders: Sequence[str]) -> list[RunData]:
    """Return the runs, named by their folders where names are equal. Raises `ConfigError`."""
    runs = [RunData(folder) for folder in folders]
    if len({run.folder.path.resolve() for run in runs}) < len(runs):
        raise ConfigError("smp-train report: one run folder is named twice; name each once")
    names = [run.name for run in runs]
    for run in runs:
        run.name = str(run.folder.path) if names.count(run.name) > 1 else run.name
    return runs


def _shares(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the parts of a step's time in per cent: ``time_shares`` where recorded, else the wait for data alone."""
    if isinstance(record.get("time_shares"), Mapping):
        found = {str(name).replace("_", " "): share for name, share in record["time_shares"].items()}
        return {name: 100 * share for name, share in found.items() if is_number(share)}
    seconds, waited = record.get("step_sec"), record.get("data_wait_sec")
    return {"data": 100 * waited / seconds} if seconds and waited is not None else {}


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    facts = {f"mesh.{name}": size for name, size in (run.get("mesh") or {}).items()}
    facts |= {f"version.{name}": each for name, each in (run.get("versions") or {}).items()}
    return {**(run.get("config") or {}), **facts}
