"""Contexts and functions; nothing is computed in FP8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
import torch.utils.checkpoint

from tests import standin


@contextmanager
def fp8_autocast(enabled: bool = True, fp8_recipe: Any = None, fp8_group: Any = None) -> Iterator[None]:
    """Note which group agrees on scales while the body runs."""
    before = standin.fp8_group
    standin.fp8_group = "world" if fp8_group is dist.group.WORLD else repr(fp8_group)
    standin.record("fp8_autocast", enabled=enabled, recipe=fp8_recipe, group=standin.fp8_group)
    try:
        yield
    finally:
        standin.fp8_group = before


def checkpoint(
    function: Callable, *args: Any, distribute_saved_activations: bool = False, get_rng_state_tracker: Any = None,
    tp_group: Any = None, use_reentrant: bool = True, **kwargs: Any,
) -> Any:  # fmt: skip
    """Compute ``function`` again in the backward pass."""
    standin.record(
        "te.checkpoint", tracker=callable(get_rng_state_tracker), reentrant=use_reentrant,
        distribute=distribute_saved_activations,
    )  # fmt: skip
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
