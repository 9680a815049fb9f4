"""Import, configuration and start of SMP v2 (``torch.sagemaker``)."""

from __future__ import annotations

import importlib
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train import distributed
from smp_train.arguments.parse import launched_by_smp
from smp_train.backends import smp_choices
from smp_train.distributed.host import older
from smp_train.errors import ConfigError, SmpTrainError, first_few, one_line

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.distributed import Runtime
    from smp_train.distributed.degrees import Degrees

CLUSTERS = Path("/var/log/aws/clusters")
"""Folder by which SMP detects HyperPod; containers must mount it."""
OLDEST_TORCH = "2.4"
"""The torch of SMP 2.6, the oldest release of SMP that this program supports."""
DEGREES = ("tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree", "hybrid_shard_degree")


class Unusable(ConfigError):
    """SMP cannot be used on any rank, for the same reason; ``--backend auto`` then trains natively."""


def start(args: Arguments, ranks: Runtime, degrees: Degrees) -> Any:
    """Import ``torch.sagemaker``, initialise it from the flags, and return it; collective.

    Raises `Unusable` on all ranks if no rank can use SMP. Raises `ConfigError` if the flags contradict the launcher, or
    if only some ranks can import SMP: those ranks would wait in ``init`` for ever.
    """
    config = configuration(args, degrees)
    with distributed.together("reading SMP's configuration"):
        check_launcher(config)
    library = _imported_by_all()
    try:
        smp_choices.initialise(library, config, ranks, args)
        with distributed.together("reading SMP's state"):
            check_state(library, config)
    except SmpTrainError as failure:
        raise Unusable(f"torch.sagemaker.init refuses: {_with_hint(failure.__cause__ or failure)}") from failure
    return library


def _imported_by_all() -> Any:
    library, cause = None, ""
    try:
        library = _imported()
    except ConfigError as failure:
        cause = str(failure)
    causes = distributed.gather("importing torch.sagemaker", lambda: (socket.gethostname(), cause))
    failures = [text for _, text in causes if text]
    if len(failures) == len(causes):
        raise Unusable(failures[0])
    if failures:
        failed = [f"{host} (rank {rank})" for rank, (host, text) in enumerate(causes) if text]
        raise ConfigError(
            f"torch.sagemaker can be imported on some ranks only, not on {first_few(failed)}: "
            f"{failures[0].partition(';')[0]}; run the same image on every node, or give --backend native"
        )
    return library


def _imported() -> Any:
    import torch

    if not distributed.smp_installed():
        raise ConfigError(
            "this torch has no torch.sagemaker, which only SMP's own container brings; run in that container, or use "
            "--backend native"
        )
    if older(torch.__version__, OLDEST_TORCH):
        raise ConfigError(
            f"torch {torch.__version__} is that of an SMP before 2.6, which is not supported; use a container of SMP "
            f"2.6 or newer (torch {OLDEST_TORCH}), or --backend native"
        )
    try:
        return importlib.import_module("torch.sagemaker")
    except Exception as failure:  # the library is closed and may raise anything
        raise ConfigError(
            f"torch.sagemaker cannot be imported: {_with_hint(failure)}; use --backend native"
        ) from failure


def configuration(args: Arguments, degrees: Degrees) -> dict[str, Any]:
    """Return the configuration for ``torch.sagemaker.init``: every key, in the type that SMP expects.

    ``SM_HP_MP_PARAMETERS``, ``--mp_parameters`` and ``--smp_config`` are already merged into the flags by precedence.
    SMP chooses a shard degree that is not given; with context or expert parallelism it must be given.
    """
    shard = int(args.hybrid_shard_degree or 0)
    if not shard and (degrees.context > 1 or degrees.expert > 1):
        shard = degrees.sharded
    switches = ("sm_activation_offloading", "fsdp_cache_flush_warnings", "allow_empty_shards")
    numbers = ("activation_loading_horizon", *DEGREES[:3])
    return {
        "hybrid_shard_degree": shard,
        **{name: bool(getattr(args, name)) for name in switches},
        **{name: int(getattr(args, name)) for name in numbers},
        "random_seed": random_seed(args),
    }


def random_seed(args: Arguments) -> int:
    """Return the seed of SMP's own modules."""
    return int(args.seed if args.random_seed is None else args.random_seed)


def check_launcher(config: dict[str, Any]) -> None:
    """Raise `ConfigError` if ``SM_HP_MP_PARAMETERS``, which SMP reads itself and prefers, contradicts ``config``."""
    for key, launched in launched_by_smp(os.environ).items():
        if launched != config[key]:
            raise ConfigError(
                f"SM_HP_MP_PARAMETERS sets {key} to {launched}, which SMP takes whatever else is set, and the run's "
                f"other settings make it {config[key]}; give it in one place"
            )


def check_state(library: Any, config: dict[str, Any]) -> None:
    """Raise `ConfigError` if SMP's state has other degrees than ``config``; a shard degree of 0 is left to SMP."""
    for key in DEGREES:
        degree = getattr(library.state, key, None)
        if config[key] and degree is not None and int(degree) != config[key]:
            raise ConfigError(
                f"torch.sagemaker.init was given {key} {config[key]} and has {int(degree)}; "
                "look for another source of SMP's configuration, or use --backend native"
            )


def _with_hint(failure: BaseException) -> str:
    """Return the message of a failed start, with a hint at the most common cause."""
    # Errors in the configuration do not depend on the machine.
    if isinstance(failure, ValueError | TypeError) or CLUSTERS.is_dir() or distributed.is_sagemaker(os.environ):
        return one_line(failure)
    hint = f"on HyperPod, SMP needs {CLUSTERS} of the host mounted into its container; it is not here"
    return f"{one_line(failure)} ({hint})"


def part(name: str, needed_by: str) -> Any:
    """Import a module of SMP. Raises `ConfigError` with the setting that needs it."""
    try:
        return importlib.import_module(f"torch.sagemaker.{name}")
    except ImportError as failure:
        raise ConfigError(f"{needed_by} needs torch.sagemaker.{name}: {one_line(failure)}") from failure
