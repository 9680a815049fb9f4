"""Calls of SMP that its public documentation does not fully specify, in two forms: ours, and that of AWS's sample.

Each function stands for one assumption of docs/smp-v2.md. All ranks choose together, once, while the model is built.
If SMP could behave otherwise without an error, ``smp-train doctor --smp`` compares values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from smp_train import distributed
from smp_train.errors import ConfigError, first_few, one_line

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.backends.base import Topology
    from smp_train.distributed import Runtime

T = TypeVar("T")

refusals: dict[str, str] = {}
"""By ``assumption`` of `choose`, the error with which SMP refused our form of the call; "" if SMP accepted it."""


def choose(assumption: str, ours: Callable[[], T], sample: Callable[[], T]) -> T:
    """Return ``ours()``, or ``sample()`` on all ranks if SMP refuses ``ours`` on any rank; collective.

    Both functions may be collective if they fail on all ranks, or before their first collective.
    """
    results: list[T] = []

    def attempt() -> str:
        try:
            results.append(ours())
        except (AttributeError, TypeError, NotImplementedError) as refusal:
            return f"{type(refusal).__name__}: {one_line(refusal)}"
        return ""

    refusals[assumption] = next(filter(None, distributed.gather(assumption, attempt)), "")
    if refusals[assumption]:
        with distributed.together(f"{assumption} (refused before: {refusals[assumption]})"):
            results.append(sample())
    return results[-1]


def initialise(library: Any, config: dict[str, Any], ranks: Runtime, args: Arguments) -> None:
    """Call ``init`` in a process group of gloo and NCCL; the sample's group has NCCL alone."""

    def with_nccl() -> None:
        distributed.stop()
        seconds = 60 * args.distributed_timeout_minutes
        distributed.start(ranks, distributed_backend=args.distributed_backend, timeout_seconds=seconds, mixed=False)
        library.init(config)

    refusals.clear()
    choose("process group", lambda: library.init(config), with_nccl)


def moe_config(kind: Callable[..., T], options: dict[str, Any], coefficients: dict[str, float]) -> T:
    """Return SMP's configuration of experts with router losses; AWS's sample uses SMP's default, 0.001, for both."""

    def without() -> T:
        if set(coefficients.values()) != {0.001}:
            raise ConfigError(f"this SMP refuses {' and '.join(coefficients)}; leave the flags out")
        return kind(**options)

    return choose("router losses", lambda: kind(**options, **coefficients), without)


def wrap(fsdp: Callable[[torch.dtype], T]) -> T:
    """Wrap the model in FSDP, with gradients reduced in float32; the sample reduces them in bfloat16."""
    return choose("float32 gradients", lambda: fsdp(torch.float32), lambda: fsdp(torch.bfloat16))


def move_rotary_caches(model: nn.Module, device: torch.device) -> None:
    """Move rotary caches that are no buffers to the device: the sample's patch_neox_rope, for every family."""
    for module in model.modules():
        for name in ("cos_cached", "sin_cached"):
            if isinstance(vars(module).get(name), Tensor):
                setattr(module, name, vars(module)[name].to(device))


def whole_logits(model: nn.Module, topology: Topology, seq_len: int, vocab_size: int) -> bool:
    """Return whether each tensor rank has the logits of the whole vocabulary; the sample takes the model's own loss."""
    ids = torch.arange(seq_len // topology.cp_size, device=topology.device)[None] % vocab_size

    @torch.no_grad()
    def attempt() -> float:
        logits = model(input_ids=ids, attention_mask=None)["logits"]
        if list(logits.shape) != [*ids.shape, vocab_size]:
            raise NotImplementedError(f"logits of shape {list(logits.shape)}, not {[*ids.shape, vocab_size]}")
        return float(logits.float().logsumexp(-1).mean())

    was_training = model.training
    model.eval()
    value = choose("whole logits", attempt, lambda: 0.0)
    model.train(was_training)
    if refusals["whole logits"] and topology.cp_size > 1:
        raise ConfigError(
            f"--context_parallel_degree {topology.cp_size}: SMP returns {refusals['whole logits']}, and its own loss "
            "leaves out the ends of pieces; leave the flag out, or use --backend native"
        )
    values = distributed.gather("comparing logits", lambda: value)
    # Compare within every tensor group, so that all ranks raise the same error. NaN counts as different.
    for first in range(0, len(values), topology.tp_size):
        group = values[first : first + topology.tp_size]
        if not all(abs(number - max(group)) <= 0.01 * abs(max(group)) for number in group):
            raise ConfigError(f"tensor ranks return different logits of a row (log-sum-exp {group}); run doctor --smp")
    return not refusals["whole logits"]


def is_translated(weights: Mapping[str, Tensor], names: Iterable[str]) -> bool:
    """Return whether rank 0's full state dict has the hub's names; else the model is exported from a checkpoint."""
    missing = distributed.on_main("gathering the model", lambda: sorted(set(names) - set(weights)))
    refusals["translated export"] = f"without {first_few(missing)}" if missing else ""
    return not missing
