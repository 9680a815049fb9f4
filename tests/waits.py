"""What would make the host wait for a device, counted on a CPU."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique2", "_unique2"}
"""Operations of ATen that a host waits in for a device."""


class Waits(TorchDispatchMode):
    """Collects the operations that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITS:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))
