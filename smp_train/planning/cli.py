"""``smp-train plan``: prints memory, time and cost of a run, and the flags that lower its memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

from smp_train.arguments.flag import command_line
from smp_train.arguments.tuning import MORE_DEVICES, Uses, fixed_flags, remedies
from smp_train.errors import ConfigError
from smp_train.launch import instances
from smp_train.models.traits import number_of_experts
from smp_train.planning import best, cost
from smp_train.planning.estimate import estimate, leave_fake_ranks
from smp_train.planning.memory import STATE, Memory, PlannedRun, count_of_devices, gib, least
from smp_train.planning.options import Devices, machine, read
from smp_train.planning.space import Space
from smp_train.planning.step_memory import Part, Use
from smp_train.planning.step_time import machine_of, predict
from smp_train.telemetry.logging_utils import setup_logging

OFFLOADING = {"sm_activation_offloading", "cpu_offload"}
MOST_REMEDIES = 4
"""At most this many changes of flags are planned; each takes as long as the plan itself."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; return the exit code. Raises `ConfigError`, after printing the plan, if the run does not fit."""
    try:
        return _print_plan(argv)
    finally:
        leave_fake_ranks()


def _print_plan(argv: Sequence[str]) -> int:
    with redirect_stdout(sys.stderr):  # log to stderr: stdout has the plan alone
        setup_logging(0, level="WARNING")
    options, resolved = read(argv)
    args = resolved.args
    devices = machine(options)
    gpu = args.distributed_backend != "gloo"
    run = best.planned_run(args, devices.total, devices.per_node, gpu=gpu)
    rates = machine_of(instances.find(options.instance_type)) if options.instance_type and gpu else None
    if rates is None and options.tokens is not None:
        raise ConfigError("plan: --tokens: there is no time on gloo, nor of an instance type whose rates are not known")
    if options.search or args.auto != "off":
        count = count_of_devices(run.devices)
        print(f"smp-train: searching settings for {count}; a minute or more", file=sys.stderr, flush=True)
        space = Space(run, fixed_flags(resolved), host=devices.host)
        result = best.search(space, devices.memory, rates, cautious=args.auto == "plan")
        report, complaint = result.report, result.complaint
        if result.plans and rates is not None and (time := result.plans[0].time) is not None:
            report |= cost.described(options, result.plans[0].run.args, time, rates, result.plans[0].memory)
        table = best.text
    else:
        memory = estimate(run)
        report, table = described(run, memory, devices), text
        if devices.memory is None or memory.needed > devices.memory:
            report["lower"] = lower(run, memory, devices)
        if rates is not None:
            speed = predict(run, memory, rates)
            report |= {"time": speed.described(), **cost.described(options, args, speed, rates, memory)}
        complaint = f"does not fit: {why_not(report)}" if report["fits"] is False else ""
    print(json.dumps(report) if options.json else table(report), flush=True)
    if complaint:
        raise ConfigError(complaint)
    return 0


def described(run: PlannedRun, memory: Memory, devices: Devices) -> dict[str, Any]:
    """Return the plan as ``--json`` prints it, sizes in bytes."""
    args, host = run.args, devices.host if run.gpu else None
    fits = None
    if devices.memory is not None:
        fits = memory.needed <= devices.memory and (host is None or memory.host_needed <= host)
    return {
        "model": run.spec.name, "devices": run.devices,
        "mesh": asdict(run.degrees), "bf16": run.bf16,
        "row_tokens": run.seq_len, "micro_batch": args.train_batch_size,
        "micro_steps": args.gradient_accumulation_steps, "activation_checkpointing": args.activation_checkpointing,
        "peak": memory.peak, "phase": phase_text(memory.peak_phase), "at_peak": memory.at_peak, "slack": memory.slack,
        "needed": memory.needed, "memory": devices.memory, "host_memory": host, "fits": fits,
        "tight": devices.memory is not None and memory.is_tight(devices.memory), "state": memory.state,
        "host": memory.host, "host_needed": memory.host_needed, "host_while_saving": memory.host_while_saving,
        "checkpoint": memory.checkpoint,
        "phases": {phase_text(phase): sum(uses.values()) for phase, uses in memory.uses.items()}, "lower": {},
        "least": least(run, memory),
    }  # fmt: skip


