"""``smp-train plan``: memory, time and cost of a run, from stepping its own model with fake tensors.

Needs no GPU, no data and no memory: a run on thousands of devices is planned on a laptop. Of a run that does not fit
(exit code 2), at most four changes of flags are planned too, none after one that fits.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from smp_train.arguments import Arguments, parse
from smp_train.arguments.chosen import given
from smp_train.arguments.validation import check_together, check_values, refuse_natively
from smp_train.arguments.verb_parser import VerbParser
from smp_train.distributed import degrees
from smp_train.errors import ConfigError
from smp_train.launch import instances
from smp_train.models.hugging_face import trust_code
from smp_train.models.resolve import ModelSpec, names_model, resolve, row_length
from smp_train.models.state_memory import CHECKPOINT_BYTES
from smp_train.planning import cost, fitting
from smp_train.planning.best import search
from smp_train.planning.best import text as table
from smp_train.planning.estimate import estimate
from smp_train.planning.fitting import GIB, gib
from smp_train.planning.lower import lower
from smp_train.planning.space import Space
from smp_train.planning.step_time import machine_of, predict
from smp_train.planning.stepping import BACKWARD, FORWARD, HEAD
from smp_train.planning.world import Memory, world
from smp_train.telemetry.logging_utils import setup_logging


def options() -> argparse.ArgumentParser:
    """Return the parser of this verb's own flags."""
    found = VerbParser(
        prog="smp-train plan", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="all other flags are those of `smp-train train`, such as --model_type, --hybrid_shard_degree",
    )  # fmt: skip
    add = found.add_argument
    add("--devices", type=int, help="GPUs of the whole run, or with --distributed_backend gloo processes")
    add("--memory_gib", type=float, help="memory of each, in GiB; without it the plan says what is needed")
    add("--instance_type", help="EC2 instance type, such as p5.48xlarge, in place of these two")
    add("--nodes", type=int, default=1, help="instances (default: 1)")
    add("--search", action="store_true", help="find the best degrees, checkpointing, offloading and micro-batch; flags "
        "that are given stay as they are, and so does the global batch")
    add("--json", action="store_true", help="print one JSON object: bytes, seconds of a step, hours of a budget")
    cost.add_flags(found)
    return found


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises `ConfigError`, after the plan, where the run does not fit."""
    own, rest = options().parse_known_args(list(argv))
    with redirect_stdout(sys.stderr):  # where the log goes: stdout has the plan alone
        setup_logging(0, level="WARNING")
    resolved = parse(rest, environ={})
    args = resolved.args
    if not names_model(args):
        raise ConfigError(
            "plan: no model; give --model_type and --model_size, widths such as --hidden_width, or "
            "--hf_pretrained_model_name_or_dir"
        )
    devices, per_node, there, host = machine(own)
    cost.check(own)
    gpu = args.distributed_backend != "gloo"
    compiled = gpu and args.use_torch_compile is not False  # where it is left open, a GPU compiles
    check(args)
    trust_code(args.trust_remote_code)
    spec = resolve(args)
    seq_len = row_length(args, spec)
    rates = machine_of(instances.find(own.instance_type)) if own.instance_type and gpu else None
    if own.search or args.auto != "off":
        if own.tokens is not None:
            raise ConfigError("plan: --tokens is of one plan: give it with the flags that --search finds")
        space = Space(args, given(resolved), spec, devices, per_node, seq_len, gpu, host=host)
        best, nothing, *_ = search(space, there, rates, compiled=compiled, cautious=args.auto == "plan")
        print(json.dumps(best) if own.json else table(best), flush=True)
        if nothing:
            raise ConfigError(nothing)
        return 0
    with world(devices, per_node, gpu=gpu) as ranks:
        memory = estimate(args, spec, devices=devices, per_node=per_node, seq_len=seq_len, gpu=gpu, ranks=ranks)
        found = described(
            args, spec, memory, devices=devices, per_node=per_node, there=there, host=host if gpu else None, gpu=gpu
        )
        found["least"] = fitting.least(args, memory, gpu=gpu, compiled=compiled)
        if there is None or found["needed"] > there:
            found["lower"] = lower(args, spec, memory, ranks, seq_len=seq_len, gpu=gpu, there=there, host=host)
    if rates is not None:
        fast = predict(args, spec, memory, rates, devices=devices, seq_len=seq_len, compiled=compiled)
        found |= {"time": fast.described(), **cost.described(own, args, fast, rates, memory, found["checkpoint"])}
    elif own.tokens is not None:
        raise ConfigError("plan: --tokens: there is no time on gloo, nor of an instance type whose rates are not known")
    print(json.dumps(found) if own.json else text(found), flush=True)
    if found["fits"] is False:
        raise ConfigError(f"does not fit: {complaint(found)}")
    return 0


def machine(own: argparse.Namespace) -> tuple[int, int, int | None, int | None]:
    """Return (devices, devices of a node, bytes of each device, bytes of host memory for each), None where unknown."""
    if (own.devices is None) == (own.instance_type is None):
        raise ConfigError("plan: give either --devices and --memory_gib, or --instance_type and --nodes")
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


def described(
    args: Arguments, spec: ModelSpec, memory: Memory, *, devices: int, per_node: int, there: int | None,
    host: int | None, gpu: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the plan as what ``--json`` prints, sizes in bytes."""
    on_host = fitting.host_needed(args, memory)
    uses = fitting.uses(args, memory, gpu=gpu)
    peaks = {phase: sum(each.values()) for phase, each in uses.items()}
    phase = max(peaks, key=lambda each: peaks[each])
    at_peak = uses[phase]
    slack = fitting.slack(peaks[phase], gpu=gpu)
    needed = peaks[phase] + slack
    return {
        "model": spec.name, "devices": devices, "mesh": vars(degrees.plan(args, devices, per_node, smp=False)),
        "peak": peaks[phase], "phase": named(phase), "at_peak": at_peak, "slack": slack, "needed": needed,
        "memory": there, "host_memory": host,
        "fits": None if there is None else needed <= there and (host is None or on_host <= host),
        "state": memory.state, "host": fitting.on_host(args, memory, gpu=gpu), "host_needed": on_host,
        "host_while_saving": fitting.while_saving(args, memory, gpu=gpu),
        "checkpoint": CHECKPOINT_BYTES * memory.trained,
        "phases": {named(each): size for each, size in peaks.items()},
        "lower": {},
    }  # fmt: skip


