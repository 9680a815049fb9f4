"""Activation checkpointing: what of a layer's forward pass is computed again in the backward pass.

A layer's ``forward`` is replaced, not the layer wrapped: names stay as they are, and what other code hangs on the
layer's call (FSDP2's gathering of parameters) stays outside and runs once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from smp_train.arguments import checkpointing

# Costly to compute again: products of matrices, and attention kernels, which save what their backward pass needs.
_KEPT_NAMES = (
    "mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
_KEPT = {getattr(torch.ops.aten, name).default for name in _KEPT_NAMES if hasattr(torch.ops.aten, name)}
_KEPT_NAMESPACES = ("_c10d_functional", "flash_attn", "flash_attn_3")
_KEPT.add(torch.ops.higher_order.flex_attention)
# Waiting again for a collective that has finished costs nothing, and its result is the collective's own.
_NOT_KEPT = {torch.ops._c10d_functional.wait_tensor.default}


def apply(layers: list[nn.Module], setting: str) -> None:
    """Checkpoint those of the decoder ``layers`` that ``--activation_checkpointing`` asks for.

    Random numbers drawn again are the same, so dropout is that of a run without checkpointing. Raises `ConfigError`
    for a setting that is none.
    """
    share, per_operation = checkpointing.read(setting)
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": True}
    if per_operation:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for index in chosen(len(layers), share):
        layers[index].forward = _checkpointed(layers[index].forward, options)


def chosen(count: int, share: Fraction) -> list[int]:
    """Return which of ``count`` layers are checkpointed for a share from 0 to 1: evenly spread, as fms-fsdp does.

    Layer i is, where (i + 1) * share passes another k + 1/2: of every N for a share of 1/N the middle one.
    """
    half = Fraction(1, 2)
    return [i for i in range(count) if (share * (i + 1) + half) // 1 > (share * i + half) // 1]


def _checkpointed(forward: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    return recomputed


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operation in _KEPT or getattr(operation, "namespace", None) in _KEPT_NAMESPACES
    if kept and operation not in _NOT_KEPT:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
