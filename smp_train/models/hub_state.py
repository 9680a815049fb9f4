"""The state of model and optimizer under Hugging Face parameter names, as live tensors that are loaded in place.

Why not `torch.distributed.checkpoint.state_dict`: on a fresh optimizer it takes a step to create the state, and so
stores a step count of 1 that was never taken; it restores hyper-parameters over those of the run; and it stores tied
weights once per name.
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
    """Nested dictionaries under the names and layouts of the hub, as `gather_state` returns them.

    A tensor of which this rank holds a part shares the memory of model or optimizer; other ranks' tensors are on meta.

    Attributes:
        in_memory: the state under the names and layouts that the installed transformers has in memory, which
            checkpoints of other programs may have.
    """

    def __init__(self, tree: dict[str, Any], in_memory: dict[str, Any]) -> None:
        super().__init__(tree)
        self.in_memory = in_memory

    def named_as(self, saved: Container[str], prefix: str = "model.") -> dict[str, Any]:
        """Return the state under the names of the ``saved`` entries, whose parameters begin with ``prefix``."""
        names = self.in_memory["model"].keys() - self["model"].keys()
        return self.in_memory if any(prefix + name in saved for name in names) else self


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, base: bool = False) -> State:
    """Return the state to save, or to load in place; nothing is copied, no collective is entered.

    ``{"model": {name: tensor}, "optim": {"state": {name: {"exp_avg": ..., "exp_avg_sq": ..., "step": ...}}}}``, with
    the tensors of model and optimizer themselves (DTensors if sharded): `Checkpoint.load` of this state restores both
    bit for bit. Persistent buffers are part of ``model``; tied weights appear once, under their first name; names and
    layouts are the hub's, by the table that `build_meta` notes on the model (`smp_train.models.hub_names`). From a
    model with adapters (`smp_train.models.lora`) only the adapters are taken, with ``base`` all except the adapters.
    Learning rate, betas and weight decay are left out: the arguments set them. Raises ValueError if the optimizer holds
    a parameter that the model does not.
    """
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    adapted = is_adapted(model)
    # state_dict() rather than named_parameters(): its hooks make FSDP2 put the sharded parameters back.
    for name, value in model.state_dict(keep_vars=True).items():
        included = not adapted or is_adapter(name) != base
        if included and isinstance(value, torch.Tensor) and id(value) not in names:
            names[id(value)] = canonical_name(name)
            tensors[canonical_name(name)] = value.detach()
    optim = None
    if optimizer is not None:
        create_optimizer_state(optimizer)
        if unknown := [list(parameter.shape) for parameter in optimizer.state if id(parameter) not in names]:
            raise ValueError(f"the optimizer holds a parameter that the model does not: {unknown[0]}")
        optim = {names[id(parameter)]: values for parameter, values in optimizer.state.items()}
    return arranged(hub_names(model), tensors, optim)


def arranged(names: HubNames, tensors: dict[str, Any], optim: dict[str, dict[str, Any]] | None) -> State:
    """Return the state of parameters and their optimizer's values, each by canonical name, as `gather_state` does."""
    model: dict[str, Any] = {}
    state: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        blocks = _Blocks(name, names, tensor)
        model |= blocks.split(tensor)
        for key, value in (optim or {}).get(name, {}).items():
            for hub_name, block in blocks.split(value).items():
                state.setdefault(hub_name, {})[key] = block
    if optim is None:
        return State({"model": model}, {"model": tensors})
    in_memory = {"model": tensors, "optim": {"state": optim}}
    return State({"model": model, "optim": {"state": dict(sorted(state.items()))}}, in_memory)


class _Blocks:
    """The hub's tensors that a parameter consists of, and this rank's index of each in its local tensor."""

    def __init__(self, name: str, names: HubNames, param: Any) -> None:
        tensors = names.of(name, param.size())
        self._name, self._shape = tensors[0].name if len(tensors) == 1 else name, param.size()
        self._tensors = tensors if is_split(param, tensors) else ()
        part = part_of(param) if self._tensors else None
        self._local = {tensor.name: index[0] for tensor in self._tensors if part and (index := tensor.within(part))}
        self._columns: DeviceMesh | None = None
        """The ranks that share the columns of these tensors, if the parameter is sharded by columns."""
        for dim, placement in enumerate(param.placements if self._local and isinstance(param, DTensor) else ()):
            if getattr(placement, "dim", 0):
                self._columns = DeviceMesh.from_group(param.device_mesh.get_group(dim), param.device.type)

    def split(self, value: Any) -> dict[str, Any]:
        """Return the parameter, one of its moments, or one number for the whole parameter, by the hub's names."""
        if not self._tensors:
            return {self._name: value}
        if not isinstance(value, torch.Tensor):
            return {tensor.name: value for tensor in self._tensors}
        if value.size() == self._shape:
            local = local_tensor(value)
            return {tensor.name: self._block(local, tensor) if tensor.name in self._local
                    else _on_meta(tensor.shape, value) for tensor in self._tensors}  # fmt: skip
        # Every block has the number; a rank without any block reads the first block's.
        local_names = self._local or {self._tensors[0].name: ...}
        return {tensor.name: value if tensor.name in local_names else _on_meta(value.size(), value)
                for tensor in self._tensors}  # fmt: skip

    def _block(self, local: torch.Tensor, tensor: HubTensor) -> torch.Tensor:
        block = local[self._local[tensor.name]]
        if self._columns is None:
            return block
        shape = torch.Size(tensor.shape)
        stride = torch.empty(shape, device="meta").stride()
        by_columns = [Shard(len(shape) - 1)]
        return DTensor.from_local(block, self._columns, by_columns, run_check=False, shape=shape, stride=stride)


def _on_meta(shape: Sequence[int], value: torch.Tensor) -> torch.Tensor:
    return torch.empty(shape, dtype=value.dtype, device="meta")


def present(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries without other ranks' tensors, and without dictionaries that held nothing else."""
    kept_tree: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            subtree = present(value)
            kept_tree |= {key: subtree} if subtree else {}
        elif not (type(value) is torch.Tensor and value.is_meta):  # a ShardedTensor without a local shard has no device
            kept_tree[key] = value
    return kept_tree


@torch.no_grad()
def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of every trainable parameter that has no state yet, as it is before its first step.

    Optimizers create it in their first step, and only for parameters with a gradient; but what is saved and loaded must
    always have the same entries. So the optimizer takes one step with zero gradients at a learning rate of 0, which
    changes no parameter, and the new state is set to zero: right for SGD and the Adam family.
    """
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p, _ in gradients if p.requires_grad and p not in optimizer.state]
    rates = [(group, group["lr"]) for group in optimizer.param_groups]
    if not fresh:
        return
    try:
        for p, _ in gradients:
            p.grad = None
        for p in fresh:
            p.grad = torch.zeros_like(p)
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in rates:
            group["lr"] = rate
        for p, gradient in gradients:
            p.grad = gradient
    for value in (value for p in fresh for value in optimizer.state[p].values()):
        if isinstance(value, torch.Tensor):
            value.zero_()
