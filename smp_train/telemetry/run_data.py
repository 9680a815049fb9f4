"""What a report shows of a run, read from its folder while it runs, after it ended, or after it was killed."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from smp_train.errors import ConfigError
from smp_train.telemetry.metrics import FILE_NAME, NAMED_FROM, history, is_number, read_metrics
from smp_train.telemetry.run_folder import RunFolder

POINTS = 1000
"""About as many steps of a run are drawn: of more, those with the extremes of `EXTREMES` in each interval."""
EXTREMES = ("loss", "grad_norm", "step_sec")
SILENT_SECONDS = 900.0
"""Seconds without a record after which a run on another host is called silent."""
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#22303c", "#c8c8c8", "#f0e442")
"""Colours of runs and of parts of a step: Okabe and Ito's palette for colour-blind readers, and a light grey."""
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

    @property
    def state(self) -> str:
        """``finished``, ``stopped``, ``running``, ``ended`` (no process), ``silent`` (elsewhere, no record)."""
        for marker, state in ((self.folder.done, "finished"), (self.folder.stopped, "stopped")):
            with suppress(OSError):
                # An older one is of an earlier attempt: a start removes it once it trains.
                if not self.run or marker.stat().st_mtime >= self.folder.run_json.stat().st_mtime:
                    return state
        if self.run.get("host") != socket.gethostname():
            if not self.run:
                return "ended"
            began = self.folder.run_json.stat().st_mtime
            last = next((each["time"] for each in self.all[-1:] if "time" in each), began)
            return "silent" if time.time() - last > SILENT_SECONDS else "running"
        with suppress(PermissionError):  # it is another user's
            try:
                os.kill(int(self.run["pid"]), 0)
            except (ProcessLookupError, KeyError, ValueError):
                return "ended"
        return "running"

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
        if found and self.state in ("running", "silent"):
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

    def summary(self) -> dict[str, str]:
        """Return what a reader wants to know first, by name."""
        config, last = self.run.get("config") or {}, self.steps[-1] if self.steps else {}
        total = self.run.get("total_steps")
        found = {"state": self.state, "step": f"{last.get('step', 0):,}" + (f" of {total:,}" if total else "")}
        for name, key, form in (("loss", "loss", ".4f"), ("tokens", "tokens", ",d"), ("memory", "memory_gib", ".2f")):
            if last.get(key) is not None:
                found[name] = format(last[key], form) + (" GiB" if name == "memory" else "")
        validation = [each["loss"] for each in self.events if each["event"] == "evaluate" and each.get("loss")]
        if validation:
            found["validation loss"] = f"{validation[-1]:.4f}, best {min(validation):.4f}"
        for name, key, scale, digits, unit in (
            ("tokens/s", "tokens_per_sec", 1, 0, ""), ("step", "step_sec", 1, 3, " s"), ("MFU", "mfu", 100, 1, " %"),
        ):  # fmt: skip
            values = [record[key] for record in self.steps if record.get(key) is not None]
            if values:
                found[f"{name}, median"] = f"{scale * median(values):,.{digits}f}{unit}"
        columns = [shares for record in self.steps if (shares := _shares(record))]
        names = dict.fromkeys(name for each in columns for name in each)
        parts = {name: median(each.get(name, 0) for each in columns) for name in names}
        talk = [each["communication_share"] for each in self.steps if each.get("communication_share") is not None]
        if talk:  # beside or in the parts
            parts["communication (in forward and backward)"] = 100 * median(talk)
        if len(parts) > 1:
            shown = sorted((name for name in parts if parts[name] >= 1), key=lambda name: -parts[name])
            found["time, median"] = ", ".join(f"{name} {parts[name]:.0f} %" for name in shown)
        late = [record for record in self.steps if (record.get("slowest_share") or 0) >= NAMED_FROM]
        if late:
            of = Counter((each["slowest_rank"], each["slowest_host"], each["slowest_phase"]) for each in late)
            ((rank, host, phase), count) = of.most_common(1)[0]
            seconds = median(each["slowest_sec"] for each in late if each["slowest_rank"] == rank)
            found["waited for"] = f"rank {rank} on {host}, in {phase}: {seconds:.2g} s a step"
            found["waited for"] += f", in {count} of {len(self.steps)} records"
        found["model"] = str(self.run.get("model") or config.get("model_type") or "")
        if self.run.get("parameters"):
            found["parameters"] = f"{self.run['parameters']:,}"
        found["mesh"] = ", ".join(f"{name} {size}" for name, size in (self.run.get("mesh") or {}).items())
        found["versions"] = ", ".join(f"{name} {each}" for name, each in (self.run.get("versions") or {}).items())
        found["host"] = str(self.run.get("host", ""))
        return {name: value for name, value in found.items() if value}

    def to_json(self) -> dict[str, Any]:
        """Return all that the page draws."""
        starts = self.starts()
        return {
            "name": self.name, "summary": self.summary(), "columns": self.columns(), "attempts": self.attempts(),
            "events": self.events[-2000:], "config": _settings(self.run),
            "given": [name for name, source in (self.run.get("sources") or {}).items() if source != "default"],
            "starts": [
                {"host": one.get("host"), "started": one.get("started"), "changes": changes(before, one)}
                for before, one in zip([{}, *starts], starts, strict=False)
            ],
        }  # fmt: skip


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
