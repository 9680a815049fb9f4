"""What holds the memory of a device that ran out of it, and which flags to change first."""

from __future__ import annotations

import logging
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from smp_train.arguments import Arguments
from smp_train.distributed import ALL_RANKS, Runtime, heartbeat
from smp_train.distributed.degrees import plan
from smp_train.distributed.dtensor import local_tensor
from smp_train.errors import SmpTrainError, no_memory
from smp_train.telemetry.memory_tracker import rss_gib

log = logging.getLogger("smp_train.memory")

OWNERS = 5
FLAGS = 4
"""Changes that are named at most."""
PIECES_FROM = 0.1
"""Part of the memory that the allocator may keep in unused pieces before that is the first thing to change."""
OTHERS, PIECES = "activations and temporary tensors", "unused pieces kept by the allocator"
_GIB = 1024**3
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def owners(model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> list[tuple[str, float]]:
    """Return what holds this rank's memory on the device and how many GiB, the largest first; not collective.

    What is no weight, gradient, state or buffer is found by difference: from the allocator's figure on a GPU, where
    gathered layers and the loss are part of it, and from the resident memory on a CPU, where the program itself is.
    """
    counted: Counter[str] = Counter()
    layers: Counter[str] = Counter()

    def count(owner: str, tensor: object) -> int:
        local = local_tensor(tensor) if isinstance(tensor, torch.Tensor) else None
        size = local.numel() * local.element_size() if local is not None and local.device.type == device.type else 0
        counted[owner] += size
        return size

    for name, parameter in model.named_parameters():
        layer = _LAYER.search(name)
        size = count("weights of layers" if layer else "weights of embeddings, head and norms", parameter)
        if layer:
            layers[name[: layer.end(1)]] += size
        count("gradients", parameter.grad)
    for buffer in model.buffers():
        count("buffers", buffer)
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            count("optimizer state", value)
    found = {name: size / _GIB for name, size in counted.items()}
    if layers:
        title = f"weights of {len(layers)} layers, at most {max(layers.values()) / _GIB:.3g} GiB each"
        found[title] = found.pop("weights of layers")
    known = sum(counted.values()) / _GIB
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device) / _GIB, torch.cuda.memory_reserved(device) / _GIB
        free, total = (each / _GIB for each in torch.cuda.mem_get_info(device))
        found[OTHERS], found[PIECES] = allocated - known, reserved - allocated
        found["CUDA, NCCL and other processes"] = total - free - reserved
    else:
        found[f"{OTHERS}, and the program"] = rss_gib() - known
    return sorted(((name, size) for name, size in found.items() if size > 0), key=lambda each: -each[1])


def changes(
    args: Arguments, held: list[tuple[str, float]], *, sharing: int, world_size: int, on_gpu: bool
) -> list[str]:
    """Return the changes that lower what is largest, the first to be tried first.

    ``sharing`` is the number of ranks among which the model's state is shared.
    """
    for_state = [
        (sharing < world_size, f"--hybrid_shard_degree {world_size}"),
        (on_gpu and not args.cpu_offload, "--cpu_offload 1"),
        (True, "more GPUs"),
    ]
    half, steps = max(1, args.train_batch_size // 2), 2 * args.gradient_accumulation_steps
    for_activations = [
        (not args.chunked_loss, "--chunked_loss 1"),
        (args.activation_checkpointing != "full", "--activation_checkpointing full"),
        (args.train_batch_size > 1, f"--train_batch_size {half} --gradient_accumulation_steps {steps}"),
        (not args.sm_activation_offloading, "--sm_activation_offloading 1"),
        (True, "a smaller --max_context_width or a larger --context_parallel_degree"),
    ]
    total = sum(size for _, size in held)
    pieces = dict(held).get(PIECES, 0.0) >= PIECES_FROM * total
    activations = sum(size for name, size in held if name.startswith(OTHERS))
    state = sum(size for name, size in held if name.startswith(("weights", "gradients", "optimizer")))
    first, second = (for_activations, for_state) if activations >= state else (for_state, for_activations)
    named = [text for applies, text in (*first[:-1], *second[:-1], first[-1], second[-1]) if applies]
    return [*["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"] * pieces, *named][:FLAGS]


def table(held: list[tuple[str, float]]) -> list[str]:
    """Return the rows of the largest owners."""
    total = sum(size for _, size in held)
    return [f"memory GiB | {size:8.3f} | {100 * size / total:3.0f} % | {name}" for name, size in held[:OWNERS]]


def dump(path: Path) -> bool:
    """Write what the GPU's allocator holds to a file for <https://pytorch.org/memory_viz>; False without a GPU."""
    with suppress(Exception):  # the run fails for another reason, which is to be reported
        if torch.cuda.is_available():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(path))
            return True
    return False


def out_of_memory(
    failure: BaseException, args: Arguments, ranks: Runtime, model: nn.Module, optimizer: torch.optim.Optimizer, *,
    device: torch.device, step: int, folder: Path, smp: bool,
) -> SmpTrainError | None:  # fmt: skip
    """Return the error that says who holds the memory and what to change, and log the table; not collective.

    None where ``failure`` is another one. To be called where it is caught: its frames still hold the activations.
    ``step`` is the one being made; a snapshot goes to ``folder``.
    """
    said = no_memory(failure) if isinstance(failure, Exception) and not isinstance(failure, SmpTrainError) else None
    if said is None:
        return None
    held = owners(model, optimizer, device)
    snapshot = folder / f"memory-rank{ranks.rank}.pickle"
    for row in table(held):
        log.error("%s", row, extra=ALL_RANKS)
    if dump(snapshot):
        log.error("memory snapshot for https://pytorch.org/memory_viz: %s", snapshot, extra=ALL_RANKS)
    sharing = plan(args, ranks.world_size, ranks.local_world_size, smp=smp).sharing
    change = changes(args, held, sharing=sharing, world_size=ranks.world_size, on_gpu=device.type == "cuda")
    largest = ", ".join(f"{name} {size:.3g} GiB" for name, size in held[:OWNERS])
    return SmpTrainError(
        f"out of memory in step {step}, {heartbeat.PHASES[heartbeat.phase]}: {said}; held by {largest}; change, in "
        f"this order: {'; '.join(change)}"
    )
