"""Import, configuration and start of SMP v2 (``torch.sagemaker``)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train import distributed
from smp_train.arguments.parse import launched_by_smp
from smp_train.backends import smp_choices
from smp_train.distributed.degrees import plan
from smp_train.errors import ConfigError, SmpTrainError, first_few, one_line

if TYPE_CHECKING:
    from smp_train.arguments import Arguments
    from smp_train.distributed import Runtime

CLUSTERS = Path("/var/log/aws/clusters")
"""Folder by which SMP detects HyperPod; containers must mount it."""
BROUGHT_BY = {"context_parallel_degree": "context_parallel", "expert_parallel_degree": "moe.moe_config"}
"""Configuration keys unknown to older releases, and the module introduced with each."""


def load() -> tuple[Any, str]:
    """Import ``torch.sagemaker`` and return it, or None and the reason; collective.

    Raises `ConfigError` on every rank where only some can import it: they would wait for the others in ``init``.
    """
    library, cause = None, ""
    try:
        library = _imported()
    except ConfigError as failure:
        cause = str(failure)
    causes = distributed.gather("importing torch.sagemaker", lambda: (socket.gethostname(), cause))
    failures = [failed for _, failed in causes if failed]
    if 0 < len(failures) < len(causes):
        ranks = [f"{host} (rank {rank})" for rank, (host, failed) in enumerate(causes) if failed]
        raise ConfigError(
            f"torch.sagemaker can be imported on some ranks only, not on {first_few(ranks)}: "
            f"{failures[0].partition(';')[0]}; run the same image on every node, or give --backend native"
        )
    return library, failures[0] if failures else ""


def _imported() -> Any:
    if not distributed.smp_installed():
        raise ConfigError(
            "this torch has no torch.sagemaker, which only SMP's own container brings; run in that container, or use "
            "--backend native"
        )
    try:
        return importlib.import_module("torch.sagemaker")
    except Exception as failure:  # a closed library: any exception
        raise ConfigError(f"torch.sagemaker cannot be imported: {_refused(failure)}; use --backend native") from failure


def start(library: Any, args: Arguments, ranks: Runtime) -> None:
    """Initialise ``torch.sagemaker`` from the flags; raises `ConfigError` with the cause; collective."""
    config = configuration(args, ranks.world_size)
    if args.sm_activation_offloading and not has("moe.moe_config"):
        raise ConfigError(
            "--sm_activation_offloading 1: this release of SMP is older than 2.3 (it has no torch.sagemaker.moe."
            "moe_config), and offloading is broken in 2.2; leave it out, use a newer release, or --backend native"
        )

    try:
        smp_choices.initialise(library, known_keys(config), ranks, args)
    except SmpTrainError as failure:
        raise ConfigError(f"torch.sagemaker.init refuses: {_refused(failure.__cause__ or failure)}") from failure
    check_state(library, config)


def has(module: str) -> bool:
    """Return whether this release of SMP has a module; it may lack the module's package too."""
    try:
        return importlib.util.find_spec(f"torch.sagemaker.{module}") is not None
    except ImportError:
        return False


def check_launcher(args: Arguments, world_size: int) -> None:
    """Raise `ConfigError` where ``SM_HP_MP_PARAMETERS``, which has precedence in SMP, differs from our settings."""
    ours = configuration(args, world_size)
    for key, theirs in launched_by_smp(os.environ).items():
        if theirs != ours[key]:
            raise ConfigError(
                f"SM_HP_MP_PARAMETERS sets {key} to {theirs}, which SMP takes whatever else is said, and the run's "
                f"other settings make it {ours[key]}; give it in one place"
            )


def check_state(library: Any, config: dict[str, Any]) -> None:
    """Raise `ConfigError` where degrees in SMP's state differ from the given ones (0: any shard degree)."""
    for dimension in ("tensor_parallel", "context_parallel", "expert_parallel", "hybrid_shard"):
        key = f"{dimension}_degree"
        theirs = getattr(library.state, key, None)
        ours = config.get(key, 1)
        if theirs is None and ours > 1 and key in BROUGHT_BY:
            raise ConfigError(
                f"--{key} {ours}: this release of SMP has no such degree (context parallelism came with 2.5, expert "
                "parallelism with 2.3); use a newer release, or --backend native"
            )
        if ours and theirs is not None and int(theirs) != ours:
            raise ConfigError(
                f"torch.sagemaker.init was given {key} {ours} and has {int(theirs)}; "
                "look for another source of SMP's configuration, or use --backend native"
            )


