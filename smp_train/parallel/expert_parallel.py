"""Mixtures of experts: each rank holds whole experts.

With an expert dimension (`distribute`) tokens are sent to the ranks of their experts and back. With tensor parallelism
alone (`distribute_experts`) each rank routes all tokens and computes those of its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from smp_train.distributed.device_profile import DeviceProfile
from smp_train.errors import ConfigError
from smp_train.parallel import local_parameters
from smp_train.parallel.sequence import SEQUENCE, gather_hidden, on_hidden_states


def stacked(layer: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules of a layer, with their names, that hold the weights of all its experts, stacked.

    transformers marks their classes: it chooses their kernel by what it sets on them.
    """
    modules = layer.named_modules()
    return [(name, each) for name, each in modules if hasattr(each, "num_experts") and hasattr(each, "is_transposed")]


def distribute(
    layers: Iterable[tuple[str, nn.Module]], mesh: DeviceMesh, profile: DeviceProfile
) -> dict[nn.Module, list[nn.Module]]:
    """Distribute the experts of every layer, whole and in order, over the ranks of ``mesh``; return them by layer.

    Each rank reads rows of its own (or, with tensor parallelism, its own part of them) and sends each token to the
    ranks of its experts: two all-to-all exchanges per layer, and as many in the backward pass.

    Args:
        layers: The decoder layers as (qualified name, module), parameters on the meta device.
        mesh: One-dimensional.
        profile: Of the device.

    Raises:
        ConfigError: No layer has experts, or some are not stacked as transformers 5 does.
    """
    found: dict[nn.Module, list[nn.Module]] = {}
    given = f"--expert_parallel_degree {mesh.size()}"
    for layer_name, layer in layers:
        for name, experts in stacked(layer):
            try:
                check_stacked(experts, experts.num_experts)
            except ValueError as cause:
                raise ConfigError(f"{given}: {layer_name}.{name} {cause}; use --expert_parallel_degree 1") from cause
            _distribute(experts, mesh, profile)
            found.setdefault(layer, []).append(experts)
    if not found:
        raise ConfigError(f"{given}: this model has no experts that transformers stacks; leave it at 1")
    return found


def _distribute(experts: Any, mesh: DeviceMesh, profile: DeviceProfile) -> None:
    local_parameters.place(experts, mesh, Shard(0))
    experts.num_experts //= mesh.size()
    local_parameters.compute_on_local(experts, None)
    experts.forward = partial(_exchange, experts.forward, experts.num_experts, mesh.get_group(), profile)


