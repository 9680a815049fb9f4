"""A run to plan, and the memory that its step needs on a device and on the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from smp_train.arguments import Arguments, checkpointing
from smp_train.distributed.degrees import Degrees, plan
from smp_train.models.hugging_face import ModelSpec
from smp_train.models.state_memory import CHECKPOINT_BYTES, GIB
from smp_train.planning.step_memory import Part, Phase, Use
from smp_train.planning.work import Work

FIXED_SLACK, SHARE_SLACK = 2 * GIB, 0.05
"""GPU memory in addition to tensors: driver, libraries' workspaces, NCCL's buffers; and the share of the peak that is
lost to fragments. Both are assumptions, which the plan prints."""
TIGHT = 0.9
"""A run that needs more than this share of a GPU may run out of memory: published memory is up to 15 % above the plan
(docs/planning.md)."""
HOST_SLACK = 4 * GIB
"""Host memory of a GPU's process in addition to tensors, an assumption: Python, torch, CUDA's libraries."""
STATE = (Use.PARAMETERS, Use.GRADIENTS, Use.OPTIMIZER)


@dataclass(frozen=True)
class PlannedRun:
    """A run to plan: its settings, its model and its devices."""

    args: Arguments
    spec: ModelSpec
    devices: int
    per_node: int
    """Devices per node."""
    seq_len: int
    """Tokens per row."""
    gpu: bool = True
    compiled: bool = True
    """The run compiles its layers and its loss. The plan steps them uncompiled."""

    @cached_property
    def degrees(self) -> Degrees:
        """The layout of the run's ranks."""
        return plan(self.args, self.devices, self.per_node, smp=False)

    @property
    def bf16(self) -> bool:
        """Whether the run computes in bfloat16."""
        return self.args.computes_in_bf16(gpu=self.gpu)

    def with_flags(self, flags: dict[str, Any]) -> PlannedRun:
        """Return the run with other flags of parallelism or memory."""
        return replace(self, args=replace(self.args, **flags))


@dataclass(frozen=True)
class Memory:
    """Bytes and work of a step on rank 0, whose shards are the largest."""

    peaks: dict[Phase, Counter[str]]
    """Bytes of live tensors at the peak of each phase, by use."""
    trained: int
    """Trained parameters of the whole model."""
    work: Work = field(default_factory=Work)
    pinned: int = 0
    """Bytes of parameters and gradients if they are in page-locked memory, which torch allocates in powers of two."""
    saved: int = 0
    """Bytes, in page-locked memory, of the copy that a checkpoint is written from: parameters and Adam's moments."""
    gpu: bool = True
    state_on_host: bool = False
    """Parameters, gradients and optimizer stay in host memory (``--cpu_offload``)."""

    @cached_property
    def uses(self) -> dict[Phase, dict[str, int]]:
        """Bytes on the device, by phase and use."""
        away = (Use.HOST, *(STATE if self.state_on_host else ()))
        return {
            phase: {use: size for use, size in peak.items() if size and use not in away}
            for phase, peak in self.peaks.items()
        }

    @cached_property
    def peak_phase(self) -> Phase:
        """The phase that takes the most memory."""
        uses = self.uses
        return max(uses, key=lambda phase: sum(uses[phase].values()))

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes on the device at the peak, by use."""
        return self.uses[self.peak_phase]

    @property
    def peak(self) -> int:
        """Bytes of all tensors on the device at the peak."""
        return sum(self.at_peak.values())

    @property
    def slack(self) -> int:
        """Bytes that the device needs in addition to the peak."""
        return FIXED_SLACK * self.gpu + int(SHARE_SLACK * self.peak)

    @cached_property
    def needed(self) -> int:
        """Bytes that each device must have."""
        return self.peak + self.slack

    @property
    def state(self) -> dict[str, int]:
        """Bytes of parameters, gradients and optimizer."""
        return {use: self.peaks[Part.UPDATE, 0][use] for use in STATE}

    @property
    def offloaded(self) -> int:
        """Bytes of offloaded activations at their peak."""
        return max(peak[Use.HOST] for peak in self.peaks.values())

    @property
    def host(self) -> int:
        """Bytes of tensors in host memory; all but the optimizer's are page-locked."""
        return self.offloaded + (self.pinned + self.state[Use.OPTIMIZER]) * self.state_on_host

    @cached_property
    def host_needed(self) -> int:
        """Bytes of host memory that a GPU's process needs."""
        return self.host + HOST_SLACK

    @property
    def host_while_saving(self) -> int:
        """Bytes of the copy that a background save makes; page-locked if the tensors are on a GPU."""
        if self.gpu and not self.state_on_host:
            return self.saved
        return self.state[Use.PARAMETERS] + self.state[Use.OPTIMIZER]

    @property
    def checkpoint(self) -> int:
        """Bytes of a checkpoint, over all devices."""
        return CHECKPOINT_BYTES * self.trained

    def is_tight(self, device_bytes: int) -> bool:
        """Return whether a run that fits may still run out of a GPU's memory."""
        return self.gpu and TIGHT * device_bytes < self.needed <= device_bytes


def least(run: PlannedRun, memory: Memory) -> int:
    """Return a lower bound on a step's memory: all tensors, or what compilation cannot avoid.

    Compilation avoids neither the state, nor gathered parameters, nor the inputs of fully checkpointed layers.
    """
    if not run.compiled:
        return memory.peak
    unavoidable = {*STATE, Use.GATHERED}
    if run.args.activation_checkpointing == checkpointing.FULL:
        unavoidable.add(Use.ACTIVATIONS)
    backward = [uses for (part, _), uses in memory.uses.items() if part == Part.BACKWARD]
    return max(sum(size for use, size in uses.items() if use in unavoidable) for uses in backward)


def gib(size: int) -> str:
    """Return a size as text."""
    return f"{size / 2**20:.2f} MiB" if 0 < size < GIB / 10 else f"{size / GIB:.2f} GiB"


def count_of_devices(count: int) -> str:
    """Return a number of devices as text."""
    return f"{count} device{'s' * (count != 1)}"
