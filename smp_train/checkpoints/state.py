"""The state of model and optimizer under Hugging Face parameter names, as live tensors that are loaded in place.

Why not `torch.distributed.checkpoint.state_dict`: on a fresh optimizer it takes a step to create the state,
and so stores a step count of 1 that was never taken; it restores hyper-parameters over those of the run; and
it stores tied weights once per name.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp_train.distributed.dtensor import DTensor, Shard, local_tensor, part_of
from smp_train.models.hub_names import HubNames, HubTensor, canonical_name, hub_names, is_split
from smp_train.models.lora import is_adapted, is_adapter


class State(dict[str, Any]):
    """What `gather_state` returns: nested dictionaries, with the names and layouts of the hub.

    A tensor that other ranks hold is on the meta device here; each that this rank holds shares the memory of the model
    or optimizer.

    Attributes:
        in_memory: the same under the names and layouts that the installed transformers has in memory, which older
            checkpoints may have, and those of other programs.
    """

    def __init__(self, tree: dict[str, Any], in_memory: dict[str, Any]) -> None:
        super().__init__(tree)
        self.in_memory = in_memory

    def named_as(self, saved: Container[str], prefix: str = "model.") -> dict[str, Any]:
        """Return it under the names of the ``saved`` entries, in which the model's begin with ``prefix``."""
        others = self.in_memory["model"].keys() - self["model"].keys()
        return self.in_memory if any(prefix + name in saved for name in others) else self


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, base: bool = False) -> State:
    """Return the state to save, or to load in place: nothing is copied, no collective is entered.

    The tensors are those of the model and optimizer themselves (DTensors where these are sharded), so after
    `Checkpoint.load` of this dict both are restored, bit for bit. Layout:
    ``{"model": {name: tensor}, "optim": {"state": {name: {"exp_avg": ..., "exp_avg_sq": ..., "step":
    ...}}}}``. Persistent buffers are part of ``model``. Tied weights appear once, under their first name. Names and
    layouts are the hub's, by the table that `build_meta` notes on the model (`smp_train.models.hub_names`).
    Of a model with adapters (`smp_train.models.lora`) it holds these alone, or with ``base`` all but these.
    Learning rate, betas and weight decay are not part of it: they come from the arguments. Raises ValueError
    for an optimizer that holds a parameter which the model does not.
    """
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    # state_dict() rather than named_parameters(): its hooks make FSDP2 put the sharded parameters back in place.
    adapted = is_adapted(model)
    for name, value in model.state_dict(keep_vars=True).items():
        wanted = not adapted or is_adapter(name) != base
        if wanted and isinstance(value, torch.Tensor) and id(value) not in names:
            names[id(value)] = canonical_name(name)
            tensors[canonical_name(name)] = value.detach()
    optim = None
    if optimizer is not None:
        create_optimizer_state(optimizer)
        optim = _optimizer_state(optimizer, names)
    return arranged(hub_names(model), tensors, optim)


def arranged(names: HubNames, tensors: dict[str, Any], optim: dict[str, dict[str, Any]] | None) -> State:
    """Return the state of parameters and their optimizer's values, each by canonical name, as `gather_state` does."""
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        blocks = _Blocks(name, names, tensor)
        model |= blocks.of(tensor)
        for key, value in (optim or {}).get(name, {}).items():
            for hub_name, each in blocks.of(value).items():
                state.setdefault(hub_name, {})[key] = each
    if optim is None:
        return State({"model": model}, {"model": tensors})
    in_memory = {"model": tensors, "optim": {"state": optim}}
    return State({"model": model, "optim": {"state": dict(sorted(state.items()))}}, in_memory)


class _Blocks:
    """The hub's tensors of which a parameter consists, and where this rank has them."""

    def __init__(self, name: str, names: HubNames, param: Any) -> None:
        self._shape = param.size()
        tensors = names.of(name, self._shape)
        self._name = tensors[0].name if len(tensors) == 1 else name
        self._split = tensors if is_split(param, tensors) else ()
        part = part_of(param) if self._split else None
        self._held = {each.name: found[0] for each in self._split if part and (found := each.within(part))}
        self._columns: DeviceMesh | None = None
        """The ranks that have the other columns of these tensors, where they lie by columns."""
        for dim, placement in enumerate(param.placements if self._held and isinstance(param, DTensor) else ()):
            if getattr(placement, "dim", 0):
                self._columns = DeviceMesh.from_group(param.device_mesh.get_group(dim), param.device.type)

    def of(self, value: Any) -> dict[str, Any]:
        """Return by the hub's names the parameter's ``value``: itself, a moment, or a number of all of it."""
        if not self._split:
            return {self._name: value}
        if isinstance(value, torch.Tensor) and value.size() == self._shape:
            local = local_tensor(value)
            return {
                each.name: self._here(local, each) if each.name in self._held else _elsewhere(each.shape, value)
                for each in self._split
            }
        if not isinstance(value, torch.Tensor):
            return {each.name: value for each in self._split}
        # Each block has the number; a rank without any block reads that of the first.
        here = self._held or {self._split[0].name: ...}
        return {each.name: value if each.name in here else _elsewhere(value.size(), value) for each in self._split}

    def _here(self, local: torch.Tensor, tensor: HubTensor) -> torch.Tensor:
        block = local[self._held[tensor.name]]
        if self._columns is None:
            return block
        shape = torch.Size(tensor.shape)
        stride = torch.empty(shape, device="meta").stride()
        last = [Shard(len(shape) - 1)]
        return DTensor.from_local(block, self._columns, last, run_check=False, shape=shape, stride=stride)


def _elsewhere(shape: Sequence[int], value: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=value.dtype, device="meta")


def present(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries without the tensors that other ranks hold, and without dictionaries then empty."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            rest = present(value)
            found |= {key: rest} if rest else {}
        elif not (type(value) is torch.Tensor and value.is_meta):  # a ShardedTensor without a part here has no device
            found[key] = value
    return found


def _optimizer_state(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, dict[str, Any]]:
    for parameter in optimizer.state:
        if id(parameter) not in names:
            raise ValueError(f"the optimizer holds a parameter that the model does not: {list(parameter.shape)}")
    return {names[id(parameter)]: values for parameter, values in optimizer.state.items()}


@torch.no_grad()
def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of every trainable parameter that has none yet, as it is before that parameter's first step.

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
