"""How a training step depends on the device that computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn


def _all_chunks(tokens: int, chunk: int) -> Iterable[int]:
    return range(0, tokens, chunk)


def _read_counts(counts: Tensor, rows: int) -> list[list[int]]:
    return counts.tolist()


@dataclass(frozen=True)
class DeviceProfile:
    """The device's properties that the loss, the gradient norm, offloading and expert parallelism depend on.

    Training takes `profile_of` its device. ``smp-train plan`` computes with fake tensors on the CPU and passes the
    profile of the device that it plans for.
    """

    device_type: str
    """``cuda`` or ``cpu``: decides the size of the loss's chunks and how the gradient norm is summed."""
    adds_to_float32: Callable[[torch.dtype], bool]
    """Whether one kernel adds the product of two matrices of this dtype to a float32 matrix."""
    offloadable: tuple[type[Tensor], ...] = (Tensor, nn.Parameter)
    """Tensor types that own plain memory and may be offloaded; all others stay on the device."""
    loss_chunks: Callable[[int, int], Iterable[int]] = _all_chunks
    """Returns the first token of each chunk of the loss to compute, from the number of tokens and the chunk size."""
    exchanged_rows: Callable[[Tensor, int], list[list[int]]] = _read_counts
    """Returns how many rows to send to each expert rank, and how many to receive from each.

    Its arguments are a tensor on the device with these numbers, for which training waits, and the total to send.
    """


@cache
def profile_of(device: torch.device) -> DeviceProfile:
    """Return the profile of a real device."""
    return DeviceProfile(device.type, partial(_adds_to_float32, device))


@cache
def _adds_to_float32(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda":
        return False
    factor = torch.zeros(16, 16, dtype=dtype, device=device)
    total = torch.zeros(16, 16, device=device)
    try:  # torch 2.8 has the operation but accepts no float32 summand
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError):
        return False
    return True
