"""FP8 on SMP: Transformer Engine's contexts for transformed models."""

from __future__ import annotations

import functools
import importlib
import inspect
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from smp_train.errors import ConfigError

if TYPE_CHECKING:
    from smp_train.arguments import Arguments

OLDEST_CAPABILITY = (9, 0)
"""Hopper, the first GPUs on which SMP supports FP8 (its documentation, "Mixed precision training")."""


class Fp8:
    """Transformer Engine's contexts, for one SMP state."""

    def __init__(self, args: Arguments, state: Any, device: torch.device) -> None:
        """Raises `ConfigError` for an older GPU, or without Transformer Engine."""
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
            raise ConfigError(
                f"--fp8 1 needs a GPU of the Hopper generation (H100) or newer, this is a "
                f"{torch.cuda.get_device_name(device)}; use --bf16 1"
            )
        try:
            self._engine = importlib.import_module("transformer_engine.pytorch")
            recipe = importlib.import_module("transformer_engine.common.recipe")
        except ImportError as failure:
            raise ConfigError(
                f"--fp8 1 with --backend smp computes through Transformer Engine, which cannot be imported: {failure}; "
                "run in SMP's container, or leave --fp8 out"
            ) from failure
        self._state = state
        self._recipe = recipe.DelayedScaling(
            fp8_format=recipe.Format.HYBRID,
            amax_history_len=args.fp8_amax_history_len,
            amax_compute_algo=args.fp8_amax_compute_algo,
        )

    def forward(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass, whose scales are reduced over all ranks."""
        context: AbstractContextManager[None] = self._engine.fp8_autocast(
            enabled=True, fp8_recipe=self._recipe, fp8_group=self._state.world_process_group
        )
        return context

    @property
    def attention(self) -> type:
        """Transformer Engine's attention module."""
        found: type = importlib.import_module("transformer_engine.pytorch.attention").MultiheadAttention
        return found

    def checkpoint(self) -> Any:
        """Return Transformer Engine's activation checkpointing function, which preserves FP8 scales."""
        options: dict[str, Any] = {"distribute_saved_activations": False, "tp_group": self._state.tp_process_group}
        if "get_cuda_rng_tracker" in inspect.signature(self._engine.checkpoint).parameters:  # before 1.8
            options |= {"get_cuda_rng_tracker": self._state.get_rng_state_tracker}
        else:
            options |= {"get_rng_state_tracker": self._state.get_rng_state_tracker, "use_reentrant": False}
        return functools.partial(self._engine.checkpoint, **options)