def named(phase: tuple[str, int]) -> str:
    """Return a phase as it is printed."""
    part, layer = phase
    which = {0: "first layer", 1: "second layer", -1: "last layer", -2: "last but one"}.get(layer, "layers between")
    return f"{part}, {which}" if part in (FORWARD, BACKWARD) else "head and loss" if part == HEAD else part


def text(found: dict[str, Any]) -> str:
    """Return the plan as a table."""
    mesh = " x ".join(f"{name} {size}" for name, size in found["mesh"].items() if size > 1) or "not shared"
    rows = [f"{found['model']} on {found['devices']} devices ({mesh}), on each:", ""]
    rows += [f"  {use:<40}{gib(size):>14}" for use, size in sorted(found["at_peak"].items(), key=lambda row: -row[1])
             if size > 0.001 * found["peak"]]  # fmt: skip
    rows += [
        f"  {'peak: ' + found['phase']:<40}{gib(found['peak']):>14}",
        f"  {'slack (driver, libraries, fragments)':<40}{gib(found['slack']):>14}",
        f"  {'needed':<40}{gib(found['needed']):>14}", "",
        f"  {'parameters, gradients and optimizer':<40}{gib(sum(found['state'].values())):>14}",
        f"  {'host memory, of tensors':<40}{gib(found['host']):>14}",
        f"  {'host memory, more while a save runs':<40}{gib(found['host_while_saving']):>14}",
        f"  {'checkpoint, of all devices':<40}{gib(found['checkpoint']):>14}", "",
    ]  # fmt: skip
    if found["lower"]:
        sizes = (("-" if size is None else gib(size), change) for change, size in found["lower"].items())
        rows += ["  lower, with one change each:", *(f"  {size:>14}  {change}" for size, change in sizes), ""]
    rows += cost.text(found)
    if found["fits"] is not None:
        tight = fitting.TIGHT * found["memory"] < found["needed"] <= found["memory"]
        rows.append(_verdict(found["needed"], found["memory"], ", tightly: try it before a long run" * tight))
        if found["host_memory"]:
            rows.append(_verdict(found["host_needed"], found["host_memory"], " of host memory"))
    return "\n".join(rows).rstrip()


def _verdict(needed: int, there: int, where: str = "") -> str:
    return f"  {gib(needed)} {'fits' if needed <= there else 'does not fit'} into {gib(there)}{where}"


def complaint(found: dict[str, Any]) -> str:
    """Return why it does not fit and what would: the one change that suffices, else all that lower it."""
    each = f"each of {found['devices']} devices" if found["devices"] > 1 else "the device"
    if found["needed"] <= found["memory"]:
        return (
            f"{each} needs {gib(found['host_needed'])} of its host's memory, which has "
            f"{gib(found['host_memory'])} for each; offload less (--sm_activation_offloading, --cpu_offload), or take "
            "instances with more memory"
        )
    sizes = {change: size for change, size in found["lower"].items() if size is not None}
    enough = [change for change, size in sizes.items() if size <= found["memory"]]
    if enough:
        remedy = f"give {enough[0]} ({gib(sizes[enough[0]])})"
    elif sizes:
        all_of_them = "; ".join(f"{change} ({gib(size)})" for change, size in sizes.items())
        remedy = f"none of these changes alone is enough: {all_of_them}; combine them, or take more or larger devices"
    else:
        remedy = "take more or larger devices"
    return f"{each} needs {gib(found['needed'])} and has {gib(found['memory'])}; {remedy}"