def lower(run: PlannedRun, memory: Memory, devices: Devices) -> dict[str, int | None]:
    """Return the bytes that each device needs after one change of flags, for each planned change that lowers them.

    `remedies` gives the order. Planning stops after `MOST_REMEDIES` changes, or after the first that fits. More devices
    are suggested without a size.
    """

    def at_peak(*kinds: str) -> int:
        return sum(memory.at_peak.get(use, 0) for use in kinds)

    uses = Uses(
        state=at_peak(*STATE), working=at_peak(Use.ACTIVATIONS, Use.TEMPORARIES), head=at_peak(Use.HEAD),
        gathered=at_peak(Use.GATHERED, Use.COMMUNICATION),
    )  # fmt: skip
    experts, tried, fits = number_of_experts(run.spec.config), 0, False
    sizes: dict[str, int | None] = {}
    for flags in remedies(run.args, uses, run.degrees, run.per_node, gpu=run.gpu, experts=experts):
        if flags is None:
            sizes[MORE_DEVICES] = None
        elif tried < MOST_REMEDIES and not fits:
            try:
                changed = estimate(run.with_flags(flags))
            except ConfigError:  # a degree that does not divide the model
                continue
            tried += 1
            fits_host = devices.host is None or changed.host_needed <= devices.host
            if changed.needed < memory.needed and fits_host:
                host = f" with {gib(changed.host_needed)} of host memory" if flags.keys() & OFFLOADING else ""
                sizes[command_line(flags) + host] = changed.needed
                fits = devices.memory is not None and changed.needed <= devices.memory
    return sizes


def phase_text(phase: tuple[str, int]) -> str:
    """Return a phase as text."""
    part, layer = phase
    layers = {0: "first layer", 1: "second layer", -1: "last layer", -2: "last but one"}.get(layer, "layers between")
    return f"{part}, {layers}" if part in (Part.FORWARD, Part.BACKWARD) else Use.HEAD if part == Part.LOSS else part


def text(report: dict[str, Any]) -> str:
    """Return the plan as a table."""
    mesh = " x ".join(f"{name} {size}" for name, size in report["mesh"].items() if size > 1) or "not shared"
    steps = "" if report["micro_steps"] == 1 else f", {report['micro_steps']} micro-steps"
    precision = "bf16" if report["bf16"] else "fp32"

    def size_row(name: str, size: int) -> str:
        return f"  {name:<40}{gib(size):>14}"

    rows = [
        f"{report['model']} on {count_of_devices(report['devices'])} ({mesh}),",
        f"rows of {report['row_tokens']:,} tokens, {report['micro_batch']} a micro-batch{steps}, "
        f"activation checkpointing {report['activation_checkpointing']}, {precision}; on each:", "",
        *(size_row(use, size) for use, size in sorted(report["at_peak"].items(), key=lambda row: -row[1])
          if size > 0.001 * report["peak"]),
        size_row(f"peak: {report['phase']}", report["peak"]),
        size_row("slack (driver, libraries, fragments)", report["slack"]),
        size_row("needed", report["needed"]), "",
        size_row("parameters, gradients and optimizer", sum(report["state"].values())),
        size_row("host memory, of tensors", report["host"]),
        size_row("host memory, more while a save runs", report["host_while_saving"]),
        size_row("checkpoint, of all devices", report["checkpoint"]), "",
    ]  # fmt: skip
    if report["lower"]:
        sizes = (("-" if size is None else gib(size), change) for change, size in report["lower"].items())
        rows += ["  lower, with one change each:", *(f"  {size:>14}  {change}" for size, change in sizes), ""]
    rows += cost.text(report)
    if report["fits"] is not None:
        tightly = ", tightly: try it before a long run" * report["tight"]
        rows.append(_verdict(report["needed"], report["memory"], tightly))
        if report["host_memory"]:
            rows.append(_verdict(report["host_needed"], report["host_memory"], " of host memory"))
    return "\n".join(rows).rstrip()


def _verdict(needed: int, available: int, remark: str) -> str:
    return f"  {gib(needed)} {'fits' if needed <= available else 'does not fit'} into {gib(available)}{remark}"


def why_not(report: dict[str, Any]) -> str:
    """Return why a run does not fit, and the remedy: the one change that is enough, else all that lower the need."""
    devices = f"each of {count_of_devices(report['devices'])}" if report["devices"] > 1 else "the device"
    if report["needed"] <= report["memory"]:
        return (
            f"{devices} needs {gib(report['host_needed'])} of its host's memory, which has "
            f"{gib(report['host_memory'])} for each; offload less (--sm_activation_offloading, --cpu_offload), or take "
            "instances with more memory"
        )
    sizes = {change: size for change, size in report["lower"].items() if size is not None}
    enough = [change for change, size in sizes.items() if size <= report["memory"]]
    if enough:
        remedy = f"give {enough[0]} ({gib(sizes[enough[0]])})"
    elif sizes:
        all_changes = "; ".join(f"{change} ({gib(size)})" for change, size in sizes.items())
        remedy = f"none of these changes alone is enough: {all_changes}; combine them, or take more or larger devices"
    else:
        remedy = "take more or larger devices"
    return f"{devices} needs {gib(report['needed'])} and has {gib(report['memory'])}; {remedy}"
