"""The time of a step, from its `Work` and the rates of a machine: a roofline.

Every rate is the vendor's peak times an efficiency, which is named here or in ``launch/instances.json``. No efficiency
is chosen for one model or one published row.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from smp_train.launch import instances
from smp_train.models.flops import flops_per_token
from smp_train.planning.memory import Memory, PlannedRun
from smp_train.planning.step_memory import Part, Use
from smp_train.planning.work import Collective, Cost, Operation, Transfer, Work
from smp_train.telemetry.metrics import peak_flops

BANDWIDTH = 0.8
"""Share of the peak bandwidth of a GPU's memory that operations reach."""
FUSED = 0.5
"""Share of the bytes and kernels of memory-bound operations that remains after compilation."""
LINKS = 0.7
"""Share of a link's or network's bandwidth that a collective of large tensors reaches. These three, and `products` and
`attention` of A100 and H100, are fitted together to the published rows of docs/planning.md."""
LAUNCH, HOP_WITHIN, HOP_ACROSS = 8.4e-6, 3.4e-6, 14e-6
"""Latencies of a ring in seconds: start, hop within a node, hop between nodes (NCCL's src/graph/tuning.cc, Simple)."""
HOST_SECONDS = 10e-6
"""Host time per kernel, an assumption."""
HOST_MEMORY = 25e9
"""Bytes per second of host memory per GPU, for an optimizer on the host. An assumption."""
FLOAT32 = 16
"""How much slower float32 products without TF32 are than bfloat16: A100 reaches 19.5 TFLOP/s, H100 67."""
HIDDEN = ("shard", "replicate")
"""Dimensions whose collectives overlap with the computation of a neighbouring layer. Computation waits for all other
collectives. A name may join several dimensions, such as shard_context."""
UPDATING, COPIES, HOST = "update", "copies to the host and back", "waiting for the host"


@dataclass(frozen=True)
class Machine:
    """Peak rates of one device, in FLOP/s and bytes/s, and of its node."""

    peak: float
    """FLOP/s of dense bfloat16 matrix products."""
    products: float
    """Share of the peak that a model's matrix products reach."""
    attention: float
    """Share of the peak that attention reaches."""
    memory: float
    link: float
    """Bandwidth between the devices of a node, per device and direction."""
    host: float
    """Bandwidth between a device and host memory, per direction."""
    network: float
    """Bandwidth between nodes, per node and direction."""
    per_node: int


def machine_of(instance: instances.Instance) -> Machine | None:
    """Return the rates of an instance type; None if they are unknown."""
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
    """Tokens of a step, over all devices."""
    devices: int
    mfu: float
    """Model FLOPs (`flops_per_token`) as a share of the peak."""
    parts: dict[str, float]
    """Seconds that add up to the step: computation by class, and the communication that it does not hide."""
    communication: dict[str, float]
    """Seconds of all collectives by dimension, hidden or not."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return self.tokens / self.step_seconds

    @property
    def tokens_per_device(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_second / self.devices

    def described(self) -> dict[str, Any]:
        """Return what ``--json`` prints, in seconds."""
        return {
            "step": self.step_seconds, "parts": self.parts, "communication": self.communication,
            "tokens_of_step": self.tokens, "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_and_device": self.tokens_per_device, "mfu": self.mfu,
        }  # fmt: skip


def predict(run: PlannedRun, memory: Memory, machine: Machine) -> Prediction:
    """Return how long a step takes on devices of ``machine``; ``memory`` is the run's `estimate`."""
    args, work = run.args, memory.work
    parts, communication, calls = _device_seconds(work, machine, compiled=run.compiled)
    micro_batches = args.gradient_accumulation_steps
    copied, computing = 2 * memory.offloaded * micro_batches, sum(parts.values()) - parts[UPDATING]
    if args.cpu_offload:  # parameters to the device, forward and backward, and gradients to the host
        copied += 3 * micro_batches * memory.state[Use.PARAMETERS]
        parts[UPDATING] = work.operations[(Part.UPDATE, 0), Operation.MEMORY_BOUND].size / HOST_MEMORY
    parts[COPIES] = max(0.0, copied / (LINKS * machine.host) - computing)
    parts[HOST] = max(0.0, calls * HOST_SECONDS - sum(parts.values()))
    tokens = args.train_batch_size * micro_batches * run.degrees.data_parallel * run.seq_len
    seconds = sum(parts.values())
    flops = flops_per_token(run.spec.config, run.seq_len, frozen=run.spec.lora is not None) * tokens
    return Prediction(
        seconds, tokens, run.devices, flops / (seconds * run.devices * machine.peak),
        {name: part for name, part in parts.items() if part}, dict(communication),
    )  # fmt: skip


def _device_seconds(
    work: Work, machine: Machine, *, compiled: bool
) -> tuple[dict[str, float], dict[str, float], float]:  # fmt: skip
    """Return seconds by part, seconds of all collectives by dimension, and the number of kernels."""
    parts: dict[str, float] = defaultdict(float)
    communication: dict[str, float] = defaultdict(float)
    computing: dict[Any, float] = defaultdict(float)
    sending: dict[Any, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    calls = 0.0
    for (phase, kind), cost in work.operations.items():
        share = FUSED if compiled and kind == Operation.MEMORY_BOUND and phase[0] != Part.UPDATE else 1.0
        seconds = operation_seconds(kind, cost, machine) * share
        calls += cost.calls * share
        computing[phase] += seconds
        parts[UPDATING if phase[0] == Part.UPDATE else kind] += seconds
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
        # No computation overlaps with the first gathers and the last reductions.
        alone = phase in ((Part.FORWARD, 0), (Part.BACKWARD, 0), (Part.UPDATE, 0))
        shown = total if alone else max(0.0, total - computing[phase])
        for dimension, seconds in lanes.items():
            parts[exposed(dimension)] += shown * seconds / total if total else 0.0
    return parts, communication, calls


def exposed(dimension: str) -> str:
    """Return the key in `Prediction.parts` of the time spent waiting for collectives over a mesh dimension."""
    return f"waiting for {dimension}"


def operation_seconds(kind: str, cost: Cost, machine: Machine) -> float:
    """Return the seconds of operations of one class: for computing or for moving bytes, if that is longer."""
    rate = {
        Operation.PRODUCTS: machine.peak * machine.products,
        Operation.FLOAT32_PRODUCTS: machine.peak * machine.products / FLOAT32,
        Operation.ATTENTION: machine.peak * machine.attention,
        Operation.MEMORY_BOUND: machine.peak,
    }[kind]
    return max(cost.flops / rate, cost.size / (machine.memory * BANDWIDTH))


def collective_seconds(collective: Collective, cost: Cost, machine: Machine) -> float:
    """Return the time of rings over the ranks.

    All-gather and reduce-scatter move (n - 1) / n of the whole tensor past each rank, an all-reduce twice as much. The
    groups that cross a node share its network.
    """
    _, _, ranks, nodes = collective
    if ranks < 2 or not cost.calls:
        return 0.0
    rounds = 2 if collective.kind == Transfer.SUM else 1
    rate = machine.link
    if nodes > 1:
        rate = min(rate, machine.network * (ranks / nodes) / machine.per_node)
    hops = rounds * ((ranks - nodes) * HOP_WITHIN + (nodes - 1) * HOP_ACROSS)
    if collective.kind not in (Transfer.GATHER, Transfer.REDUCE, Transfer.SUM):
        hops = HOP_ACROSS if nodes > 1 else HOP_WITHIN
    return cost.calls * (LAUNCH + hops) + rounds * cost.size * (ranks - 1) / ranks / (LINKS * rate)
