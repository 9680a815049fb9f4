"""A profile in one paragraph: where the device's time goes, what limits the step, and which rank is slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

DEAREST = 10
IDLE_FROM, EXPOSED_FROM = 0.2, 0.15
"""The host (or communication) limits a step if the device is idle (or waits for it) for this share of the step."""
LATE_FROM = 0.1
"""A rank is slow if it spends this share of a step less in communication than the median of all other ranks."""
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
    """Seconds per recorded step of one rank's device."""

    step: float
    compute: float
    communication: float
    """Time in collectives, waiting for other ranks included."""
    exposed: float
    """The part of ``communication`` that no computation overlaps."""


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the union of spans (start, end), in order."""
    union: Spans = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((start, end))
    return union


def clipped(spans: Spans, first: float, last: float) -> Spans:
    """Return the parts of the spans between two times."""
    return [(max(start, first), min(end, last)) for start, end in spans if start < last and end > first]


def length(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that spans cover together."""
    return sum(end - start for start, end in merged(spans))


def shares(events: Iterable[Any]) -> Shares | None:
    """Return the shares of a profile's events (``torch.profiler.profile.events()``), or None without a recorded step.

    On a GPU, NCCL's kernels are the communication and other kernels and copies the compute; on a CPU, gloo's
    collectives and the operators within the recorded steps.
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
    first, last = min(step.start for step in steps), max(step.end for step in steps)
    if kernels:
        first, last = min(start for start, _ in compute + talk), max(end for _, end in compute + talk)
    compute, talk = (clipped(spans, first, last) for spans in (compute, talk))
    busy, computing, talking = length(compute + talk), length(compute), length(talk)
    scale = 1e-6 / len(steps)
    return Shares((last - first) * scale, computing * scale, talking * scale, (busy - computing) * scale)


def bound(rank: Shares) -> str:
    """Return the key of `ADVICE` that names a step's bottleneck."""
    idle, exposed = 1 - (rank.compute + rank.exposed) / rank.step, rank.exposed / rank.step
    if idle >= IDLE_FROM and idle >= exposed:
        return "the host or the data"
    return "communication" if exposed >= EXPOSED_FROM else "compute"


def paragraph(ranks: Sequence[Shares], hosts: Sequence[str], first: int, last: int) -> str:
    """Return the verdict on the steps ``first`` to ``last``; shares are means over ranks.

    If one rank is slow, the verdict names that rank's bottleneck: the communication of all other ranks is waiting.
    """
    mean = Shares(*(sum(values) / len(ranks) for values in zip(*ranks, strict=True)))
    percent = {name: 100 * value / mean.step for name, value in mean._asdict().items()}
    sentences = [
        f"Profile of steps {first} to {last}: {1000 * mean.step:.3g} ms a step, of which compute "
        f"{percent['compute']:.0f} %, communication {percent['exposed']:.0f} % exposed (another "
        f"{percent['communication'] - percent['exposed']:.0f} % is hidden), "
        f"idle {100 - percent['compute'] - percent['exposed']:.0f} %."
    ]
    judged_rank, suffix = mean, ""
    if len(ranks) > 1:
        slowest = min(range(len(ranks)), key=lambda rank: ranks[rank].communication)
        usual = median(shares.communication for rank, shares in enumerate(ranks) if rank != slowest)
        if usual - ranks[slowest].communication >= LATE_FROM * mean.step:
            sentences.append(
                f"The others wait for rank {slowest} on {hosts[slowest]}: it is "
                f"{1000 * ranks[slowest].communication:.3g} ms in communication, the median of the others "
                f"{1000 * usual:.3g} ms."
            )
            judged_rank, suffix = ranks[slowest], f" of rank {slowest}"
    bottleneck = bound(judged_rank)
    return " ".join([*sentences, f"Bound by {bottleneck}{suffix}: {ADVICE[bottleneck]}."])


def dearest(averages: Iterable[Any], *, on_gpu: bool) -> list[tuple[str, float]]:
    """Return the `DEAREST` operators of a profile's ``key_averages()``, each with its share of all operators' time."""
    field = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    times = {row.key: float(getattr(row, field)) for row in averages if not row.key.startswith(RANGES)}
    total = sum(times.values()) or 1.0
    return [(name, times[name] / total) for name in sorted(times, key=times.__getitem__, reverse=True)[:DEAREST]]
