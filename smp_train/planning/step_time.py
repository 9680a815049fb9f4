"""The time of a step, from its `Work` and the rates of a machine: a roofline.

Every rate is the vendor's peak times an efficiency that is named here or in ``launch/instances.json``. None is chosen
for one model or one published row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from smp_train.arguments import Arguments
from smp_train.distributed import degrees
from smp_train.launch import instances
from smp_train.models.flops import flops_per_token
from smp_train.models.resolve import ModelSpec
from smp_train.planning.stepping import BACKWARD, FORWARD, UPDATE
from smp_train.planning.tracker import PARAMETERS
from smp_train.planning.work import (
    ATTENTION,
    ELEMENTWISE,
    GATHER,
    PRODUCTS,
    REDUCE,
    SUM,
    WIDE_PRODUCTS,
    Collective,
    Cost,
    Work,
)
from smp_train.planning.world import Memory
from smp_train.telemetry.metrics import peak_flops

BANDWIDTH = 0.8
"""Share of the peak bandwidth of a GPU's memory that is reached."""
FUSED = 0.5
"""Share of the bytes and kernels of memory-bound operations that compilation leaves."""
LINKS = 0.7
"""Share of a link's or network's bandwidth that a collective of large tensors reaches. These three, and `products` and
`attention` of A100 and H100, are fitted together to the published rows of docs/planning.md."""
LAUNCH, HOP_WITHIN, HOP_ACROSS = 8.4e-6, 3.4e-6, 14e-6
"""Seconds of a ring: to start, and each hop within a node and between two. NCCL's own (src/graph/tuning.cc, Simple)."""
HOST_SECONDS = 10e-6
"""Of the host, for each kernel. An assumption."""
HOST_MEMORY = 25e9
"""Bytes per second of the host's memory for each GPU, where the optimizer runs there. An assumption."""
FLOAT32 = 16
"""How many times slower products in float32, without TF32, are than in bfloat16: A100 19.5, H100 67 TFLOP/s."""
HIDDEN = ("shard", "replicate")
"""Dimensions whose collectives run beside the computation of a neighbouring layer; what tensor, context and expert
ranks send is waited for. A name may join several, such as shard_context."""
UPDATING, COPIES, HOST = "update", "copies to the host and back", "waiting for the host"


@dataclass(frozen=True)
class Machine:
    """Peak rates of one device, in FLOP/s and bytes/s, and of its node."""

    peak: float
    """Dense products in bfloat16."""
    products: float
    """Of the peak, what a model's products reach."""
    attention: float
    """The same of attention."""
    memory: float
    link: float
    """Between the devices of a node, of each in one direction."""
    host: float
    """To the host's memory, in one direction."""
    network: float
    """Between nodes, of a whole node in one direction."""
    per_node: int


def machine_of(instance: instances.Instance) -> Machine | None:
    """Return the rates of an instance type; None where they are not known."""
    gpu, peak = instances.gpu_of(instance), peak_flops(instance.gpu)
    if gpu is None or peak is None:
        return None
    return Machine(
        peak, gpu.products, gpu.attention, gpu.memory_gb_s * 1e9, gpu.link_gb_s * 1e9, gpu.host_gb_s * 1e9,
        instance.network_gbit_s / 8 * 1e9, instance.gpus,
    )  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """How fast a run is."""

    step_seconds: float
    tokens: int
    """Of a step, of all devices."""
    devices: int
    mfu: float
    """Model FLOPs, of `flops_per_token`, of the peak."""
    parts: dict[str, float]
    """Seconds of a step that add up to it: computation by class, and what is not hidden behind it."""
    communication: dict[str, float]
    """Seconds of all collectives by dimension, hidden or not."""

    @property
    def tokens_per_second(self) -> float:
        """Of all devices."""
        return self.tokens / self.step_seconds

    @property
    def tokens_per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_second / self.devices

    def described(self) -> dict[str, Any]:
        """Return what ``--json`` prints, in seconds."""
        return {
            "step": self.step_seconds, "parts": self.parts, "bound": self.bound, "communication": self.communication,
            "tokens_of_step": self.tokens, "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_and_device": self.tokens_per_device, "mfu": self.mfu,
        }  # fmt: skip

    @property
    def bound(self) -> str:
        """The largest part."""
        return max(self.parts, key=lambda part: self.parts[part])


