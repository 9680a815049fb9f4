"""Mixtures of experts under tensor parallelism: each rank holds whole experts, and the router is replicated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from smp_train.parallel import local_parameters
from smp_train.parallel.sequence import SEQUENCE, gather_hidden, on_hidden_states


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
        raise ValueError(f"has {', '.join(parts) or 'nothing'} beside its experts, where a router is known alone")
    (router,) = parts.values()
    count = getattr(experts, "num_experts", None)
    for key, parameter in (*experts.named_parameters(), *router.named_parameters()):
        if "." in key or parameter.shape[0] != count:
            raise ValueError(f"holds {key}, which is not of one part per expert")
    return router
