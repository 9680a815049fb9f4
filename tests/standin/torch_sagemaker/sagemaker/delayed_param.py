"""Initialisation of parameters that are on the meta device until FSDP shards them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tests import standin

from .state_handler import state


class DelayedParamIniter:
    """See the contract, section 4."""

    def __init__(
        self, model: nn.Module, init_method_using_config: Callable | None = None, verbose: bool = False
    ) -> None:
        if not state.ready:
            raise RuntimeError("torch.sagemaker.init has not been called")
        standin.record("DelayedParamIniter", custom=init_method_using_config is not None)
        self.model, self.method = model, init_method_using_config
        self.total = self.count_num_params(model)
        self.done: dict[int, int] = {}

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        def initialise(module: nn.Module) -> None:
            device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            for name, param in module._parameters.items():
                if param is not None and param.is_meta:
                    # Not zero, so that a parameter nobody initialises shows.
                    value = torch.full(param.shape, float("nan"), dtype=param.dtype, device=device)
                    module._parameters[name] = nn.Parameter(value, requires_grad=param.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[name] = buffer.to(device)
            with torch.no_grad():
                if self.method is not None:
                    self.method(module)
                elif hasattr(self.model, "_init_weights"):
                    self.model._init_weights(module)
            self.done[id(module)] = self.done.get(id(module), 0) + _own(module)

        return initialise

    def count_num_params(self, module: nn.Module, *args: nn.Parameter) -> int:
        """Return the number of parameters as they are initialised: tied ones with each module that has them."""
        return sum(_own(child) for child in module.modules()) + sum(p.numel() for p in args)

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        def tie(module: nn.Module) -> None:
            if hasattr(module, "tie_weights"):
                module.tie_weights()

        return tie

    @contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        standin.record("validate_params_and_buffers_inited", enabled=enabled)
        yield
        if enabled:
            done = sum(self.done.values())
            assert done == self.total, f"{done} of {self.total} parameters initialised"
            tensors = [*self.model.parameters(), *self.model.buffers()]
            assert not any(t.is_meta for t in tensors), "something is still on the meta device"


def _own(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters(recurse=False))
