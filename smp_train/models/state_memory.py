"""The least memory that a run's weights, gradients and optimizer take, compared with what the devices have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from smp_train.errors import ConfigError
from smp_train.models.families import FAMILIES, SYNONYMS
from smp_train.models.resolve import preset_of, settled_flags

if TYPE_CHECKING:
    from smp_train.arguments import Arguments

GIB = 2**30
WEIGHT_BYTES = 4
"""Per parameter: float32."""
STATE_BYTES = 16
"""Per parameter: weight, gradient and Adam's two moments in float32."""
CHECKPOINT_BYTES = 12
"""Per parameter: weight and Adam's two moments in float32."""


def fewest_parameters(args: Arguments) -> int:
    """Return a preset's number of parameters; a lower bound for other models. Needs no torch.

    The bound counts the embedding and two feed-forward matrices per layer, which every family has. It is 0 if flags
    and a local ``config.json`` do not give these widths.
    """
    preset = preset_of(args)
    if preset is not None:
        return preset.parameters
    settled = settled_flags(args)
    if args.model_type is not None and SYNONYMS.get(args.model_type, args.model_type) not in FAMILIES:
        return 0
    names = ("vocab_size", "hidden_width", "num_layers", "intermediate_size", "num_local_experts")
    vocabulary, width, layers, feed_forward, experts = (settled_width(args, settled, name) for name in names)
    return vocabulary * width + 2 * layers * width * feed_forward * max(1, experts)


def settled_width(args: Arguments, settled: Mapping[str, tuple[Any, str]], name: str) -> int:
    """Return a model flag's value: as given, else as in `settled_flags`, else 0."""
    value = getattr(args, name)
    return int(value if value is not None else settled.get(name, (0, ""))[0] or 0)


def check_state(
    args: Arguments, parameters: int, *, name: str, frozen: bool, sharing: int, processes: int, memory: float | None,
    where: str, on_host: int = 0,
) -> str:  # fmt: skip
    """Raise `ConfigError` if the state exceeds the memory; with ``--memory_check 0``, return a warning instead.

    Args:
        args: The run's arguments.
        parameters: Number of the model's parameters, or a lower bound.
        name: The model's name.
        frozen: Whether only weights are kept, because they are not trained.
        sharing: Number of ranks that share one copy of the state.
        processes: Number of the run's processes.
        memory: Bytes; None if unknown.
        where: The memory's owner, for the message, such as "on each GPU, which has".
        on_host: Number of ranks that share ``memory``, if it is a host's.

    Returns:
        The warning, empty if the state fits.
    """
    needed = max(1, on_host) * (WEIGHT_BYTES if frozen else STATE_BYTES) * parameters / sharing
    if memory is None or needed <= memory:
        return ""
    problem = (
        f"{'weights' if frozen else 'weights, gradients and optimizer'} of {name} ({in_short(parameters)} parameters) "
        f"take {needed / GIB:.1f} GiB {where} {memory / GIB:.1f} GiB"
        + (f", and are spread over {sharing} of {processes} processes" if processes > 1 else "")
    )
    if not args.memory_check:
        return problem
    remedy = "a larger --hybrid_shard_degree" if sharing < processes else "more machines or GPUs"
    offload = "" if on_host else ", or --cpu_offload 1, which takes as much host memory for each GPU"
    raise ConfigError(f"{problem}; take a smaller model, or {remedy}{offload}; --memory_check 0 tries all the same")


def in_short(number: float) -> str:
    """Return a count in billions or millions: 6.74 B, 124.40 M."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"
