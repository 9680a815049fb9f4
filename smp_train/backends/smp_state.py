"""State of FSDP1 as the tree that the native backend saves: same names, shapes and DTensors."""

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

    A rank's part of a parameter is that of FSDP1's sharded state dict: its ``torch.chunk`` of the first dimension, as
    in FSDP2, so checkpoints of either load into the other.

    Args:
        root: The FSDP module.
        names: Canonical names of its parameters before wrapping, tied ones once.
        sharded: Whether parameters are sharded.
        device: Device of the parameters.
        raw: Whether `gather` returns FSDP1's sharded tensors, as SMP's saver expects, instead of DTensors.
    """

    def __init__(self, root: Any, names: list[str], *, sharded: bool, device: torch.device, raw: bool) -> None:
        self.root, self.names, self.sharded, self.raw = root, set(names), sharded, raw
        self.hub_names = hub_names(root)
        self.mesh: Any = DeviceMesh.from_group(root.process_group, device.type) if sharded else None

    def gather(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the tree; collective."""
        create_optimizer_state(optimizer)
        return self._arranged(*self._read(optimizer), convert=not self.raw)

    def load(self, optimizer: torch.optim.Optimizer, read: Callable[[dict[str, Any]], None]) -> None:
        """Let ``read`` fill the tree, and load it into the model and the optimizer; collective."""
        create_optimizer_state(optimizer)
        model, optim = self._read(optimizer)
        read(self._arranged(model, optim, convert=True))
        if not self.sharded:
            return  # the tensors are the model's and the optimizer's own
        with self._as_sharded():
            self.root.load_state_dict(model)
            to_load = fsdp.FullyShardedDataParallel.optim_state_dict_to_load
            optimizer.load_state_dict(to_load(model=self.root, optim=optimizer, optim_state_dict=optim))

    def _arranged(self, model: dict[str, Any], optim: dict[str, Any], *, convert: bool) -> State:
        for what, found in (("model", model), ("optimizer", optim["state"])):
            lacking = sorted(self.names - set(found))
            if lacking:
                raise CheckpointError(
                    f"FSDP's state of the {what} lacks {len(lacking)} of {len(self.names)} parameters ({lacking[0]}, "
                    "...): what is not whole is not saved or loaded; use another release of SMP, or --backend native"
                )

        def made(name: str, value: Any) -> Any:
            # A parameter that becomes several tensors, each whole on a rank, is no longer a sharded tensor.
            several = len(self.hub_names.tensors.get(name, ())) > 1
            return self._as_dtensor(value) if convert or several else value

        # Excludes Transformer Engine's _extra_state (the history of FP8 scales), which is no parameter.
        tensors = {name: made(name, value) for name, value in model.items() if name in self.names}
        state = {
            name: {key: made(name, value) for key, value in values.items()} for name, values in optim["state"].items()
        }
        return arranged(self.hub_names, tensors, state)

    def _read(self, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return FSDP1's state dicts under canonical names; all names of a tied weight share one tensor."""
        if not self.sharded:
            parameters = {canonical_name(name): p for name, p in self.root.named_parameters()}
            state = {name: optimizer.state[p] for name, p in parameters.items() if p in optimizer.state}
            return {name: p.detach() for name, p in parameters.items()}, {"state": state}
        with self._as_sharded():
            model = {canonical_name(name): value for name, value in self.root.state_dict().items()}
            optim = fsdp.FullyShardedDataParallel.optim_state_dict(self.root, optimizer)
        # Tied weights: values loaded into the first name must reach the others.
        first: dict[int, str] = {}
        for name, parameter in self.root.module.named_parameters(remove_duplicate=False):
            name = canonical_name(name)
            if id(parameter) in first and name in model and name not in self.names:
                model[name] = model[first[id(parameter)]]
            first.setdefault(id(parameter), name)
        optim["state"] = {canonical_name(name): values for name, values in optim["state"].items()}
        return model, optim

    @contextmanager
    def _as_sharded(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # FSDP1's state dicts are deprecated
            with fsdp.FullyShardedDataParallel.state_dict_type(
                self.root,
                fsdp.StateDictType.SHARDED_STATE_DICT,
                fsdp.ShardedStateDictConfig(offload_to_cpu=False),
                fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False),
            ):
                yield

    def _as_dtensor(self, value: Any) -> Any:
        """Return a `DTensor` that shares the memory of FSDP1's ``ShardedTensor``."""
        if not hasattr(value, "local_shards"):
            return value
        shards = value.local_shards()
        size = value.size()
        if shards:
            local: Tensor = shards[0].tensor
        else:
            local = torch.empty((0, *size[1:]), dtype=value.dtype, device=self.mesh.device_type)
        stride = torch.empty(size, device="meta").stride()
        return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False, shape=size, stride=stride)
