"""SMP's configuration keys, as ``--mp_parameters``, ``SM_HP_MP_PARAMETERS`` and ``--smp_config`` give them."""

from __future__ import annotations

import json
from typing import Any

from smp_train.arguments.groups import flags
from smp_train.arguments.values import nearest, unquote
from smp_train.errors import ConfigError

MP_PARAMETERS = "mp_parameters"
SMP_KEYS = tuple(name for name, flag in flags().items() if flag.smp_key)
"""SMP's nine documented configuration keys; each is a flag of ours by the same name."""
TOLERATED = frozenset({"placement_strategy"})
"""SageMaker's SDK sends this one itself with recipes; SMP v2 tolerates it."""
SMP_V1_KEYS = frozenset({
    "active_microbatches", "auto_partition", "bf16", "checkpoint_attentions", "ddp", "ddp_dist_backend",
    "default_partition", "delayed_parameter_initialization", "fp16", "fp16_params", "memory_weight", "microbatches",
    "offload_activations", "optimize", "partitions", "pipeline", "pipeline_parallel_degree", "prescaled_batch",
    "sdp_gradient_clipping", "sdp_hierarchical_allgather", "sdp_max_live_parameters", "sdp_param_persistence_threshold",
    "sdp_reduce_bucket_size", "sharded_data_parallel_degree", "shard_optimizer_state", "skip_tracing",
})  # fmt: skip


def read_mp_parameters(value: Any, spelling: str) -> tuple[dict[str, Any], list[str]]:
    """Return (values by our flags' names, keys that have no effect) of an SMP parameter set."""
    if value in (None, "", "None", "{}", {}):
        return {}, []
    pairs = value if isinstance(value, dict) else _pairs(str(value).strip(), spelling)
    for key in pairs:
        if key in SMP_V1_KEYS:
            raise ConfigError(
                f"{spelling}: {key!r} is a parameter of SMP v1, which has no counterpart here; "
                f"the parameters are {', '.join(SMP_KEYS)}"
            )
        if key not in SMP_KEYS and key not in TOLERATED:
            hint = nearest(key, SMP_KEYS) or f"; known: {', '.join(SMP_KEYS)}"
            raise ConfigError(f"{spelling}: unknown SMP parameter {key!r}{hint}")
    return {key: pairs[key] for key in pairs if key in SMP_KEYS}, [key for key in pairs if key in TOLERATED]


def _pairs(text: str, spelling: str) -> dict[str, Any]:
    """Read ``{"k": v}`` or ``k=v,k=v``, either of them also as a JSON string."""
    if text.startswith(("{", '"')):
        try:
            parsed = json.loads(text)
        except ValueError:
            raise ConfigError(f"{spelling}: neither JSON nor key=value,key=value: {text!r}") from None
        return parsed if isinstance(parsed, dict) else _pairs(str(parsed).strip(), spelling)
    found: dict[str, Any] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{spelling}: {pair!r} is not key=value")
        found[key.strip()] = unquote(value.strip())
    return found