def predict(
    args: Arguments, spec: ModelSpec, memory: Memory, machine: Machine, *, devices: int, seq_len: int, compiled: bool
) -> Prediction:  # fmt: skip
    """Return how long a step takes on ``machine``, of the work that `estimate` found.

    Args:
        args: Of the run.
        spec: The model.
        memory: Of `estimate`, for these arguments and devices.
        machine: Each device.
        devices: Ranks of the run.
        seq_len: Tokens of a row.
        compiled: The layers and the loss are compiled, as they are on a GPU by default.
    """
    parts, communication, calls = _device_seconds(memory.work, machine, compiled=compiled)
    micro_batches = args.gradient_accumulation_steps
    copied, stepping = 2 * memory.host * micro_batches, sum(parts.values()) - parts[UPDATING]
    if args.cpu_offload:  # to be gathered, forward and backward, and the gradient
        copied += 3 * micro_batches * memory.state[PARAMETERS]
        parts[UPDATING] = memory.work.operations[(UPDATE, 0), ELEMENTWISE].size / HOST_MEMORY
    parts[COPIES] = max(0.0, copied / (LINKS * machine.host) - stepping)
    parts[HOST] = max(0.0, calls * HOST_SECONDS - sum(parts.values()))
    readers = degrees.plan(args, devices, machine.per_node, smp=False).data_parallel
    tokens = args.train_batch_size * micro_batches * readers * seq_len
    seconds = sum(parts.values())
    frozen = spec.lora is not None
    mfu = flops_per_token(spec.config, seq_len, frozen=frozen) * tokens / (seconds * devices * machine.peak)
    return Prediction(
        seconds, tokens, devices, mfu, {name: each for name, each in parts.items() if each}, dict(communication)
    )


def _device_seconds(
    work: Work, machine: Machine, *, compiled: bool
) -> tuple[dict[str, float], dict[str, float], float]:  # fmt: skip
    """Return seconds by part, seconds of all collectives by dimension, and how many kernels the host starts."""
    parts: dict[str, float] = defaultdict(float)
    communication: dict[str, float] = defaultdict(float)
    computing: dict[Any, float] = defaultdict(float)
    sending: dict[Any, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    calls = 0.0
    for (phase, kind), cost in work.operations.items():
        left = FUSED if compiled and kind == ELEMENTWISE and phase[0] != UPDATE else 1.0
        seconds = operation_seconds(kind, cost, machine) * left
        calls += cost.calls * left
        computing[phase] += seconds
        parts[UPDATING if phase[0] == UPDATE else kind] += seconds
    for (phase, collective), cost in work.collectives.items():
        seconds = collective_seconds(collective, cost, machine)
        calls += cost.calls
        communication[collective.dimension] += seconds
        if collective.dimension.startswith(HIDDEN):
            sending[phase][collective.dimension] += seconds
        else:
            computing[phase] += seconds
            parts[exposed(collective.dimension)] += seconds
    for phase, lanes in sending.items():
        total = sum(lanes.values())
        # Behind the first gathers and the last reductions there is nothing to compute.
        alone = phase in ((FORWARD, 0), (BACKWARD, 0), (UPDATE, 0))
        shown = total if alone else max(0.0, total - computing[phase])
        for dimension, seconds in lanes.items():
            parts[exposed(dimension)] += shown * seconds / total if total else 0.0
    return parts, communication, calls


def exposed(dimension: str) -> str:
    """Return the name of the part that waits for a dimension's collectives."""
    return f"waiting for {dimension}"


def operation_seconds(kind: str, cost: Cost, machine: Machine) -> float:
    """Return the longer of the times that operations of one class compute and move their bytes."""
    rate = {
        PRODUCTS: machine.peak * machine.products,
        WIDE_PRODUCTS: machine.peak * machine.products / FLOAT32,
        ATTENTION: machine.peak * machine.attention,
        ELEMENTWISE: machine.peak,
    }[kind]
    return max(cost.flops / rate, cost.size / (machine.memory * BANDWIDTH))


def collective_seconds(collective: Collective, cost: Cost, machine: Machine) -> float:
    """Return the time of rings over the ranks; a node's network is shared by the groups that cross it beside this one.

    All-gather and reduce-scatter move (n - 1) / n of the whole tensor past each rank, an all-reduce twice that.
    """
    _, _, ranks, nodes = collective
    if ranks < 2 or not cost.calls:
        return 0.0
    rounds = 2 if collective.kind == SUM else 1
    rate = machine.link
    if nodes > 1:
        rate = min(rate, machine.network * (ranks / nodes) / machine.per_node)
    hops = rounds * ((ranks - nodes) * HOP_WITHIN + (nodes - 1) * HOP_ACROSS)
    if collective.kind not in (GATHER, REDUCE, SUM):
        hops = HOP_ACROSS if nodes > 1 else HOP_WITHIN
    return cost.calls * (LAUNCH + hops) + rounds * cost.size * (ranks - 1) / ranks / (LINKS * rate)
