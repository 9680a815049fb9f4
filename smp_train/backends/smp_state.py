"""State of FSDP1 as the tree that the native backend saves: the same names, shapes and DTensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from smp_train.distributed.dtensor import DTensor, Shard
from smp_train.errors import CheckpointError
from smp_train.models.hub_names import canonical_name, hub_names
from smp_train.models.hub_state import State, arranged, create_optimizer_state


class Tree:
    """The state of a model wrapped by FSDP1 and of its optimizer, under the hub's names.

    A rank's part of a parameter is its ``torch.chunk`` of the first dimension, in FSDP1's sharded state dict as in
    FSDP2, so a checkpoint of either backend loads into the other.

    Args:
        root: The FSDP module.
        names: Canonical names of its parameters before wrapping; a tied parameter has one name.
        sharded: Whether parameters are sharded.
        device: Device of the parameters.
    """

    def __init__(self, root: Any, names: list[str], *, sharded: bool, device: torch.device) -> None:
        self.root, self.names, self.sharded = root, set(names), sharded
        self.hub_names = hub_names(root)
        self.mesh: Any = DeviceMesh.from_group(root.process_group, device.type) if sharded else None

    def gather(self, optimizer: torch.optim.Optimizer) -> State:
        """Return the tree; collective."""
        create_optimizer_state(optimizer)
        return self._arranged(*self._read(optimizer))

    def load(self, optimizer: torch.optim.Optimizer, read: Callable[[dict[str, Any]], None]) -> None:
        """Let ``read`` fill the tree, and load it into the model and the optimizer; collective."""
        create_optimizer_state(optimizer)
        model, optim = self._read(optimizer)
        read(self._arranged(model, optim))
        if not self.sharded:
            return  # the tree shares its tensors with the model and the optimizer
        with self._sharded_state_dicts():
            self.root.load_state_dict(model)
            to_load = fsdp.FullyShardedDataParallel.optim_state_dict_to_load
            optimizer.load_state_dict(to_load(model=self.root, optim=optimizer, optim_state_dict=optim))

    def _arranged(self, model: dict[str, Any], optim: dict[str, Any]) -> State:
        for kind, tensors in (("model", model), ("optimizer", optim["state"])):
            missing = sorted(self.names - set(tensors))
            if missing:
                raise CheckpointError(
                    f"FSDP's state of the {kind} lacks {len(missing)} of {len(self.names)} parameters ({missing[0]}, "
                    "...): an incomplete state is not saved or loaded; use another release of SMP, or --backend native"
                )
        with _without_deprecations():
            # Excludes Transformer Engine's _extra_state (the history of FP8 scales), which is no parameter.
            tensors = {name: self._as_dtensor(value) for name, value in model.items() if name in self.names}
            state = {
                name: {key: self._as_dtensor(value) for key, value in values.items()}
                for name, values in optim["state"].items()
            }
        return arranged(self.hub_names, tensors, state)

    def _read(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return FSDP1's state dicts under canonical names; all names of a tied weight share one tensor."""
        if not self.sharded:
            parameters = {canonical_name(name): p for name, p in self.root.named_parameters()}
            state = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
            return {name: p.detach() for name, p in parameters.items()}, {"state": state}
        with self._sharded_state_dicts():
            model = {canonical_name(name): value for name, value in self.root.state_dict().items()}
            optim = fsdp.FullyShardedDataParallel.optim_state_dict(self.root, optimizer)
        # FSDP1 has one tensor per name of a tied weight; a value that is loaded into the first must reach the rest.
        first: dict[int, str] = {}
        for name, parameter in self.root.module.named_parameters(remove_duplicate=False):
            name = canonical_name(name)
            if id(parameter) in first and name in model and name not in self.names:
                model[name] = model[first[id(parameter)]]
            first.setdefault(id(parameter), name)
        optim["state"] = {canonical_name(name): values for name, values in optim["state"].items()}
        return model, optim

    @contextmanager
    def _sharded_state_dicts(self) -> Iterator[None]:
        with (
            _without_deprecations(),
            fsdp.FullyShardedDataParallel.state_dict_type(
                self.root,
                fsdp.StateDictType.SHARDED_STATE_DICT,
                fsdp.ShardedStateDictConfig(offload_to_cpu=False),
                fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False),
            ),
        ):
            yield

    def _as_dtensor(self, value: Any) -> Any:
        """Return a `DTensor` that shares the memory of FSDP1's ``ShardedTensor``; other values are unchanged."""
        if not hasattr(value, "local_shards"):
            return value
        shards, size = value.local_shards(), value.size()
        if shards:
            local: Tensor = shards[0].tensor
        else:
            local = torch.empty((0, *size[1:]), dtype=value.dtype, device=self.mesh.device_type)
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=size, stride=stride)


@contextmanager
def _without_deprecations() -> Iterator[None]:
    """Hide the warnings that FSDP1's state dicts and their ``ShardedTensor`` are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
