"""What is kept of a layer's activations for the backward pass."""

from __future__ import annotations

from torch import nn


def checkpoint_layers(model: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
    """Keep only the input of every decoder layer and compute the rest again in the backward pass.

    The wrapper stores its module under another name; state dicts leave that part of the name out.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

    for name, layer in layers:
        parent, _, child = name.rpartition(".")
        wrapped = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT, preserve_rng_state=True)
        model.get_submodule(parent).register_module(child, wrapped)
