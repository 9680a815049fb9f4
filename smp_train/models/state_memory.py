"""The memory that a run's state takes at least: known from the flags, and refused where a device has less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smp_train.errors import ConfigError
from smp_train.models.families import FAMILIES, SYNONYMS
from smp_train.models.resolve import presets, settled_flags

GIB = 2**30
WEIGHT_BYTES = 4
"""Per parameter: float32."""
STATE_BYTES = 16
"""Per parameter: weight, gradient and Adam's two moments in float32."""
CHECKPOINT_BYTES = 12
"""Per parameter: weight and Adam's two moments in float32."""
WIDTHS = ("vocab_size", "hidden_width", "num_layers", "intermediate_size", "num_key_value_heads", "num_local_experts")


def of_preset(args: Any) -> int | None:
    """Return the number of parameters of a preset, None for other models."""
    if args.hf_pretrained_model_name_or_dir or any(getattr(args, name) is not None for name in WIDTHS):
        return None
    preset = presets().get((str(args.model_type), str(args.model_size).lower()))
    return preset.parameters if preset else None


def fewest_parameters(args: Any) -> int:
    """Return the number of parameters of a preset; of other models a lower bound.

    The bound is the embedding and two feed-forward matrices per layer, which every family has; 0 where flags and a
    local ``config.json`` do not give these widths. Needs no torch.
    """
    known = of_preset(args)
    if known is not None:
        return known
    settled = settled_flags(args)
    if args.model_type is not None and SYNONYMS.get(args.model_type, args.model_type) not in FAMILIES:
        return 0
    vocabulary, width, layers, feed_forward, _, experts = (settled_width(args, settled, name) for name in WIDTHS)
    return vocabulary * width + 2 * layers * width * feed_forward * max(1, experts)


def settled_width(args: Any, settled: Mapping[str, tuple[Any, str]], name: str) -> int:
    """Return a model flag as given, or as `settled_flags` has it; 0 where neither does."""
    given = getattr(args, name, None)
    return int(given if given is not None else settled.get(name, (0, ""))[0] or 0)


def check_state(
    args: Any, parameters: int, *, name: str, frozen: bool, sharing: int, processes: int, memory: float | None,
    where: str, on_host: int = 0,
) -> str:  # fmt: skip
    """Return "" where the state fits, and what to warn of with ``--memory_check 0``; raise `ConfigError` otherwise.

    Args:
        args: Of the run.
        parameters: Of the model, or fewer.
        name: The model's.
        frozen: Weights are all there is: they are not trained.
        sharing: Ranks that share the state.
        processes: Of the run.
        memory: Bytes; None: unknown.
        where: What has them, as "on each GPU, which has".
        on_host: Ranks that live in that memory, where it is a host's.
    """
    needed = max(1, on_host) * (WEIGHT_BYTES if frozen else STATE_BYTES) * parameters / sharing
    if memory is None or needed <= memory:
        return ""
    found = (
        f"{'weights' if frozen else 'weights, gradients and optimizer'} of {name} ({in_short(parameters)} parameters) "
        f"take {needed / GIB:.1f} GiB {where} {memory / GIB:.1f} GiB"
        + (f", and are spread over {sharing} of {processes} processes" if processes > 1 else "")
    )
    if not args.memory_check:
        return found
    remedy = "a larger --hybrid_shard_degree" if sharing < processes else "more machines or GPUs"
    offload = "" if on_host else ", or --cpu_offload 1"
    raise ConfigError(f"{found}; take a smaller model, or {remedy}{offload}; --memory_check 0 tries all the same")


def in_short(number: float) -> str:
    """Return a count in billions or millions: 6.74 B, 124.40 M."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"
