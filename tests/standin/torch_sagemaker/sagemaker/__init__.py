"""Stand-in for SMP v2: `init`, `transform`, `state`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import standin

from .state_handler import state

KEYS: dict[str, tuple[type, Any]] = {
    "hybrid_shard_degree": (int, 0), "sm_activation_offloading": (bool, True), "activation_loading_horizon": (int, 2),
    "fsdp_cache_flush_warnings": (bool, True), "allow_empty_shards": (bool, False),
    "tensor_parallel_degree": (int, 1), "context_parallel_degree": (int, 1), "expert_parallel_degree": (int, 1),
    "random_seed": (int, 0),
}  # fmt: skip


def init(config: str | dict[str, Any] | None = None) -> None:
    """Configure; what the launcher sets wins over ``config``, key by key."""
    given = json.loads(Path(config).read_text()) if isinstance(config, str) else dict(config or {})
    unknown = set(given) - set(KEYS)
    if unknown:
        raise ValueError(f"unknown configuration {sorted(unknown)}")
    launcher = json.loads(os.environ.get("SM_HP_MP_PARAMETERS", "{}"))
    merged = {key: default for key, (_, default) in KEYS.items()}
    origin = dict.fromkeys(KEYS, "default")
    for source, values in (("config", given), ("launcher", launcher)):
        for key in set(values) & set(KEYS):
            merged[key], origin[key] = values[key], source
    for key, (kind, _) in KEYS.items():
        if not isinstance(merged[key], kind) or (kind is int and isinstance(merged[key], bool)):
            raise ValueError(f"{key} must be {kind.__name__}, not {merged[key]!r}")
    standin.record("init", config=merged, origin=origin, group=dist.is_initialized(), kind=type(config).__name__)
    state.configure(merged)


def transform(
    model: Any, device: Any = None, dtype: Any = None, config: Any = None,
    load_state_dict_from_rank0: bool = False, cp_comm_type: str = "p2p",
) -> Any:  # fmt: skip
    """See `tensor_parallel.transformer.transform`."""
    from .tensor_parallel.transformer import transform as transformed

    return transformed(
        model, device=device, dtype=dtype, config=config,
        load_state_dict_from_rank0=load_state_dict_from_rank0, cp_comm_type=cp_comm_type,
    )  # fmt: skip


__all__ = ["init", "state", "transform"]