@torch.compiler.disable
def _exchange(
    compute: Callable[..., Tensor], share: int, group: dist.ProcessGroup, profile: DeviceProfile, hidden: Tensor,
    index: Tensor, weights: Tensor,
) -> Tensor:  # fmt: skip
    """Return the sum over the experts of each token of their weighted outputs, ``[tokens, width]``.

    The host waits for the device once, for the numbers of tokens to send and to receive; again where a checkpoint
    computes the layer a second time. Compiled layers break here: these numbers, and so all shapes, change from step to
    step.

    Args:
        compute: The forward of this rank's experts, as this function from ``hidden`` on.
        share: Number of experts per rank.
        group: The ranks that have them, in order.
        profile: Of the device.
        hidden: ``[tokens, width]``.
        index: The experts of each token, int64 ``[tokens, k]``.
        weights: ``[tokens, k]``.
    """
    tokens, used = index.shape
    expert = index.flatten()
    order = expert.argsort(stable=True)
    sends = torch.zeros(share * group.size(), dtype=torch.int64, device=index.device)
    sends.scatter_add_(0, expert, torch.ones_like(expert))
    receives = collectives.wait_tensor(collectives.all_to_all_single(sends, None, None, group))
    per_rank = torch.stack([sends, receives]).view(2, group.size(), share).sum(dim=2)
    sent, received = profile.exchanged_rows(per_rank, len(expert))
    rows = _all_to_all(hidden[order // used], received, sent, group)
    # Rows come by rank, and from each rank by expert.
    own = torch.arange(share, device=index.device).repeat(group.size())
    own = own.repeat_interleave(receives, output_size=len(rows))
    if not len(rows):
        # One row of zeros: the experts' weights take part in the backward pass, with gradients of zero.
        rows, own = F.pad(rows, (0, 0, 0, 1)), own.new_zeros(1)
    outputs = compute(rows, own.unsqueeze(1), rows.new_ones(len(rows), 1))[: sum(received)]
    returned = _all_to_all(outputs, sent, received, group)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    of_token = returned[back].view(tokens, used, -1) * weights.unsqueeze(-1)
    return of_token.sum(dim=1).to(hidden.dtype)


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    result = collectives.all_to_all_single_autograd(rows.contiguous(), received, sent, group)
    return collectives.wait_tensor(result)


def repeat_router(moe: nn.Module, experts: nn.Module, mesh: DeviceMesh) -> None:
    """Keep the router whole on every tensor rank, beside `distribute`: each has the gradient of its own tokens."""
    gate = _router(moe, experts)
    local_parameters.place(gate, mesh, Replicate())
    local_parameters.compute_on_local(gate, [Partial()])


def distribute_experts(moe: nn.Module, experts: Any, mesh: DeviceMesh) -> None:
    """Distribute a mixture's experts over the ranks: each rank routes every token, and computes those of its experts.

    Distributing whole experts, not slices of their matrices, keeps the fused gate-and-up matrix in one piece. The
    block's output is the sum over ranks, so no part of the block may be computed by every rank.

    Args:
        moe: The block: a router and its experts.
        experts: The module in it that holds the weights of all experts, stacked.
        mesh: The tensor mesh.

    Raises:
        ValueError: The block has other parts as well, or the experts do not divide.
    """
    gate = _router(moe, experts)
    check_stacked(experts, experts.num_experts)
    degree, rank = mesh.size(), mesh.get_local_rank()
    if experts.num_experts % degree:
        raise ValueError(f"has {experts.num_experts} experts, which {degree} does not divide")
    share = experts.num_experts // degree
    first = rank * share
    local_parameters.place(experts, mesh, Shard(0))
    local_parameters.place(gate, mesh, Replicate())
    experts.num_experts = share
    # transformers' own flag: its grouped products then zero the outputs of experts on other ranks.
    experts._is_expert_parallel = True
    # The router's weight is whole on every rank, but each rank sees the gradient of its own experts only.
    local_parameters.compute_on_local(gate, [Partial()])
    local_parameters.compute_on_local(experts, None)

    def keep_own(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, index, weights = args
        own = (index >= first) & (index < first + share)
        # `share` is one past the last expert: the index that transformers skips.
        return hidden, torch.where(own, index - first, share), torch.where(own, weights, 0.0)

    experts.register_forward_pre_hook(keep_own)

    def scatter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        partial = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[Shard(SEQUENCE)]).to_local()

    moe.register_forward_pre_hook(on_hidden_states(lambda hidden: gather_hidden(hidden, mesh)), with_kwargs=True)
    moe.register_forward_hook(scatter)


def _router(moe: nn.Module, experts: Any) -> nn.Module:
    """Return the one part of the block beside its experts; raise `ValueError` for a block of another make."""
    parts = {name: child for name, child in moe.named_children() if child is not experts and list(child.parameters())}
    if len(parts) != 1 or list(moe.parameters(recurse=False)):
        raise ValueError(f"has {', '.join(parts) or 'nothing'} beside its experts; only a single router is supported")
    (router,) = parts.values()
    check_stacked(router, len(next(experts.parameters())))
    return router


def check_stacked(module: nn.Module, count: int) -> None:
    """Raise `ValueError` unless every parameter has one row or matrix for each of ``count`` experts."""
    for key, parameter in module.named_parameters():
        if "." in key or parameter.shape[0] != count:
            raise ValueError(f"holds {key}, whose first dimension is not the number of experts")
