"""The flags of ``smp-train plan``, read and checked without torch: help and mistakes take no time."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from smp_train.arguments import Arguments, Resolved, parse
from smp_train.arguments.validation import check_flags
from smp_train.arguments.verb_parser import at_least, parser_with_train_flags, positive
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
"""Hours of one device per failure: Llama 3 was interrupted 419 times unexpectedly in 54 days on 16,384 H100 (The Llama
3 Herd of Models, 2024, table 5)."""
RESTART_MINUTES = 10.0
"""Minutes from a failure to the next step, an assumption."""
UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def options() -> argparse.ArgumentParser:
    """Return the parser of this verb's own flags."""
    parser = parser_with_train_flags("plan", ABOUT, "--model_type, --hybrid_shard_degree")
    add = parser.add_argument
    add("--devices", type=at_least(1), help="GPUs of the whole run, or with --distributed_backend gloo processes")
    add("--memory_gib", type=positive, help="memory of each, in GiB; without it the plan says what is needed")
    add("--instance_type", help="EC2 instance type, such as p5.48xlarge, in place of these two")
    add("--nodes", type=at_least(1), default=1, help="instances (default: 1)")
    add("--search", action="store_true", help="find the best degrees, checkpointing, offloading and micro-batch; flags "
        "that are given stay as they are, and so does the global batch")
    add("--json", action="store_true", help="print one JSON object: bytes, seconds of a step, hours of a budget")
    add("--tokens", type=number, help="train on so many, such as 15e12 or 1T: hours, and with a price the cost")
    add("--price_per_hour", type=positive, help="of one instance, in any currency")
    add("--device_hours_per_failure", type=positive, default=HOURS_PER_FAILURE,
        help=f"of one device (default: {HOURS_PER_FAILURE:,.0f}, Llama 3's)")  # fmt: skip
    add("--interruptions_per_hour", type=not_negative, default=0.0, help="of one spot instance (default: 0)")
    add("--restart_minutes", type=not_negative, default=RESTART_MINUTES,
        help=f"from a failure to the next step (default: {RESTART_MINUTES:.0f}, an assumption)")  # fmt: skip
    add("--write_gb_per_s", type=positive,
        help="what a node writes of a checkpoint, 10^9 bytes/s; without it saves are free")  # fmt: skip
    return parser


def read(argv: Sequence[str]) -> tuple[argparse.Namespace, Resolved]:
    """Return this verb's own flags and the run's. Raises `ConfigError` for mistakes that show without a model."""
    own_flags, train_flags = options().parse_known_args(list(argv))
    resolved = parse(train_flags, environ={})
    if not names_model(resolved.args):
        raise ConfigError(
            "plan: no model; give --model_type and --model_size, widths such as --hidden_width, or "
            "--hf_pretrained_model_name_or_dir"
        )
    check_native_releases()
    machine(own_flags)
    if own_flags.tokens is None and own_flags.price_per_hour is not None:
        raise ConfigError("plan: --price_per_hour is for a budget; give --tokens")
    if own_flags.tokens is not None and own_flags.instance_type is None:
        raise ConfigError("plan: --tokens needs --instance_type: the speed of other devices is not known")
    checked(resolved.args)
    settled_flags(resolved.args)  # refuses an unknown preset
    return own_flags, resolved


def number(text: str) -> float:
    """Read a number above 0 such as 15e12, 300B or 1T."""
    unit = UNITS.get(text[-1:].upper())
    return positive(text[:-1]) * unit if unit else positive(text)


def not_negative(text: str) -> float:
    """Read a finite number from 0 up."""
    return positive(text) if float(text) else 0.0


def short_number(tokens: float) -> str:
    """Return a number as `number` reads it: 1.5T; numbers below 1,000 have no unit."""
    unit = max((name for name, size in UNITS.items() if size <= tokens), key=UNITS.__getitem__, default="")
    return f"{tokens / UNITS.get(unit, 1):.4g}{unit}"


class Devices(NamedTuple):
    """The devices of a run. A size is None if it is unknown."""

    total: int
    per_node: int
    memory: int | None
    """Bytes per device."""
    host: int | None
    """Bytes of host memory per device."""


def machine(own_flags: argparse.Namespace) -> Devices:
    """Return the devices that the flags describe."""
    if (own_flags.devices is None) == (own_flags.instance_type is None):
        raise ConfigError(
            "plan: give either --devices, with --memory_gib to learn whether it fits, or --instance_type, and --nodes"
        )
    if own_flags.instance_type is None:
        count, gib = own_flags.devices, own_flags.memory_gib
        if own_flags.nodes != 1:
            raise ConfigError("plan: --nodes goes with --instance_type")
        return Devices(count, min(count, 8), None if gib is None else int(gib * GIB), None)
    instance = instances.find(own_flags.instance_type)
    if own_flags.memory_gib is not None:
        raise ConfigError("plan: --memory_gib goes with --devices")
    host = instance.host_memory_gib * GIB // instance.gpus
    return Devices(own_flags.nodes * instance.gpus, instance.gpus, instance.gpu_bytes, host)


def checked(args: Arguments) -> Arguments:
    """Return settings for the native backend without compilation; raise `ConfigError` if they cannot be planned."""
    if args.backend == "smp":
        raise ConfigError("--backend smp: plan steps the native backend's model; leave it out for an estimate")
    if args.fp8:
        raise ConfigError("--fp8 1: needs a GPU that has it, so there is no plan; --fp8 0 takes no less")
    native = dataclasses.replace(args, backend="native", use_torch_compile=False)
    check_flags(native, natively=True)
    return native
