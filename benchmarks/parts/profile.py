"""`profile`: what three steps consist of, from a trace: operators and kernels, streams, waits of the host."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from benchmarks.cells import Cell
from benchmarks.parts import Setting
from benchmarks.parts.ladder import LLAMA_1B, SWITCHES
from benchmarks.program import SMALL_GPU, STEADY, Flags, below, opened, scratch, stepping, words
from smp_train.telemetry.profiling import Profiler

STEPS, FIRST = 3, 5
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = re.compile(r"^cuda((Stream|Device|Event)Synchronize|Memcpy)$")
"""Of the host for the device. Two waits for an event are made in each step: for the vote, and for a step's numbers."""
KINDS: tuple[tuple[str, str], ...] = (
    ("compiled by Triton", r"^triton"),
    ("attention", r"flash|fmha|cudnn.*sdpa|attention"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|xmma|splitK|aten::(mm|addmm_?|bmm)$"),
    ("communication", r"nccl|c10d"),
    ("optimizer", r"adam|multi_tensor|foreach"),
    ("copies", r"memcpy|memset|copy"),
    ("soft-max", r"softmax"),
    ("reductions", r"reduce|norm"),
    ("element-wise", r"elementwise|vectorized"),
)
TOP = 15


def cells(setting: Setting) -> list[Cell]:
    """Return one trace with the defaults, one without checkpointing, and one without compilation either."""
    base: Flags = SMALL_GPU if setting.rehearse else {**LLAMA_1B, "max_context_width": 8192}
    return [
        Cell(name, traced, {"flags": {**base, **SWITCHES.get(name, {})},
                            "keep": f"{setting.out}/trace-{name.replace(', ', '-').replace(' ', '-')}.json.gz"}, 90)
        for name in ("defaults", "no checkpointing", "eager, no checkpointing")
    ]  # fmt: skip


def traced(flags: Flags, keep: str) -> dict[str, Any]:
    """Record steps with the package's own profiler, keep the trace, and return its sums."""
    with scratch() as folder:
        profiling = {"use_profiler": 1, "profile_start": FIRST, "profile_steps": STEPS}
        with opened(words({**STEADY, **below(folder), **flags, **profiling})) as run, stepping(run) as one:
            profiler = Profiler(run.args, run.folder.path, 0)
            for number in range(1, FIRST + STEPS):
                with profiler.step(number):
                    one()
            profiler.close()
            path = run.folder.path / "profile" / "trace-rank0.json.gz"
        shutil.copy(path, keep)
    with gzip.open(keep) as file:
        return sums(json.load(file)["traceEvents"], STEPS)


def sums(events: Iterable[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return, per step of a trace: milliseconds by kind and name of kernel (of operator on a CPU), idle time, waits.

    The table shows kinds in percent of the step; lists by name and by stream are in the JSON file.
    """
    timed = [event for event in events if event.get("ph") == "X"]
    device = [event for event in timed if event.get("cat") in ON_DEVICE]
    host = [event for event in timed if event.get("cat") == "cpu_op"]
    rows = device or own_time(host)
    if not rows:
        raise RuntimeError("the trace has neither kernels nor operators")
    first, last = min(event["ts"] for event in rows), max(event["ts"] + event["dur"] for event in rows)
    length = last - first
    by_kind: Counter[str] = Counter()
    by_name: Counter[str] = Counter()
    by_stream: Counter[str] = Counter()
    for event in rows:
        by_kind[kind_of(event["name"])] += event["dur"]
        by_name[event["name"][:100]] += event["dur"]
        by_stream[str(event.get("args", {}).get("stream", "host"))] += event["dur"]
    waits = Counter(event["name"] for event in timed if WAITS.search(event["name"]))
    waited = sum(event["dur"] for event in timed if WAITS.search(event["name"]))
    per_step = 1000 * steps
    kinds = [kind for kind in (*(kind for kind, _ in KINDS), "other") if by_kind[kind]]
    return {
        "step ms": length / per_step, "device idle %": 100 * (1 - union(device) / length) if device else None,
        **{f"{kind} %": 100 * by_kind[kind] / length for kind in kinds},
        **({"host waits per step": sum(waits.values()) / steps, "host waits ms": waited / per_step} if device else {}),
        "attention kernel": next((name for name, _ in by_name.most_common() if kind_of(name) == "attention"), None),
        "waits": dict(waits), "ms by stream": {name: value / per_step for name, value in by_stream.most_common()},
        "ms by name": {name: value / per_step for name, value in by_name.most_common(TOP)},
    }  # fmt: skip


def summary(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the most expensive names of each trace, and its streams."""
    for record in records:
        for what in ("ms by name", "ms by stream"):
            for name, value in record.get(what, {}).items():
                yield {"trace": record["cell"], "sum": what, "name": name, "ms per step": value}


def kind_of(name: str) -> str:
    """Return the kind of a kernel or operator by its name."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def union(events: Sequence[dict[str, Any]]) -> float:
    """Return how long any of the events was under way."""
    total, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        begin, end = max(event["ts"], until), event["ts"] + event["dur"]
        if end > begin:
            total, until = total + end - begin, end
    return total


def own_time(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events with the time of those inside them, on the same thread, taken off."""
    found: list[dict[str, Any]] = []
    stack: list[dict[str, Any]] = []
    for event in sorted(events, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        own = dict(event)
        while stack and (stack[-1]["tid"] != own["tid"] or stack[-1]["ends"] <= own["ts"]):
            stack.pop()
        if stack:
            stack[-1]["dur"] -= own["dur"]
        own["ends"] = event["ts"] + event["dur"]
        stack.append(own)
        found.append(own)
    return found
