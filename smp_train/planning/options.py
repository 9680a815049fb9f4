"""The flags of ``smp-train plan``, read and checked without torch, so that help and mistakes need none and no wait."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

from smp_train.arguments import Arguments, Resolved, parse
from smp_train.arguments.validation import check_together, check_values, refuse_natively
from smp_train.arguments.verb_parser import beside_train
from smp_train.distributed.host import check_native_releases
from smp_train.errors import ConfigError
from smp_train.launch import instances
from smp_train.models.resolve import names_model, settled_flags
from smp_train.models.state_memory import GIB

ABOUT = """``smp-train plan``: memory, time and cost of a run, from stepping its own model with fake tensors.

Needs no GPU, no data and no memory: a run on thousands of devices is planned on a laptop. Of a run that does not fit
(exit code 2), at most four changes of flags are planned too, none after one that fits.
"""
HOURS_PER_FAILURE = 54 * 24 * 16384 / 419
"""Of one device: Llama 3 was interrupted 419 times unexpectedly in 54 days on 16,384 H100 (The Llama 3 Herd of Models,
2024, table 5)."""
RESTART_MINUTES = 10.0
"""From a failure to the next step. An assumption."""
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def options() -> argparse.ArgumentParser:
    """Return the parser of this verb's own flags."""
    found = beside_train("plan", ABOUT, "--model_type, --hybrid_shard_degree")
    add = found.add_argument
    add("--devices", type=int, help="GPUs of the whole run, or with --distributed_backend gloo processes")
    add("--memory_gib", type=float, help="memory of each, in GiB; without it the plan says what is needed")
    add("--instance_type", help="EC2 instance type, such as p5.48xlarge, in place of these two")
    add("--nodes", type=int, default=1, help="instances (default: 1)")
    add("--search", action="store_true", help="find the best degrees, checkpointing, offloading and micro-batch; flags "
        "that are given stay as they are, and so does the global batch")
    add("--json", action="store_true", help="print one JSON object: bytes, seconds of a step, hours of a budget")
    add("--tokens", type=number, help="train on so many, such as 15e12 or 1T: hours, and with a price the cost")
    add("--price_per_hour", type=float, help="of one instance, in any currency")
    add("--device_hours_per_failure", type=float, default=HOURS_PER_FAILURE,
        help=f"of one device (default: {HOURS_PER_FAILURE:,.0f}, Llama 3's)")  # fmt: skip
    add("--interruptions_per_hour", type=float, default=0.0, help="of one spot instance (default: 0)")
    add("--restart_minutes", type=float, default=RESTART_MINUTES,
        help=f"from a failure to the next step (default: {RESTART_MINUTES:.0f}, an assumption)")  # fmt: skip
    add(
        "--write_gb_per_s",
        type=float,
        help="what a node writes of a checkpoint, 10^9 bytes/s; without it saves are free",
    )
    return found


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, Resolved]:
    """Return this verb's own flags and the run's. Raises `ConfigError` for what is seen without the model."""
    own, rest = options().parse_known_args(list(argv))
    resolved = parse(rest, environ={})
    if not names_model(resolved.args):
        raise ConfigError(
            "plan: no model; give --model_type and --model_size, widths such as --hidden_width, or "
            "--hf_pretrained_model_name_or_dir"
        )
    check_native_releases()
    machine(own)
    check_cost(own)
    check(dataclasses.replace(resolved.args))
    settled_flags(resolved.args)  # refuses an unknown preset
    return own, resolved


def number(text: str) -> float:
    """Read a number such as 15e12, 300B or 1T; ValueError otherwise."""
    unit = UNITS.get(text[-1:].upper())
    return float(text[:-1]) * unit if unit else float(text)


def short(tokens: float) -> str:
    """Return a number as `number` reads it: 1.5T; in full where it has no unit."""
    unit = max((name for name, size in UNITS.items() if size <= tokens), key=UNITS.__getitem__, default="")
    return f"{tokens / UNITS.get(unit, 1):.4g}{unit}"


def check_cost(own: argparse.Namespace) -> None:
    """Raise `ConfigError` for flags of the cost that cannot be."""
    above = ("tokens", "price_per_hour", "device_hours_per_failure", "write_gb_per_s")
    wrong = [name for name in above if (value := getattr(own, name)) is not None and not 0 < value < math.inf]
    wrong += [name for name in ("interruptions_per_hour", "restart_minutes") if not 0 <= getattr(own, name) < math.inf]
    if wrong:
        raise ConfigError(f"plan: --{wrong[0]} {getattr(own, wrong[0]):g}: give a positive number")
    if own.tokens is None and own.price_per_hour is not None:
        raise ConfigError("plan: --price_per_hour is for a budget; give --tokens")
    if own.tokens is not None and own.instance_type is None:
        raise ConfigError("plan: --tokens needs --instance_type: the speed of other devices is not known")


def machine(own: argparse.Namespace) -> tuple[int, int, int | None, int | None]:
    """Return (devices, devices of a node, bytes of each device, bytes of host memory for each), None where unknown."""
    if (own.devices is None) == (own.instance_type is None):
        raise ConfigError(
            "plan: give either --devices, with --memory_gib to learn whether it fits, or --instance_type, and --nodes"
        )
    if own.instance_type is None:
        memory = own.memory_gib
        if own.devices < 1 or own.nodes != 1 or (memory is not None and not 0 < memory < math.inf):
            raise ConfigError("plan: --devices and --memory_gib are positive, and --nodes goes with --instance_type")
        return own.devices, min(own.devices, 8), None if memory is None else int(memory * GIB), None
    instance = instances.find(own.instance_type)
    if own.nodes < 1 or own.memory_gib is not None:
        raise ConfigError("plan: --nodes must be at least 1, and --memory_gib goes with --devices")
    host = instance.host_memory_gib * GIB // instance.gpus
    return own.nodes * instance.gpus, instance.gpus, instance.gpu_bytes, host


def check(args: Arguments) -> None:
    """Refuse flags that are not planned or contradict each other; select the native backend, without compilation."""
    if args.backend == "smp":
        raise ConfigError("--backend smp: plan steps the native backend's model; leave it out for an estimate")
    if args.fp8:
        raise ConfigError("--fp8 1: needs a GPU that has it, so there is no plan; --fp8 0 takes no less")
    check_values(args)
    args.backend, args.use_torch_compile = "native", False
    refuse_natively(args)
    check_together(args)
