"""Modules whose parameters are DTensors, but whose code computes on plain tensors."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def distribute(module: nn.Module, mesh: DeviceMesh, placement: Replicate | Shard) -> None:
    """Distribute the module's own parameters, on the meta device, over ``mesh``."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [placement])))


class _Overridden:
    """A view of a module in which some attributes are replaced."""

    def __init__(self, module: nn.Module, attributes: dict[str, Any]) -> None:
        self.__dict__.update(attributes)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def compute_on_local(module: nn.Module, grad_placements: list[Any] | None) -> None:
    """Let the module's forward compute on the local tensors of its DTensor parameters.

    The forward gets a view of the module, and the module does not change: the compiler cannot trace such a change
    inside a checkpoint.

    Args:
        module: A module with direct parameters.
        grad_placements: Placements of the plain tensors' gradients; None for the parameters' placements.
    """
    forward: Any = type(module).forward

    def with_local(*args: Any, **kwargs: Any) -> Any:
        local = {
            key: parameter.to_local(grad_placements=grad_placements) if isinstance(parameter, DTensor) else parameter
            for key, parameter in module._parameters.items()
        }
        return forward(_Overridden(module, local), *args, **kwargs)

    module.forward = with_local
