"""Asynchronous copies of numbers from the device to the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ToHost:
    """A copy of a GPU's tensor to the host, which runs in the GPU's queue; for a CPU's tensor, the tensor itself."""

    def __init__(self, values: Tensor) -> None:
        """Start the copy."""
        self._host, self._copied = values, None
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def values(self) -> Tensor:
        """Wait for the copy, but not for work queued after it, and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def tolist(self) -> list[Any]:
        """Return the numbers, after waiting as `values` does."""
        return self.values().tolist()
