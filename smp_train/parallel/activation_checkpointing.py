"""Activation checkpointing: the backward pass recomputes parts of each layer's forward pass.

The layer's ``forward`` is replaced, but the layer is not wrapped: parameter names do not change, and hooks on the
layer's call (FSDP2's all-gather) run once, outside the recomputation.
"""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from smp_train.arguments import checkpointing
from smp_train.errors import ConfigError

# Costly to recompute: matrix products and attention kernels.
_KEPT_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
_KEPT = {getattr(torch.ops.aten, name).default for name in _KEPT_NAMES if hasattr(torch.ops.aten, name)}
_KEPT_NAMESPACES = ("_c10d_functional", "flash_attn", "flash_attn_3", "torch_attn")
_KEPT.add(torch.ops.higher_order.flex_attention)
# A second wait for a finished collective costs nothing, and returns the tensor that the collective returned.
_NOT_KEPT = {torch.ops._c10d_functional.wait_tensor.default}


CHANGE_IN_PLACE = frozenset({"falcon"})
"""Model types whose layers change a kept result in place; for all other types, the first forward pass checks that."""


def check(setting: str, model_type: str, *, compiled: bool) -> None:
    """Raise `ConfigError` for a model that ``--activation_checkpointing`` would compute wrongly."""
    if checkpointing.read(setting)[1] and model_type in CHANGE_IN_PLACE and not compiled:
        raise ConfigError(
            f"--activation_checkpointing {setting}: a {model_type} changes the result of a matrix product in place; "
            "use full, or --use_torch_compile 1"
        )


def apply(layers: list[nn.Module], setting: str) -> int:
    """Checkpoint the decoder ``layers`` that ``--activation_checkpointing`` selects; return their number.

    Recomputation draws the same random numbers, so checkpointing does not change dropout.

    Raises:
        ConfigError: an invalid setting; or, at the first forward pass with selective:op, a layer that changes a kept
        result in place.
    """
    share, per_operation = checkpointing.read(setting)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if per_operation:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    # A method, not a closure over one layer's forward: torch 2.8 compiles each closure, and only eight of them.
    def checkpointed(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if per_operation:
            return checkpoint(_watched_once, layer, *args, **options, **kwargs)
        return checkpoint(layer.plain_forward, *args, **options, **kwargs)

    indices = checkpointing.evenly_spaced(len(layers), share)
    for index in indices:
        layer: Any = layers[index]
        layer.plain_forward, layer.was_watched = layer.forward, False
        layer.forward = MethodType(checkpointed, layer)
    return len(indices)


def _keeps(operation: Any) -> bool:
    costly = operation in _KEPT or getattr(operation, "namespace", None) in _KEPT_NAMESPACES
    return costly and operation not in _NOT_KEPT


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _keeps(operation) else CheckpointPolicy.PREFER_RECOMPUTE


def _watched_once(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the layer, and check its first pass for in-place writes to kept results.

    torch's own check misses a write through a view, and every 3-D product returns a view. Compiled code needs no check,
    because tracing removes in-place writes.
    """
    if layer.was_watched or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return layer.plain_forward(*args, **kwargs)
    layer.was_watched = True
    with _ChangesOfKept():
        return layer.plain_forward(*args, **kwargs)


class _ChangesOfKept(TorchDispatchMode):
    """Raises for an in-place write to a kept result: recomputation would start from the changed value."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, tuple[Any, Tensor]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(operation, "_schema", None)
        for position, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in tree_leaves(value):
                    if isinstance(tensor, Tensor) and _storage(tensor) in self.kept:
                        raise ConfigError(
                            f"--activation_checkpointing {checkpointing.PER_OPERATION}: this model changes the result "
                            f"of {self.kept[_storage(tensor)][0]} in place ({operation}); use full, or "
                            "--use_torch_compile 1"
                        )
        result = operation(*args, **kwargs)
        if _keeps(operation):
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    # The reference keeps the tensor's memory, and so its address, from being reused.
                    self.kept[_storage(tensor)] = (operation, tensor)
        return result


def _storage(tensor: Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return int(local.untyped_storage()._cdata)
