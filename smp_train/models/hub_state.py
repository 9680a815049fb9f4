"""The state of model and optimizer under Hugging Face parameter names, as live tensors that are loaded in place.

Why not `torch.distributed.checkpoint.state_dict`: it creates a fresh optimizer's state by a step, and so saves a step
count of 1 for a step that was never taken; it overwrites the run's hyper-parameters; and it saves tied weights once per
name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from smp_train.distributed.dtensor import DTensor, Shard, local_tensor, part_of
from smp_train.models.hub_names import HubNames, HubTensor, canonical_name, hub_names, is_split, named_once
from smp_train.models.lora import is_adapted, is_adapter

State = dict[str, Any]
"""Nested dictionaries under the names and layouts of the hub, as `gather_state` returns them.

A tensor that this rank holds a part of shares the memory of model or optimizer; other ranks' tensors are on meta.
"""


def gather_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, base: bool = False) -> State:
    """Return the state to save, or to load in place. Copies nothing; not collective.

    ``{"model": {name: tensor}, "optim": {"state": {name: {"exp_avg": ..., "exp_avg_sq": ..., "step": ...}}}}``, with
    the tensors of model and optimizer themselves (DTensors if sharded), so that `Checkpoint.load` restores both bit for
    bit. ``model`` includes persistent buffers; tied weights appear once, under their first name. Learning rate, betas
    and weight decay are left out, because the arguments set them. For a model with adapters, only the adapters are
    included; with ``base``, everything else is. Raises ValueError if the optimizer holds a parameter that the model
    does not.
    """
    names: dict[int, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    adapted = is_adapted(model)
    for name, value in named_once(model).items():
        if isinstance(value, torch.Tensor) and (not adapted or is_adapter(name) != base):
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
    return {"model": model} | ({} if optim is None else {"optim": {"state": dict(sorted(state.items()))}})


class _Blocks:
    """The hub's tensors that a parameter consists of, and the index of each in this rank's local tensor."""

    def __init__(self, name: str, names: HubNames, param: Any) -> None:
        tensors = names.tensors_of(name, param.size())
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
        """Return the parameter, a moment of the same shape, or one number for the parameter, by the hub's names."""
        if not self._tensors:
            return {self._name: value}
        if not isinstance(value, torch.Tensor):
            return {tensor.name: value for tensor in self._tensors}
        if value.size() == self._shape:
            local = local_tensor(value)
            return {tensor.name: self._block(local, tensor) if tensor.name in self._local
                    else _on_meta(tensor.shape, value) for tensor in self._tensors}  # fmt: skip
        # Every block has the number. A rank without any block loads the first block's.
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
    """Return nested dictionaries without other ranks' tensors, and without the dictionaries that this empties."""
    kept_tree: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            subtree = present(value)
            kept_tree |= {key: subtree} if subtree else {}
        elif not (type(value) is torch.Tensor and value.is_meta):  # a ShardedTensor without a local shard has no device
            kept_tree[key] = value
    return kept_tree


def create_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that AdamW gives a parameter in its first step, for all trainable parameters without state.

    AdamW creates it only for parameters with a gradient, but checkpoints must always have the same entries.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.requires_grad and p not in optimizer.state:
                step = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu")
                state = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                optimizer.state[p] = state
