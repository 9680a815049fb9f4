"""The error of a run that ran out of memory: the largest owners of the memory, and the flags to change first."""

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

OWNERS, FLAGS = 5, 4
"""The error names at most this many owners and changes."""
PIECES_FROM = 0.1
"""If unused pieces take at least this fraction of the memory, the error first proposes the allocator's setting."""
OTHERS, PIECES = "activations and temporary tensors", "unused pieces kept by the allocator"
LOGITS, SO_FAR = "logits and what the loss makes of them", "weights made so far"
_GIB = 1024**3
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


def owners(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, device: torch.device,
    widths: Collection[int] = (),
) -> list[tuple[str, float]]:  # fmt: skip
    """Return the owners of this rank's memory on the device with their GiB, the largest first; not collective.

    Weights, gradients, optimizer state, buffers and logits are counted. The rest of the allocator's total (on a
    CPU, of the resident memory) is activations and temporary tensors, gathered layers included; on a CPU it includes
    the program. Without a ``model``, the rest is the weights built so far. A tensor counts as logits if its last
    dimension is in ``widths``: the size of the vocabulary, or of a rank's part of it.
    """
    counted: Counter[str] = Counter()
    layers: Counter[str] = Counter()

    def count(owner: str, tensor: object) -> int:
        local = local_tensor(tensor) if isinstance(tensor, torch.Tensor) else None
        size = local.numel() * local.element_size() if local is not None and local.device.type == device.type else 0
        counted[owner] += size
        return size

    uncounted, model = (SO_FAR, nn.Module()) if model is None else (OTHERS, model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    head_ids = {id(parameter) for parameter in head.parameters()} if head is not None else ()
    for name, parameter in model.named_parameters():
        layer = _LAYER.search(name)
        outside = "weights of the head" if id(parameter) in head_ids else "weights of embeddings and norms"
        size = count("weights of layers" if layer else outside, parameter)
        if layer:
            layers[name[: layer.end(1)]] += size
        count("gradients", parameter.grad)
    for buffer in model.buffers():
        count("buffers", buffer)
    for state in optimizer.state.values() if optimizer is not None else ():
        for value in state.values():
            count("optimizer state", value)
    counted[LOGITS] = _logits_bytes(widths, device)
    sizes = {name: size / _GIB for name, size in counted.items()}
    if layers:
        title = f"weights of {len(layers)} layers, at most {max(layers.values()) / _GIB:.3g} GiB each"
        sizes[title] = sizes.pop("weights of layers")
    known = sum(counted.values()) / _GIB
    if device.type == "cuda":
        allocated, reserved = torch.cuda.memory_allocated(device) / _GIB, torch.cuda.memory_reserved(device) / _GIB
        free, total = (size / _GIB for size in torch.cuda.mem_get_info(device))
        sizes[uncounted], sizes[PIECES] = allocated - known, reserved - allocated
        sizes["CUDA, NCCL and other processes"] = total - free - reserved
    else:
        sizes[f"{uncounted}, and the program"] = rss_gib() - known
    return sorted(((name, size) for name, size in sizes.items() if size > 0), key=lambda owner: -owner[1])


def _logits_bytes(widths: Collection[int], device: torch.device) -> int:
    """Return the bytes of all live tensors whose last dimension is in ``widths``."""
    bytes_at: dict[int, int] = {}
    for tensor in gc.get_objects():
        with suppress(Exception):  # some tensors, such as fake ones, have no storage
            if issubclass(type(tensor), torch.Tensor) and tensor.dim() > 1 and tensor.shape[-1] in widths:
                storage = local_tensor(tensor).untyped_storage()
                bytes_at[storage.data_ptr()] = storage.nbytes() if storage.device.type == device.type else 0
    return sum(bytes_at.values())


def changes(
    args: Arguments, owned: list[tuple[str, float]], degrees: Degrees, local_world_size: int, *, on_gpu: bool,
    smp: bool = False,
) -> list[str]:  # fmt: skip
    """Return the changes that lower the largest owners, in the order to try them."""
    total = sum(size for _, size in owned)
    pieces = dict(owned).get(PIECES, 0.0) >= PIECES_FROM * total
    activations = sum(size for name, size in owned if name.startswith((OTHERS, LOGITS)))
    state = sum(size for name, size in owned if name.startswith(("weights", "gradients", "optimizer")))
    # The failed allocation belongs to no owner: it may have been logits or activations.
    uses = Uses(state, working=activations, head=activations)
    flag_sets = remedies(args, uses, degrees, local_world_size, gpu=on_gpu, smp=smp)
    # The step had not allocated all of its tensors yet, so the host needs at least the memory in use now.
    host = {"cpu_offload": state, "sm_activation_offloading": activations}
    lines = []
    for flags in filter(None, flag_sets):
        sizes = [f" (with at least {host[name]:.3g} GiB of host memory per rank)" for name in flags if name in host]
        lines.append(command_line(flags) + "".join(sizes))
    last = ["a smaller --max_context_width", MORE_DEVICES]
    lines += last if activations >= state else last[::-1]
    return [*["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment"] * pieces, *lines][:FLAGS]


def out_of_memory(
    failure: BaseException, args: Arguments, degrees: Degrees, ranks: Runtime, model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None, *, device: torch.device, step: int = 0, folder: Path, smp: bool,
) -> SmpTrainError | None:  # fmt: skip
    """Return the error that names the memory's owners and the changes, and log the table; not collective.

    Return None if ``failure`` is not a lack of memory. Call this in the ``except`` block, while the failure's frames
    keep the activations alive. Without a ``model``, the failure came while it was built. A snapshot goes to ``folder``.
    """
    reason = no_memory(failure) if isinstance(failure, Exception) and not isinstance(failure, SmpTrainError) else None
    if reason is None:
        return None
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", 0)
    owned = owners(model, optimizer, device, {vocabulary, vocabulary // args.tensor_parallel_degree} - {0})
    total = sum(size for _, size in owned)
    for name, size in owned[:OWNERS]:
        log.error("memory GiB | %8.3f | %3.0f %% | %s", size, 100 * size / total, name, extra=ALL_RANKS)
    dump(folder, ranks.rank)
    change = changes(args, owned, degrees, ranks.local_world_size, on_gpu=device.type == "cuda", smp=smp)
    largest = ", ".join(f"{name} {size:.3g} GiB" for name, size in owned[:OWNERS])
    when = "while the model is built" if model is None else f"in step {step}, {heartbeat.PHASES[heartbeat.phase]}"
    return SmpTrainError(
        f"out of memory {when}: {reason}; held by {largest}; change, in this order: {'; '.join(change)}"
    )


@contextmanager
def while_building(
    args: Arguments, degrees: Degrees, ranks: Runtime, device: torch.device, folder: Path, *, smp: bool
) -> Iterator[None]:  # fmt: skip
    """Raise the error of `out_of_memory` if memory runs out in the body; not collective."""
    try:
        yield
    except Exception as failure:
        error = out_of_memory(failure, args, degrees, ranks, device=device, folder=folder, smp=smp)
        if error is not None:
            raise error from failure
        raise
