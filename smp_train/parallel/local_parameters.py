"""Modules whose parameters are DTensors and whose own code computes on plain tensors."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def place(module: nn.Module, mesh: DeviceMesh, placement: Replicate | Shard) -> None:
    """Distribute the module's own parameters, on the meta device, over ``mesh``."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))


class _Stand:
    """A module with some attributes overridden, passed to its own forward."""

    def __init__(self, module: nn.Module, given: dict[str, Any]) -> None:
        self.__dict__.update(given)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def compute_on_local(module: nn.Module, grad_placements: list[Any] | None) -> None:
    """Let the module's own forward compute on this rank's local tensors where its parameters are DTensors.

    The module itself is not modified: the compiler cannot trace such a change inside a checkpoint.

    Args:
        module: A module with parameters of its own.
        grad_placements: How the gradients of the plain tensors lie on the mesh; by default as the parameters do.
    """
    forward: Any = type(module).forward

    def with_local(*args: Any, **kwargs: Any) -> Any:
        local = {
            key: parameter.to_local(grad_placements=grad_placements) if isinstance(parameter, DTensor) else parameter
            for key, parameter in module._parameters.items()
        }
        return forward(_Stand(module, local), *args, **kwargs)

    module.forward = with_local
