"""``smp-train plan``: steps the model of a run with fake tensors, and prints what it takes; its flags: `options`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from smp_train.arguments import Arguments
from smp_train.arguments.chosen import given
from smp_train.distributed import degrees
from smp_train.errors import ConfigError
from smp_train.launch import instances
from smp_train.models.hugging_face import trust_code
from smp_train.models.resolve import ModelSpec, resolve, row_length
from smp_train.models.state_memory import CHECKPOINT_BYTES
from smp_train.planning import cost, fitting
from smp_train.planning.best import search
from smp_train.planning.best import text as table
from smp_train.planning.estimate import estimate
from smp_train.planning.fitting import gib
from smp_train.planning.lower import lower
from smp_train.planning.options import check, machine, read
from smp_train.planning.space import Space
from smp_train.planning.step_time import machine_of, predict
from smp_train.planning.stepping import BACKWARD, FORWARD, HEAD
from smp_train.planning.world import Memory, world
from smp_train.telemetry.logging_utils import setup_logging


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises `ConfigError`, after the plan, where the run does not fit."""
    with redirect_stdout(sys.stderr):  # where the log goes: stdout has the plan alone
        setup_logging(0, level="WARNING")
    own, resolved = read(argv)
    args = resolved.args
    devices, per_node, there, host = machine(own)
    gpu = args.distributed_backend != "gloo"
    compiled = gpu and args.use_torch_compile is not False  # where it is left open, a GPU compiles
    check(args)
    trust_code(args.trust_remote_code)
    spec = resolve(args)
    seq_len = row_length(args, spec)
    rates = machine_of(instances.find(own.instance_type)) if own.instance_type and gpu else None
    if rates is None and own.tokens is not None:
        raise ConfigError("plan: --tokens: there is no time on gloo, nor of an instance type whose rates are not known")
    if own.search or args.auto != "off":
        on = fitting.devices(devices)
        print(f"smp-train: searching settings for {on}; a minute or more", file=sys.stderr, flush=True)
        space = Space(args, given(resolved), spec, devices, per_node, seq_len, gpu, host=host)
        best, nothing, plans = search(space, there, rates, compiled=compiled, cautious=args.auto == "plan")
        first = plans[0] if plans else None
        if first is not None and first.time is not None and rates is not None:
            size = CHECKPOINT_BYTES * first.memory.trained
            best |= cost.described(own, first.args, first.time, rates, first.memory, size)
        print(json.dumps(best) if own.json else table(best), flush=True)
        if nothing:
            raise ConfigError(nothing)
        return 0
    with world(devices, per_node) as ranks:
        memory = estimate(args, spec, devices=devices, per_node=per_node, seq_len=seq_len, gpu=gpu, ranks=ranks)
        found = described(
            args, spec, memory, devices=devices, per_node=per_node, seq_len=seq_len, there=there,
            host=host if gpu else None, gpu=gpu,
        )
        found["least"] = fitting.least(args, memory, gpu=gpu, compiled=compiled)
        if there is None or found["needed"] > there:
            found["lower"] = lower(args, spec, memory, ranks, seq_len=seq_len, gpu=gpu, there=there, host=host)
    if rates is not None:
        fast = predict(args, spec, memory, rates, devices=devices, seq_len=seq_len, compiled=compiled)
        found |= {"time": fast.described(), **cost.described(own, args, fast, rates, memory, found["checkpoint"])}
    print(json.dumps(found) if own.json else text(found), flush=True)
    if found["fits"] is False:
        raise ConfigError(f"does not fit: {complaint(found)}")
    return 0


def described(
    args: Arguments, spec: ModelSpec, memory: Memory, *, devices: int, per_node: int, seq_len: int,
    there: int | None, host: int | None, gpu: bool,
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
        "bf16": args.bf16, "row_tokens": seq_len, "micro_batch": args.train_batch_size,
        "micro_steps": args.gradient_accumulation_steps, "activation_checkpointing": args.activation_checkpointing,
        "peak": peaks[phase], "phase": named(phase), "at_peak": at_peak, "slack": slack, "needed": needed,
        "memory": there, "host_memory": host,
        "fits": None if there is None else needed <= there and (host is None or on_host <= host),
        "tight": there is not None and fitting.tight(needed, there, gpu=gpu),
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
    steps = "" if found["micro_steps"] == 1 else f", {found['micro_steps']} micro-steps"
    precision = "bf16" if found["bf16"] else "fp32"
    rows = [
        f"{found['model']} on {fitting.devices(found['devices'])} ({mesh}),",
        f"rows of {found['row_tokens']:,} tokens, {found['micro_batch']} a micro-batch{steps}, "
        f"activation checkpointing {found['activation_checkpointing']}, {precision}; on each:", "",
    ]  # fmt: skip
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
        rows.append(_verdict(found["needed"], found["memory"], ", tightly: try it before a long run" * found["tight"]))
        if found["host_memory"]:
            rows.append(_verdict(found["host_needed"], found["host_memory"], " of host memory"))
    return "\n".join(rows).rstrip()


def _verdict(needed: int, there: int, where: str = "") -> str:
    return f"  {gib(needed)} {'fits' if needed <= there else 'does not fit'} into {gib(there)}{where}"


def complaint(found: dict[str, Any]) -> str:
    """Return why it does not fit and what would: the one change that suffices, else all that lower it."""
    each = f"each of {fitting.devices(found['devices'])}" if found["devices"] > 1 else "the device"
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
