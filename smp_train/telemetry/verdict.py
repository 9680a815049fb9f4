"""What a profile says of a step, in one paragraph: shares of the device's time, its bound, and the slowest rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

DEAREST = 10
IDLE_FROM, EXPOSED_FROM = 0.2, 0.15
"""Shares of a step, idle or in exposed communication, from which it is bound by the host or by communication."""
LATE_FROM = 0.1
"""A rank is named that waits less in communication than the others' median by this share of a step."""
ADVICE = {
    "the host or the data": "see data_wait_sec; give --use_torch_compile 1 or a larger --train_batch_size",
    "communication": (
        "give each device more work between its collectives: a larger --train_batch_size or "
        "--gradient_accumulation_steps; keep the model's shards on one node: --hybrid_shard_degree"
    ),
    "compute": "fewer or faster operations: --use_torch_compile 1, less --activation_checkpointing, --fp8 1",
}

RANGES = ("ProfilerStep", "FSDP::", "nccl:")
"""Prefixes of annotated ranges, which a profile lists among operators and, on a GPU, above the kernels."""

Spans = list[tuple[float, float]]


class Shares(NamedTuple):
    """What one rank's device did in the recorded steps, per step, in seconds."""

    step: float
    compute: float
    communication: float
    """Time in collectives, waiting for other ranks included."""
    exposed: float
    """The part of it that no computation overlaps."""


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the union of spans (start, end), in order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that spans cover together."""
    return sum(end - start for start, end in merged(spans))


def shares(events: Iterable[Any]) -> Shares | None:
    """Return what the events of a profile (``torch.profiler.profile.events()``) say; None where there is no step.

    On a GPU the device's spans are its kernels and copies, NCCL's told by their names, from the first to the last. On a
    CPU they are the operators, and gloo's collectives on its threads, between the first and the last recorded step.
    """
    cpu: list[Any] = []
    gpu: list[Any] = []
    for event in events:
        (gpu if "CUDA" in str(event.device_type) else cpu).append(event)
    steps = [event.time_range for event in cpu if event.name.startswith("ProfilerStep")]
    kernels = [e for e in gpu if not (getattr(e, "is_user_annotation", False) or e.name.startswith(RANGES))]
    compute: Spans = []
    talk: Spans = []
    for event in kernels or cpu:
        span = event.time_range.start, event.time_range.end
        if event.name.startswith(("nccl", "gloo:")):
            talk.append(span)
        elif kernels or event.name.startswith("aten::"):
            compute.append(span)
    if not steps or not compute:
        return None
    first, last = min(each.start for each in steps), max(each.end for each in steps)
    if kernels:
        first, last = min(start for start, _ in compute + talk), max(end for _, end in compute + talk)
    within = [[(max(a, first), min(b, last)) for a, b in each if a < last and b > first] for each in (compute, talk)]
    compute, talk = within
    busy, computing, talking = length(compute + talk), length(compute), length(talk)
    scale = 1e-6 / len(steps)
    return Shares((last - first) * scale, computing * scale, talking * scale, (busy - computing) * scale)


def bound(one: Shares) -> str:
    """Return what a step is bound by: a key of `ADVICE`."""
    idle, exposed = 1 - (one.compute + one.exposed) / one.step, one.exposed / one.step
    if idle >= IDLE_FROM and idle >= exposed:
        return "the host or the data"
    return "communication" if exposed >= EXPOSED_FROM else "compute"


def paragraph(ranks: Sequence[Shares], hosts: Sequence[str], first: int, last: int) -> str:
    """Return the verdict on the steps ``first`` to ``last`` of all ranks; shares are means over them.

    Where one is slow, the others' communication is time waited for it: then the bound is that rank's.
    """
    one = Shares(*(sum(values) / len(ranks) for values in zip(*ranks, strict=True)))
    of = {name: 100 * value / one.step for name, value in one._asdict().items()}
    said = [
        f"Profile of steps {first} to {last}: {1000 * one.step:.3g} ms a step, of which compute {of['compute']:.0f} %, "
        f"communication {of['exposed']:.0f} % exposed (another {of['communication'] - of['exposed']:.0f} % is hidden), "
        f"idle {100 - of['compute'] - of['exposed']:.0f} %."
    ]
    which = ""
    if len(ranks) > 1:
        rank = min(range(len(ranks)), key=lambda each: ranks[each].communication)
        others = median(each.communication for other, each in enumerate(ranks) if other != rank)
        if others - ranks[rank].communication >= LATE_FROM * one.step:
            said.append(
                f"The others wait for rank {rank} on {hosts[rank]}: it is {1000 * ranks[rank].communication:.3g} ms in "
                f"communication, the median of the others {1000 * others:.3g} ms."
            )
            one, which = ranks[rank], f" of rank {rank}"
    said.append(f"Bound by {bound(one)}{which}: {ADVICE[bound(one)]}.")
    return " ".join(said)


def dearest(averages: Iterable[Any], *, on_gpu: bool) -> list[tuple[str, float]]:
    """Return the `DEAREST` operators of a profile's ``key_averages()``, each with its share of the time of all."""
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = {each.key: float(getattr(each, field)) for each in averages if not each.key.startswith(RANGES)}
    total = sum(times.values()) or 1.0
    return [(name, times[name] / total) for name in sorted(times, key=times.__getitem__, reverse=True)[:DEAREST]]
