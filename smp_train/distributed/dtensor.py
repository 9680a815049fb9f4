"""DTensor, wherever this torch has it, and the part of a tensor that this rank holds."""

from __future__ import annotations

from typing import Any

try:
    from torch.distributed.tensor import DTensor, Shard
except ImportError:  # torch 2.4, of SMP's older containers
    from torch.distributed._tensor import DTensor, Shard

__all__ = ["DTensor", "Shard", "local_tensor"]


def local_tensor(tensor: Any) -> Any:
    """Return the plain tensor that this rank holds of a DTensor; anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
