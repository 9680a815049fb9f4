"""The global gradient norm over tensor, expert and shard ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests import standin

from .state_handler import state


@torch.no_grad()
def clip_grad_norm_(model: Any, max_norm: float) -> Tensor:
    """Scale gradients to a global 2-norm of at most ``max_norm`` and return the norm before; change nothing else."""
    standin.record("clip_grad_norm_", max_norm=max_norm, root=type(model).__name__)
    sums = torch.zeros(2, dtype=torch.float64)
    gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    for name, gradient in gradients:
        own = state.split_dim(name) is not None
        sums[int(own)] += gradient.double().pow(2).sum().cpu()
    if getattr(state, "sharded", True):
        dist.all_reduce(sums, group=state.group("shard"))
    whole = sums[1:].clone()
    if state.inner > 1:
        dist.all_reduce(whole, group=state.group("tensor" if state.tp_size > 1 else "expert"))
    norm = (sums[0] + whole[0]).sqrt().float()
    if norm > max_norm:
        for _, gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))
    return norm
