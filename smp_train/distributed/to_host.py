"""Numbers on their way from the device to the host, which does not wait for them at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ToHost:
    """A copy of a tensor to the host, queued where the tensor is on a GPU; on a CPU the tensor itself."""

    def __init__(self, values: Tensor) -> None:
        """Queue the copy."""
        self._host, self._copied = values, None
        if values.is_cuda:
            self._host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def values(self) -> Tensor:
        """Return the copy; waits for what was queued up to it, not for what came after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host

    def tolist(self) -> list[Any]:
        """Return the numbers; waits as `values` does."""
        return self.values().tolist()
