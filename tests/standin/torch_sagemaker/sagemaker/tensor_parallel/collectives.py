"""Collectives that autograd goes through, over a group of the state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..state_handler import state


def gathered(value: Tensor, kind: str, dim: int) -> Tensor:
    """Return the parts of all ranks of a group, joined along ``dim``; no gradient."""
    parts = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(state.groups[kind].size())]
    dist.all_gather(parts, value.contiguous(), group=state.group(kind))
    return torch.cat(parts, dim)


def own_part(value: Tensor, kind: str, dim: int) -> Tensor:
    """Return this rank's part along ``dim``."""
    group = state.group(kind)
    return value.chunk(group.size(), dim)[dist.get_rank(group)].contiguous()


def summed(value: Tensor, kind: str) -> Tensor:
    """Return the sum over the ranks of a group; no gradient."""
    value = value.contiguous().clone()
    dist.all_reduce(value, group=state.group(kind))
    return value


class Copy(torch.autograd.Function):
    """The same input on every rank; its gradients are added up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return summed(gradient, ctx.kind), None


class Sum(torch.autograd.Function):
    """Partial results added up."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, kind: str) -> Tensor:
        return summed(value, kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Gather(torch.autograd.Function):
    """The parts of all ranks; each rank's use of a part adds to its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, kind: str, dim: int) -> Tensor:
        ctx.kind, ctx.dim = kind, dim
        return gathered(value, kind, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return own_part(summed(gradient, ctx.kind), ctx.kind, ctx.dim), None, None


class SumOwn(torch.autograd.Function):
    """Partial results for all ranks' parts added up, of which each keeps its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, kind: str, dim: int) -> Tensor:
        ctx.kind, ctx.dim = kind, dim
        return own_part(summed(value, kind), kind, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gathered(gradient, ctx.kind, ctx.dim), None, None


class Scale(torch.autograd.Function):
    """The value as it is, its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def average_gradients(names: Iterable[str], module: nn.Module, inputs: Any = None) -> None:
    """Let the gradients of a module's own parameters be averaged over expert ranks in the backward pass.

    To be called before its forward pass. A second time on the same tensor, of tied weights, it changes nothing.
    """
    for name in names:
        weight = getattr(module, name)  # inside FSDP no parameter, but a view of the flat one
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            weight.register_hook(lambda gradient: summed(gradient, "expert") / state.ep_size)
