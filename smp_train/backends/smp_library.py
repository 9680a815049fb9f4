"""SMP v2 as a library: whether it is there and usable, which release, and its configuration from our flags."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train.errors import ConfigError

if TYPE_CHECKING:
    from smp_train.arguments import Arguments

CLUSTERS = Path("/var/log/aws/clusters")
"""What SMP looks at to see that it runs on HyperPod; containers must mount it."""


def installed() -> bool:
    """Tell whether this torch has ``torch.sagemaker``, without importing it."""
    return importlib.util.find_spec("torch.sagemaker") is not None


def start(args: Arguments) -> Any:
    """Import ``torch.sagemaker``, initialise it by the flags, and return it; raises `ConfigError` with the cause."""
    if not installed():
        raise ConfigError(
            "--backend smp: this torch has no torch.sagemaker, which only SMP's own container brings; run in that "
            "container, or use --backend native"
        )
    try:
        library = importlib.import_module("torch.sagemaker")
    except Exception as failure:  # a closed library: anything may come out of it
        raise ConfigError(f"torch.sagemaker cannot be imported: {reason(failure)}; use --backend native") from failure
    try:
        library.init(configuration(args))
    except Exception as failure:
        raise ConfigError(f"torch.sagemaker.init refuses: {reason(failure)}") from failure
    return library


def reason(failure: Exception) -> str:
    """Return what a failure of SMP says, and the one thing about its container that most often is the cause."""
    said = " ".join(str(failure).split()) or type(failure).__name__
    if not CLUSTERS.is_dir():
        said += f" (SMP checks that it runs on HyperPod by {CLUSTERS}, which is not here: mount it into the container)"
    return said


def configuration(args: Arguments) -> dict[str, Any]:
    """Return the configuration for ``torch.sagemaker.init``: every key that has a flag, in the type SMP expects.

    What the launcher gives (``SM_HP_MP_PARAMETERS``, ``--mp_parameters``) and ``--smp_config`` is in the flags already,
    by their order of precedence; SMP reads the first itself and comes to the same.
    """
    return {
        "hybrid_shard_degree": int(args.hybrid_shard_degree or 0),
        # Its default is True: left out, activations would be offloaded unasked.
        "sm_activation_offloading": bool(args.sm_activation_offloading),
        "activation_loading_horizon": int(args.activation_loading_horizon),
        "fsdp_cache_flush_warnings": bool(args.fsdp_cache_flush_warnings),
        "allow_empty_shards": bool(args.allow_empty_shards),
        "tensor_parallel_degree": int(args.tensor_parallel_degree),
        "context_parallel_degree": int(args.context_parallel_degree),
        "expert_parallel_degree": int(args.expert_parallel_degree),
        "random_seed": int(args.seed if args.random_seed is None else args.random_seed),
    }
