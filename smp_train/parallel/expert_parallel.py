"""Mixtures of experts: each rank holds whole experts.

With expert parallelism (`distribute`), tokens are sent to the ranks of their experts and back. With tensor parallelism
only (`distribute_experts`), each rank routes all tokens and computes its own experts' tokens.
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
    """Return the layer's modules that hold the stacked weights of all experts, with their names.

    transformers sets attributes on these modules' classes, by which it chooses their kernel.
    """
    attributes = ("num_experts", "is_transposed")
    return [(name, m) for name, m in layer.named_modules() if all(hasattr(m, attribute) for attribute in attributes)]


def distribute(
    layers: Iterable[tuple[str, nn.Module]], mesh: DeviceMesh, profile: DeviceProfile
) -> dict[nn.Module, list[nn.Module]]:
    """Distribute the experts of every layer, whole and in order, over the ranks of ``mesh``; return them by layer.

    Each rank reads different rows (with tensor parallelism, a different part of them) and sends each token to the ranks
    of the token's experts: two all-to-all exchanges per layer, and two more in the backward pass.

    Args:
        layers: The decoder layers as (qualified name, module), parameters on the meta device.
        mesh: One-dimensional.
        profile: The device's profile.

    Raises:
        ConfigError: No layer has experts, or some experts are not stacked as in transformers 5.
    """
    by_layer: dict[nn.Module, list[nn.Module]] = {}
    flag = f"--expert_parallel_degree {mesh.size()}"
    for layer_name, layer in layers:
        for name, experts in stacked(layer):
            try:
                check_stacked(experts, experts.num_experts)
            except ValueError as cause:
                raise ConfigError(f"{flag}: {layer_name}.{name} {cause}; use --expert_parallel_degree 1") from cause
            local_parameters.distribute(experts, mesh, Shard(0))
            experts.num_experts //= mesh.size()
            local_parameters.compute_on_local(experts, None)
            experts.forward = partial(_exchange, experts.forward, experts.num_experts, mesh, profile)
            by_layer.setdefault(layer, []).append(experts)
    if not by_layer:
        raise ConfigError(f"{flag}: this model has no experts that transformers stacks; leave it at 1")
    return by_layer


@torch.compiler.disable
def _exchange(
    compute: Callable[..., Tensor], share: int, mesh: DeviceMesh, profile: DeviceProfile, hidden: Tensor,
    index: Tensor, weights: Tensor,
) -> Tensor:  # fmt: skip
    """Return the weighted sum of each token's experts, ``[tokens, width]``.

    The host waits for the device once, for the numbers of tokens to send and to receive, and once more if activation
    checkpointing recomputes the layer. Compiled layers have a graph break here, because these numbers, and so all
    shapes, change in every step.

    Args:
        compute: The forward of this rank's experts, with the arguments ``hidden``, ``index`` and ``weights``.
        share: Number of experts per rank.
        mesh: The ranks that hold the experts, in order.
        profile: The device's profile.
        hidden: ``[tokens, width]``.
        index: The experts of each token, int64 ``[tokens, k]``.
        weights: ``[tokens, k]``.
    """
    group = mesh.get_group()
    tokens, used = index.shape
    expert = index.flatten()
    order = expert.argsort(stable=True)
    sends = torch.zeros(share * group.size(), dtype=torch.int64, device=index.device)
    sends.scatter_add_(0, expert, torch.ones_like(expert))
    receives = collectives.wait_tensor(collectives.all_to_all_single(sends, None, None, group))
    per_rank = torch.stack([sends, receives]).view(2, group.size(), share).sum(dim=2)
    sent, received = profile.exchanged_rows(per_rank, len(expert))
    rows = _all_to_all(hidden[order // used], received, sent, group)
    # Received rows are ordered by rank, and each rank's rows by expert.
    local_expert = torch.arange(share, device=index.device).repeat(group.size())
    local_expert = local_expert.repeat_interleave(receives, output_size=len(rows))
    if not len(rows):
        # One row of zeros, so that the experts' weights have gradients of zero, not None.
        rows, local_expert = F.pad(rows, (0, 0, 0, 1)), local_expert.new_zeros(1)
    outputs = compute(rows, local_expert.unsqueeze(1), rows.new_ones(len(rows), 1))[: sum(received)]
    returned = _all_to_all(outputs, sent, received, group)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    of_token = returned[back].view(tokens, used, -1) * weights.unsqueeze(-1)
    return of_token.sum(dim=1).to(hidden.dtype)


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    result = collectives.all_to_all_single_autograd(rows.contiguous(), received, sent, group)
    return collectives.wait_tensor(result)


def repeat_router(moe: nn.Module, experts: nn.Module, mesh: DeviceMesh) -> None:
    """Replicate the router on all tensor ranks, after `distribute`; each rank has the gradient of its own tokens."""
    gate = _router(moe, experts)
    local_parameters.distribute(gate, mesh, Replicate())
    local_parameters.compute_on_local(gate, [Partial()])


def distribute_experts(moe: nn.Module, experts: Any, mesh: DeviceMesh) -> None:
    """Distribute experts over tensor ranks; each rank routes every token, and computes its own experts' tokens.

    Distributing whole experts, not slices of their matrices, keeps the fused gate-and-up matrix in one piece. The
    block's output is the sum over ranks, so every part of the block must be computed by one rank only.

    ``experts`` is the module in the block ``moe`` with the stacked weights of all experts. Raises `ValueError` if the
    block has more parts than a router and experts, or if the ranks do not divide the experts.
    """
    gate = _router(moe, experts)
    check_stacked(experts, experts.num_experts)
    degree, rank = mesh.size(), mesh.get_local_rank()
    if experts.num_experts % degree:
        raise ValueError(f"has {experts.num_experts} experts, which {degree} does not divide")
    share = experts.num_experts // degree
    first = rank * share
    local_parameters.distribute(experts, mesh, Shard(0))
    local_parameters.distribute(gate, mesh, Replicate())
    experts.num_experts = share
    # With this flag of transformers, its grouped products return zeros for experts on other ranks.
    experts._is_expert_parallel = True
    # Every rank has the whole router, but only the gradient of its own experts.
    local_parameters.compute_on_local(gate, [Partial()])
    local_parameters.compute_on_local(experts, None)

    def keep_local(module: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, index, weights = args
        is_local = (index >= first) & (index < first + share)
        # `share` is one past the last expert: the index that transformers skips.
        return hidden, torch.where(is_local, index - first, share), torch.where(is_local, weights, 0.0)

    experts.register_forward_pre_hook(keep_local)

    def scatter(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        partial = DTensor.from_local(output, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[Shard(SEQUENCE)]).to_local()

    moe.register_forward_pre_hook(on_hidden_states(lambda hidden: gather_hidden(hidden, mesh)), with_kwargs=True)
    moe.register_forward_hook(scatter)


def _router(moe: nn.Module, experts: Any) -> nn.Module:
    """Return the block's router. Raises `ValueError` if the block has further parts besides its experts."""
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