def _refused(failure: BaseException) -> str:
    """Return the message of a failed start, with a hint at the most common cause."""
    # Errors in the configuration do not depend on the machine.
    if isinstance(failure, ValueError | TypeError) or CLUSTERS.is_dir() or distributed.is_sagemaker(os.environ):
        return one_line(failure)
    hint = f"on HyperPod, SMP needs {CLUSTERS} of the host mounted into its container; it is not here"
    return f"{one_line(failure)} ({hint})"


def part(name: str, wanted_by: str, since: str = "") -> Any:
    """Import a module of SMP; `ConfigError` names the setting that needs it and the release it came with."""
    try:
        return importlib.import_module(f"torch.sagemaker.{name}")
    except ImportError as failure:
        came = f", which came with SMP {since}" if since else ""
        raise ConfigError(f"{wanted_by} needs torch.sagemaker.{name}{came}: {one_line(failure)}") from failure


def moe_config(args: Arguments, *, reads_weights: bool) -> Any:
    """Return the configuration of SMP's mixture of experts from the flags; collective."""
    options: dict[str, Any] = {
        "smp_moe": True,
        "random_seed": int(args.seed if args.random_seed is None else args.random_seed),
        "moe_load_balancing": args.moe_load_balancing,
        "global_token_shuffle": bool(args.global_token_shuffle),
        "moe_all_to_all_dispatcher": bool(args.moe_all_to_all_dispatcher),
    }
    if reads_weights:
        options["use_cpu_initialization"] = True  # the loaded weights are on the host
    coefficients = {name: getattr(args, name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")}
    return smp_choices.moe_config(part("moe.moe_config", "--moe 1", "2.3").MoEConfig, options, coefficients)


def context_options(library: Any, args: Arguments) -> dict[str, Any]:
    """Return the options of ``transform`` for context parallelism; releases before 2.6 have p2p only."""
    parameters = inspect.signature(library.transform).parameters
    passes_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    if "cp_comm_type" in parameters or (args.cp_comm_type != "p2p" and passes_on):
        return {"cp_comm_type": args.cp_comm_type}  # unsupported values are refused by SMP
    if args.cp_comm_type != "p2p":
        raise ConfigError(
            f"--cp_comm_type {args.cp_comm_type} came with SMP 2.6, and this release has p2p only; leave it out"
        )
    return {}


def configuration(args: Arguments, world_size: int) -> dict[str, Any]:
    """Return the configuration for ``torch.sagemaker.init``: every key that has a flag, in the type SMP expects.

    ``SM_HP_MP_PARAMETERS``, ``--mp_parameters`` and ``--smp_config`` are already merged into the flags by precedence.
    SMP reads the first itself with the highest precedence, hence `check_launcher`. SMP chooses a shard degree that is
    not given; with context or expert parallelism it is set here, to as many ranks as the native backend would take.
    """
    shard = int(args.hybrid_shard_degree or 0)
    if not shard and (args.context_parallel_degree > 1 or args.expert_parallel_degree > 1):
        shard = plan(args, world_size, world_size, smp=True).sharded
    switches = ("sm_activation_offloading", "fsdp_cache_flush_warnings", "allow_empty_shards")
    numbers = (
        "activation_loading_horizon", "tensor_parallel_degree", "context_parallel_degree", "expert_parallel_degree",
    )  # fmt: skip
    return {
        "hybrid_shard_degree": shard,
        **{name: bool(getattr(args, name)) for name in switches},
        **{name: int(getattr(args, name)) for name in numbers},
        "random_seed": int(args.seed if args.random_seed is None else args.random_seed),
    }


def known_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration without degrees of 1 that the imported release does not support."""
    older = {key for key, module in BROUGHT_BY.items() if not has(module)}
    return {key: value for key, value in config.items() if key not in older or value != 1}
