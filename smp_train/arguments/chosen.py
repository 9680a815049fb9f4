"""The flags that are chosen for a machine, where they are not given: by `smp-train plan --search` and by ``--auto``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from smp_train.arguments.flag import show

if TYPE_CHECKING:
    from smp_train.arguments.parse import Resolved

SHARDING = ("sharding_strategy", "hybrid_shard_degree")
CHECKPOINTING = ("activation_checkpointing", "selective_checkpointing")
CHOSEN = (
    "tensor_parallel_degree", "context_parallel_degree", *SHARDING, *CHECKPOINTING, "sm_activation_offloading",
    "train_batch_size", "gradient_accumulation_steps",
)  # fmt: skip
"""By twos, flags of `SHARDING` and of `CHECKPOINTING` say the same thing."""


def given(resolved: Resolved) -> frozenset[str]:
    """Return those that the user has given, and that stay as they are."""
    return frozenset(name for name in CHOSEN if resolved.given(name))


def words(flags: dict[str, Any]) -> str:
    """Return flags as a command line has them."""
    return " ".join(f"--{name} {show(value)}" for name, value in flags.items())
