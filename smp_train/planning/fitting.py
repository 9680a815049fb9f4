"""The memory that a run needs of each device, from what its tensors take."""

from __future__ import annotations

from smp_train.arguments import Arguments
from smp_train.arguments.checkpointing import FULL
from smp_train.models.state_memory import GIB
from smp_train.planning.stepping import BACKWARD, Phase
from smp_train.planning.tracker import ACTIVATIONS, GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS
from smp_train.planning.world import Memory

FIXED_SLACK, SHARE_SLACK = 2 * GIB, 0.05
"""GPU memory besides tensors: the driver, workspaces of libraries and NCCL's buffers; and the share of the peak that is
lost to fragments. Assumptions, which the plan prints."""
TIGHT = 0.9
"""Of a GPU's memory: where a plan needs more, the run may still run out of it. Published memory is up to 15 % above
what is planned (docs/planning.md)."""
HOST_SLACK = 4 * GIB
"""Host memory of a GPU's process besides tensors: Python, torch, CUDA's libraries. An assumption."""
STATE = (PARAMETERS, GRADIENTS, OPTIMIZER)


def gib(size: int) -> str:
    """Return a size as it is printed."""
    return f"{size / GIB:.2f} GiB"


def devices(count: int) -> str:
    """Return a number of devices as it is printed."""
    return f"{count} device{'s' * (count != 1)}"


def uses(args: Arguments, memory: Memory, *, gpu: bool) -> dict[Phase, dict[str, int]]:
    """Return what is on the device, by phase and use; without what --cpu_offload keeps on the host."""
    away = STATE if args.cpu_offload and gpu else ()
    return {
        phase: {use: size for use, size in memory.on_device(phase).items() if size and use not in away}
        for phase in memory.peaks
    }


def slack(peak: int, *, gpu: bool) -> int:
    """Return the bytes needed besides a peak of tensors."""
    return FIXED_SLACK * gpu + int(SHARE_SLACK * peak)


def at_peak(args: Arguments, memory: Memory, *, gpu: bool) -> dict[str, int]:
    """Return what is on the device, by use, in the phase that has the most."""
    return max(uses(args, memory, gpu=gpu).values(), key=lambda each: sum(each.values()))


def least(args: Arguments, memory: Memory, *, gpu: bool, compiled: bool) -> int:
    """Return a lower bound on a step's memory: all tensors or, with ``compiled`` layers, what fusion cannot avoid.

    That is the state, gathered parameters and, of layers that are checkpointed in full, their inputs.
    """
    phases = uses(args, memory, gpu=gpu)
    if not compiled:
        return max(sum(each.values()) for each in phases.values())
    sure = {*STATE, GATHERED, *([ACTIVATIONS] if args.activation_checkpointing == FULL else [])}
    return max(sum(each.get(use, 0) for use in sure) for phase, each in phases.items() if phase[0] == BACKWARD)


def needed(args: Arguments, memory: Memory, *, gpu: bool) -> int:
    """Return the bytes that each device must have."""
    peak = sum(at_peak(args, memory, gpu=gpu).values())
    return peak + slack(peak, gpu=gpu)


def on_host(args: Arguments, memory: Memory, *, gpu: bool) -> int:
    """Return the host memory of a GPU's tensors, in bytes; all but the optimizer's are page-locked."""
    return memory.host + (memory.pinned + memory.state[OPTIMIZER] if args.cpu_offload and gpu else 0)


def while_saving(args: Arguments, memory: Memory, *, gpu: bool) -> int:
    """Return the host memory of the copy that a save in the background makes, in bytes; of a GPU's, page-locked."""
    if gpu and not args.cpu_offload:
        return memory.saved
    return memory.state[PARAMETERS] + memory.state[OPTIMIZER]


def host_needed(args: Arguments, memory: Memory) -> int:
    """Return the host memory that a GPU's process needs, in bytes."""
    return on_host(args, memory, gpu=True) + HOST_SLACK


def tight(needed: int, there: int, *, gpu: bool) -> bool:
    """Return whether a run that fits may still run out of a GPU's memory."""
    return gpu and TIGHT * there < needed <= there
