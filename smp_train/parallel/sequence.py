"""Sequence parallelism: hidden states are split along the sequence between the blocks and whole inside them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._pytree import tree_leaves

SEQUENCE = 1
"""The dimension of hidden states ``[batch, seq, width]`` that is split outside the blocks."""

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def on_hidden_states(change: Callable[[Tensor], Tensor]) -> Hook:
    """Return a hook that changes a module's hidden states, whether passed by position or by name."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def scatter_whole(mesh: DeviceMesh) -> Hook:
    """Return a hook that keeps this rank's part of the sequence of the first layer's input.

    The embedding's output is whole, so that transformers computes the right masks and positions from it.
    """

    def scatter(hidden: Tensor) -> Tensor:
        whole = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(SEQUENCE)]).to_local()

    return on_hidden_states(scatter)


def gather_whole(mesh: DeviceMesh) -> Hook:
    """Return a hook that gives a block the whole sequence as a DTensor, whose gradient is reduce-scattered once."""

    def gather(hidden: Tensor) -> Tensor:
        part = DTensor.from_local(hidden, mesh, [Shard(SEQUENCE)], run_check=False)
        return part.redistribute(placements=[Replicate()])

    return on_hidden_states(gather)


def wait_for_output(module: nn.Module, args: Any, output: Any) -> None:
    """Hook that waits for a block's reduced output: until then torch holds the result of the collective.

    Recomputation stops at the last tensor that the backward pass needs. With parallel blocks (GPT-NeoX, Phi) it stops
    before the first block's output is read, and without the hook every step would leak one tensor per layer.
    """
    for leaf in tree_leaves(output):
        if isinstance(leaf, AsyncCollectiveTensor):
            leaf.wait()


def separate_dropout(layers: list[nn.Module], mesh: DeviceMesh) -> None:
    """Draw the layers' dropout from a random stream per rank; the embedding's from the ranks' common stream.

    Every rank has the whole output of the embedding, but different tokens in the layers.
    """
    cuda, shared = mesh.device_type == "cuda", list[Tensor]()
    generator = torch.cuda.default_generators[torch.cuda.current_device()] if cuda else torch.default_generator

    def enter(module: nn.Module, args: Any) -> None:
        if module.training:
            shared[:] = [generator.get_state()]
            seeds = [random.getrandbits(63) for _ in range(mesh.size())]  # equal on all tensor ranks
            generator.manual_seed(seeds[mesh.get_local_rank()])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if shared:
            generator.set_state(shared.pop())

    layers[0].register_forward_pre_hook(enter)
    layers[-1].register_forward_hook(leave)


def gather_hidden(hidden: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the whole sequence of hidden states that are split along it, as a plain tensor.

    Each rank's gradient is one summand of the true gradient: the backward pass reduce-scatters it.
    """
    part = DTensor.from_local(hidden, mesh, [Shard(SEQUENCE)], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
