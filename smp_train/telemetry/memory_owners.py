"""What holds the memory of a device that ran out of it, and which flags to change first."""

from __future__ import annotations

import gc
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from smp_train.arguments import Arguments
from smp_train.arguments.flag import command_line
from smp_train.arguments.tuning import MORE_DEVICES, Uses, remedies
from smp_train.distributed import ALL_RANKS, Runtime, heartbeat
from smp_train.distributed.degrees import Degrees
from smp_train.distributed.dtensor import local_tensor
from smp_train.errors import SmpTrainError, no_memory
from smp_train.telemetry.memory_tracker import dump, rss_gib

log = logging.getLogger("smp_train.memory")

OWNERS = 5
FLAGS = 4
"""Changes that are named at most."""
PIECES_FROM = 0.1
"""Part of the memory that the allocator may keep in unused pieces before that is the first thing to change."""
OTHERS, PIECES = "activations and temporary tensors", "unused pieces kept by the allocator"
LOGITS, SO_FAR = "logits and what the loss makes of them", "weights made so far"
_GIB = 1024**3
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def owners(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, device: torch.device,
    widths: Collection[int] = (),
) -> list[tuple[str, float]]:  # fmt: skip
    """Return what holds this rank's memory on the device and how many GiB, the largest first; not collective.

    What is no weight, gradient, state, buffer or logit is found by difference: from the allocator's figure on a GPU,
    where gathered layers are part of it, and from the resident memory on a CPU, where the program itself is. Without a
    ``model`` that is what has been built of one. ``widths`` are the sizes of the vocabulary, or of a rank's part.
    """
    counted: Counter[str] = Counter()
    layers: Counter[str] = Counter()

    def count(owner: str, tensor: object) -> int:
        local = local_tensor(tensor) if isinstance(tensor, torch.Tensor) else None
        size = local.numel() * local.element_size() if local is not None and local.device.type == device.type else 0
        counted[owner] += size
        return size

    rest, model = (SO_FAR, nn.Module()) if model is None else (OTHERS, model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    of_head = {id(parameter) for parameter in head.parameters()} if head is not None else ()
    for name, parameter in model.named_parameters():
        layer = _LAYER.search(name)
        other = "weights of the head" if id(parameter) in of_head else "weights of embeddings and norms"
        size = count("weights of layers" if layer else other, parameter)
        if layer:
            layers[name[: layer.end(1)]] += size
        count("gradients", parameter.grad)
    for buffer in model.buffers():
        count("buffers", buffer)
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            count("optimizer state", value)
    counted[LOGITS] = _of_width(widths, device)
    found = {name: size / _GIB for name, size in counted.items()}
    if layers:
        title = f"weights of {len(layers)} layers, at most {max(layers.values()) / _GIB:.3g} GiB each"
        found[title] = found.pop("weights of layers")
    known = sum(counted.values()) / _GIB
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device) / _GIB, torch.cuda.memory_reserved(device) / _GIB
        free, total = (each / _GIB for each in torch.cuda.mem_get_info(device))
        found[rest], found[PIECES] = allocated - known, reserved - allocated
        found["CUDA, NCCL and other processes"] = total - free - reserved
    else:
        found[f"{rest}, and the program"] = rss_gib() - known
    return sorted(((name, size) for name, size in found.items() if size > 0), key=lambda each: -each[1])


def _of_width(widths: Collection[int], device: torch.device) -> int:
    """Return the bytes of the tensors that Python holds whose last dimension is one of ``widths``."""
    found: dict[int, int] = {}
    for each in gc.get_objects():
        with suppress(Exception):  # of a tensor without memory of its own
            if issubclass(type(each), torch.Tensor) and each.dim() > 1 and each.shape[-1] in widths:
                storage = local_tensor(each).untyped_storage()
                found[storage.data_ptr()] = storage.nbytes() if storage.device.type == device.type else 0
    return sum(found.values())


def changes(
    args: Arguments, held: list[tuple[str, float]], degrees: Degrees, local_world_size: int, *, on_gpu: bool,
    smp: bool = False,
) -> list[str]:  # fmt: skip
    """Return the changes that lower what is largest, the first to be tried first."""
    total = sum(size for _, size in held)
    pieces = dict(held).get(PIECES, 0.0) >= PIECES_FROM * total
    activations = sum(size for name, size in held if name.startswith((OTHERS, LOGITS)))
    state = sum(size for name, size in held if name.startswith(("weights", "gradients", "optimizer")))
    # What was not allocated is not among what is held: it may be logits as well as activations.
    uses = Uses(state, working=activations, head=activations)
    found = remedies(args, uses, degrees, local_world_size, gpu=on_gpu, smp=smp)
    # Memory ran out before the step had all of its tensors, so the host needs at least what is held now.
    host = {"cpu_offload": state, "sm_activation_offloading": activations}
    named = []
    for flags in filter(None, found):
        sizes = [f" (with at least {host[name]:.3g} GiB of host memory per rank)" for name in flags if name in host]
        named.append(command_line(flags) + "".join(sizes))
    last = ["a smaller --max_context_width", MORE_DEVICES]
    named += last if activations >= state else last[::-1]
    return [*["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"] * pieces, *named][:FLAGS]


def table(held: list[tuple[str, float]]) -> list[str]:
    """Return the rows of the largest owners."""
    total = sum(size for _, size in held)
    return [f"memory GiB | {size:8.3f} | {100 * size / total:3.0f} % | {name}" for name, size in held[:OWNERS]]


def out_of_memory(
    failure: BaseException, args: Arguments, degrees: Degrees, ranks: Runtime, model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None, *, device: torch.device, step: int = 0, folder: Path, smp: bool,
) -> SmpTrainError | None:  # fmt: skip
    """Return the error that says who holds the memory and what to change, and log the table; not collective.

    None where ``failure`` is another one. To be called where it is caught: its frames still hold the activations.
    ``step`` is the one being made, without a ``model`` that one is built; a snapshot goes to ``folder``.
    """
    said = no_memory(failure) if isinstance(failure, Exception) and not isinstance(failure, SmpTrainError) else None
    if said is None:
        return None
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 0)
    held = owners(model, optimizer, device, {vocabulary, vocabulary // args.tensor_parallel_degree} - {0})
    for row in table(held):
        log.error("%s", row, extra=ALL_RANKS)
    dump(folder, ranks.rank)
    change = changes(args, held, degrees, ranks.local_world_size, on_gpu=device.type == "cuda", smp=smp)
    largest = ", ".join(f"{name} {size:.3g} GiB" for name, size in held[:OWNERS])
    where = "while the model is built" if model is None else f"in step {step}, {heartbeat.PHASES[heartbeat.phase]}"
    return SmpTrainError(
        f"out of memory {where}: {said}; held by {largest}; change, in this order: {'; '.join(change)}"
    )


@contextmanager
def while_building(
    args: Arguments, degrees: Degrees, ranks: Runtime, device: torch.device, folder: Path, *, smp: bool
) -> Iterator[None]:  # fmt: skip
    """Raise the error of `out_of_memory` where memory runs out in the body; not collective."""
    try:
        yield
    except Exception as failure:
        error = out_of_memory(failure, args, degrees, ranks, device=device, folder=folder, smp=smp)
        if error is not None:
            raise error from failure
        raise
