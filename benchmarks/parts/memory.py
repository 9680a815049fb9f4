"""`memory`: the peak of each phase of a step, and whose the memory is at the highest of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.cells import Cell
from benchmarks.parts import Setting
from benchmarks.parts.ladder import LLAMA_1B, SWITCHES
from benchmarks.program import SMALL_GPU, STEADY, Flags, below, opened, scratch, stepping, words
from smp_train.distributed.dtensor import local_tensor
from smp_train.run.state import Run
from smp_train.telemetry.memory_tracker import memory_gib

GIB = 2**30
OURS = re.compile(r"(smp_train|transformers|torch/optim|torch/distributed|torch/utils/checkpoint)[/\\]")
FRAMES = 400_000
NEW = "allocated in the step, GiB"
MODES = ("no checkpointing", "selective:op", "offload horizon 2", "all logits")


def cells(setting: Setting) -> list[Cell]:
    """Return the ways of saving memory, the defaults first."""
    base: Flags = SMALL_GPU if setting.rehearse else {**LLAMA_1B, "max_context_width": 8192}
    modes: dict[str, Flags] = {"defaults": {}, **{name: SWITCHES[name] for name in MODES}}
    return [Cell(name, phases, {"flags": {**base, **flags}}, 45) for name, flags in modes.items()]


def phases(flags: Flags) -> dict[str, Any]:
    """Return the peak after each phase of the third step; on a CPU, where nobody counts, the resident memory."""
    found: dict[str, float] = {}
    line = {**STEADY, **flags, "logging_freq": 1000}  # a log line reads the peak, and begins a new one
    with scratch() as folder, opened(words({**line, **below(folder)})) as run, stepping(run) as one:
        device = run.backend.topology.device
        found["built"] = memory_gib(device)
        for _ in range(2):
            one()
        memory_gib(device)
        watch(run, found)
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=FRAMES, stacks="python")
        one()
        live: dict[str, float] = {}
        if device.type == "cuda":
            snapshot = torch.cuda.memory._snapshot()
            torch.cuda.memory._record_memory_history(enabled=None)
            live = owners(snapshot["device_traces"][device.index or 0])
        states: Iterable[Any] = [value for state in run.optimizer.state.values() for value in state.values()]
        held = {"weights": run.model.parameters(), "optimizer": (v for v in states if isinstance(v, torch.Tensor))}
        kept = {f"{name} GiB": sum(size(value) for value in values) / GIB for name, values in held.items()}
        if device.type == "cuda":
            kept["reserved GiB"] = torch.cuda.max_memory_reserved(device) / GIB
    return {**{f"{name} GiB": value for name, value in found.items()}, **kept, NEW: live}


def summary(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield who held what the step had allocated when that was most."""
    for record in records:
        for whose, value in record.get(NEW, {}).items():
            yield {"cell": record["cell"], "allocated in the step by": whose, "GiB at its peak": value}


def size(tensor: torch.Tensor) -> int:
    """Return the bytes of this rank's part."""
    part = local_tensor(tensor)
    return int(part.numel() * part.element_size())


def watch(run: Run, found: dict[str, float]) -> None:
    """Note the peak after the forward pass, the backward pass and the update of the next step."""
    backend, device = run.backend, run.backend.topology.device
    loss, clip = backend.loss, backend.clip_grad_norm

    def forward(*args: Any, **more: Any) -> Any:
        result = loss(*args, **more)
        found["forward"] = max(found.get("forward", 0.0), memory_gib(device))
        return result

    def backward(*args: Any, **more: Any) -> Any:
        found["backward"] = memory_gib(device)
        norm = clip(*args, **more)
        found["norm"] = memory_gib(device)
        return norm

    backend.loss = forward  # type: ignore[method-assign]
    backend.clip_grad_norm = backward  # type: ignore[method-assign]
    run.optimizer.register_step_post_hook(lambda *_: found.update(update=memory_gib(device)))


def owners(trace: Iterable[Mapping[str, Any]], top: int = 12) -> dict[str, float]:
    """Return, of what a recorded stretch has allocated, GiB by owner when that was most; the rest of the peak is older.

    The owner is the innermost line of this package, transformers, or torch's optimizers, FSDP and checkpoints. The
    backward pass has no lines of Python but where it recomputes.
    """
    live: dict[int, tuple[int, str]] = {}
    now = most = 0
    peak: Counter[str] = Counter()
    current: Counter[str] = Counter()
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event["size"], owner(event.get("frames", ()))
            current[live[event["addr"]][1]] += event["size"]
            now += event["size"]
            if now > most:
                most, peak = now, current.copy()
        elif event["action"] == "free_completed" and event["addr"] in live:
            freed, whose = live.pop(event["addr"])
            current[whose] -= freed
            now -= freed
    return {whose: number / GIB for whose, number in peak.most_common(top) if number}


def owner(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return file and line of the first frame that says whose an allocation is."""
    for frame in frames:
        place = str(frame["filename"])
        match = OURS.search(place)
        if match:
            return f"{place[match.start() :]}:{frame['line']}"
    return "backward pass"
