"""A third stand-in: the first one with one deviation from what the SMP backend assumes, planted after `install`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def plant(name: str) -> None:
    """Let the installed stand-in deviate on this rank."""
    PLANTED[name]()


def _replace(module: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a function or method by what ``make`` makes of it."""
    setattr(module, name, make(getattr(module, name)))


def _transformed(change: Callable[[nn.Module], None]) -> None:
    """Apply ``change`` to every model that `transform` returns."""
    from torch.sagemaker.tensor_parallel import transformer

    def make(transform: Any) -> Any:
        def transformed(*args: Any, **kwargs: Any) -> nn.Module:
            model = transform(*args, **kwargs)
            change(model)
            return model

        return transformed

    _replace(transformer, "transform", make)


def _forward(change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> None:
    """Apply ``change`` to what the transformed model's forward returns."""
    from torch.sagemaker.tensor_parallel.transformer import TransformerLMHead

    def make(forward: Any) -> Any:
        def changed(self: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
            found = forward(self, *args, **kwargs)
            change(found, kwargs)
            return found

        return changed

    _replace(TransformerLMHead, "forward", make)


# --- names ------------------------------------------------------------------------------------------


def _renamed(module: nn.Module, old: str, new: str) -> None:
    """Register a child under another name; its module's own code still finds it under the old one."""
    module._modules[new] = module._modules.pop(old)
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {old: property(lambda self: self._modules[new])})


def _other_names() -> None:
    from torch.sagemaker.tensor_parallel import transformer

    def change(model: Any) -> None:
        for layer in model.lm.model.layers:
            _renamed(layer.inner, "input_layernorm", "input_norm")
        _renamed(model.lm.model, "layers", "seq_layers")

    def make(translated: Any) -> Any:
        def back(weights: dict[str, Tensor]) -> dict[str, Tensor]:
            renamed = ((name.replace("seq_layers", "layers"), value) for name, value in weights.items())
            return translated({name.replace("input_norm", "input_layernorm"): value for name, value in renamed})

        return back

    _transformed(change)
    _replace(transformer, "translated", make)


# --- numbers ----------------------------------------------------------------------------------------


def _split(found: dict[str, Tensor], asked: dict[str, Any]) -> None:
    from torch.sagemaker.state_handler import state

    found["logits"] = found["logits"].chunk(state.tp_size, -1)[state.tp_rank]


def _summed_gradients() -> None:
    import torch.distributed.fsdp as fsdp

    def make(init: Any) -> Any:
        def summing(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            for module in fsdp.FullyShardedDataParallel.fsdp_modules(self):
                module._gradient_predivide_factor = module._gradient_postdivide_factor = 1.0

        return summing

    _replace(fsdp.FullyShardedDataParallel, "__init__", make)


def _ignored_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data.normal_(std=0.1)


# --- what is refused or missing ---------------------------------------------------------------------


def _mixed_group_refused() -> None:
    """Start in a group of two backends, both gloo here, which SMP refuses."""
    import torch.sagemaker as tsm

    from smp_train.distributed import group

    begun: list[str] = []

    def note(init: Any) -> Any:
        return lambda backend, **kwargs: (begun.append(backend), init(backend, **kwargs))[1]

    def make(init: Any) -> Any:
        def refusing(config: Any) -> None:
            if "," in begun[-1]:
                raise NotImplementedError(f"process group {begun[-1]}")
            init(config)

        return refusing

    _replace(torch.distributed, "init_process_group", note)
    _replace(group, "_group_backend", lambda _: lambda device, name: "cpu:gloo,cuda:gloo")
    _replace(tsm, "init", make)


def _not_translated() -> None:
    import torch.distributed.fsdp as fsdp

    make = lambda init: lambda self, *args, **kwargs: init(self, *args, **kwargs | {"translate_on_save": False})  # noqa: E731
    _replace(fsdp.FullStateDictConfig, "__init__", make)


def _no_reset() -> None:
    from torch.sagemaker.state_handler import State

    del State.reset


PLANTED: dict[str, Callable[[], None]] = {
    "other names": _other_names,
    "split logits": lambda: _forward(_split),
    "summed gradients": _summed_gradients,
    "weights of rank 0 ignored": lambda: _transformed(_ignored_weights),
    "one backend in the group": _mixed_group_refused,
    "export not translated": _not_translated,
    "no reset": _no_reset,
}
