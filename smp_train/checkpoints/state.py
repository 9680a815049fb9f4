"""The state of model and optimizer under Hugging Face parameter names, as live tensors that are loaded in
place.

Why not `torch.distributed.checkpoint.state_dict`: on a fresh optimizer it takes a step to create the state,
and so stores a step count of 1 that was never taken; it restores hyper-parameters over those of the run; and
it stores tied weights once per name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Prefixes that wrappers put into parameter names: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def canonical_name(name: str) -> str:
    """Return a parameter's Hugging Face name: without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return the state to save, or to load in place: nothing is copied, no collective is entered.

    The tensors are those of the model and optimizer themselves (DTensors where these are sharded), so after
    `Checkpoint.load` of this dict both are restored, bit for bit. Layout:
    ``{"model": {name: tensor}, "optim": {"state": {name: {"exp_avg": ..., "exp_avg_sq": ..., "step":
    ...}}}}``. Persistent buffers are part of ``model``. Tied weights appear once, under their first name.
    Learning rate, betas and weight decay are not part of it: they come from the arguments. Raises ValueError
    for an optimizer that holds a parameter which the model does not.
    """
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    # state_dict() rather than named_parameters(): its hooks make FSDP2 put the sharded parameters back in
    # place.
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in names:
            names[id(value)] = canonical_name(name)
            tensors[canonical_name(name)] = value.detach()
    state: dict[str, Any] = {"model": tensors}
    if optimizer is not None:
        create_optimizer_state(optimizer)
        state["optim"] = {"state": _optimizer_state(optimizer, names)}
    return state


def _optimizer_state(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, dict[str, Any]]:
    found = {}
    for parameter, values in optimizer.state.items():
        if id(parameter) not in names:
            raise ValueError(f"the optimizer holds a parameter that the model lacks: {list(parameter.shape)}")
        found[names[id(parameter)]] = values
    return dict(sorted(found.items()))


@torch.no_grad()
def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of every trainable parameter that has none yet, as it is before that parameter's first
    step.

    Optimizers create it in their first step, and only for parameters with a gradient. So that what is saved
    and what is loaded always have the same entries, one step is taken with zero gradients at a learning rate
    of 0, which changes no parameter, and the state it made is set to zero; right for optimizers of the Adam
    family and for SGD.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p in parameters if p.requires_grad and p not in optimizer.state]
    if not fresh:
        return
    gradients = [p.grad for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    try:
        for p in parameters:
            p.grad = None
        for p in fresh:
            p.grad = torch.zeros_like(p)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
    for p in fresh:
        for value in optimizer.state[p].values():
            if isinstance(value, torch.Tensor):
                value.zero_()
