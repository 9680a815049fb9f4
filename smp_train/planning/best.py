"""The best settings of a run: the table of ``smp-train plan --search``, and the choice of ``--auto``.

`smp_train.run.auto` starts this module as a process, because the run's process already has a real process group.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, replace
from typing import Any

from smp_train.arguments import Arguments
from smp_train.arguments.flag import command_line
from smp_train.errors import ConfigError, SmpTrainError
from smp_train.launch import instances
from smp_train.launch.command import die_with_parent
from smp_train.models.hugging_face import trust_code
from smp_train.models.resolve import resolve, row_length
from smp_train.planning import cost
from smp_train.planning.memory import TIGHT, PlannedRun, count_of_devices, gib
from smp_train.planning.options import checked
from smp_train.planning.search import NO_HOST, Plan, Search
from smp_train.planning.space import Space
from smp_train.planning.step_time import Machine, machine_of
from smp_train.telemetry.logging_utils import setup_logging


def planned_run(args: Arguments, devices: int, per_node: int, *, gpu: bool) -> PlannedRun:
    """Return a run to plan from its settings and devices. Raises `ConfigError` if they cannot be planned."""
    compiled = gpu and args.use_torch_compile is not False  # by default a GPU compiles
    args = checked(args)
    trust_code(args.trust_remote_code)
    spec = resolve(args, needs_weights=False)
    return PlannedRun(args, spec, devices, per_node, row_length(args, spec), gpu, compiled)


@dataclass(frozen=True)
class Best:
    """The result of a search."""

    plans: list[Plan]
    report: dict[str, Any]
    """What ``--json`` prints; sizes in bytes."""
    complaint: str
    """Why nothing fits, and the remedy; "" if a setting fits."""


def search(space: Space, device_bytes: int | None, machine: Machine | None, *, cautious: bool = False) -> Best:
    """Return the best settings. If possible, a ``cautious`` search leaves a tenth of a GPU's memory free."""
    run = space.run
    if device_bytes is None:
        raise ConfigError("--search needs --memory_gib, or --instance_type: what fits depends on it")
    if run.args.expert_parallel_degree > 1:
        raise ConfigError(
            f"--expert_parallel_degree {run.args.expert_parallel_degree}: --search does not cover expert "
            "parallelism; give degree 1, or leave out --search"
        )
    for bound in [int(TIGHT * device_bytes)] * (cautious and run.gpu) + [device_bytes]:
        finder = Search(space, bound, machine)
        plans = finder.best()
        if plans:
            break
    report = {
        "model": run.spec.name, "devices": run.devices, "memory": device_bytes, "rows": space.rows,
        "tokens": space.rows * run.seq_len, "best": [described(space, plan, device_bytes) for plan in plans],
        "lost": dict(finder.rejected.most_common()), "stepped": len(finder.stepped),
    }  # fmt: skip
    if plans:
        return Best(plans, report, "")
    least = min((plan.memory.needed for plan in finder.stepped.values()), default=None)
    why = f"the least of those stepped needs {gib(least)}" if least else "; ".join(finder.rejected)
    if space.host is not None and finder.rejected[NO_HOST]:
        why += f", others more than the {gib(space.host)} of host memory for each device"
    total = f"{count_of_devices(run.devices)} of {gib(device_bytes)}"
    return Best(plans, report, f"nothing fits {total}: {why}; take more or larger devices")


def described(space: Space, plan: Plan, device_bytes: int) -> dict[str, Any]:
    """Return a plan as ``--json`` prints it, sizes in bytes."""
    flags = space.flags(plan.setting)
    report: dict[str, Any] = {
        "flags": flags, "words": command_line(flags), "needed": plan.memory.needed,
        "tight": plan.memory.is_tight(device_bytes), "host": plan.memory.host,
    }  # fmt: skip
    if plan.time is not None:
        report |= {
            "step_seconds": plan.time.step_seconds, "tokens_per_second": plan.time.tokens_per_second,
            "mfu": plan.time.mfu, "parts": plan.time.parts,
        }  # fmt: skip
    return report


def text(report: dict[str, Any]) -> str:
    """Return the report of a search as a table."""
    best = report["best"]
    untimed = "; no speed is known for this machine: in the order of docs/planning.md's rule"
    rows = [
        f"{report['model']} on {count_of_devices(report['devices'])} of {gib(report['memory'])}, "
        f"{report['rows']:,} rows of {report['tokens'] // report['rows']:,} tokens a step"
        + (untimed if best and "step_seconds" not in best[0] else ""), "",
    ]  # fmt: skip
    if best:
        rows.append(f"  {'tokens/s':>10} {'step':>9} {'memory':>11}    flags")
    for plan in best:
        speed, step = "-", "-"
        if "step_seconds" in plan:
            speed, step = f"{plan['tokens_per_second']:,.0f}", f"{plan['step_seconds']:.2f} s"
        memory = gib(plan["needed"]) + (" *" if plan["tight"] else "  ")
        rows.append(f"  {speed:>10} {step:>9} {memory:>13}  {plan['words'] or '(as given)'}")
    if any(plan["tight"] for plan in best):
        rows += ["", f"  * more than {TIGHT:.0%} of the device: try it before a long run"]
    if costs := cost.text(report):
        rows += ["", "  with the first:", *costs[:-1]]
    rows += [""] * bool(best)
    rows.append(f"  {'not among them' if best else 'nothing fits'}, after {report['stepped']} were stepped:")
    rows += [f"  {count:>8}  {reason}" for reason, count in report["lost"].items()]
    return "\n".join(rows)


def choose(request: dict[str, Any]) -> dict[str, Any]:
    """Return ``flags`` and ``plan`` of the best setting, and ``rows`` per step; or an ``error``.

    ``request`` holds ``args``, ``given``, ``devices``, ``per_node``, ``memory`` (bytes per device), ``host_memory``
    (bytes of the node's memory per device, None on a CPU), ``gpu`` (the name of the GPU, "" on a CPU) and ``batch``
    (rows of a step or None).
    """
    gpu_name, args = request["gpu"], Arguments(**request["args"])
    run = planned_run(args, request["devices"], request["per_node"], gpu=bool(gpu_name))
    space = Space(run, frozenset(request["given"]), request["batch"], request["host_memory"])
    machine = machine_with(gpu_name, request["memory"], run) if gpu_name else None
    result = search(space, request["memory"], machine, cautious=True)
    if result.complaint:
        return {"error": result.complaint}
    plan = result.report["best"][0]
    return {"flags": plan["flags"], "plan": plan, "rows": space.rows}


def machine_with(gpu_name: str, gpu_bytes: int, run: PlannedRun) -> Machine | None:
    """Return this instance type's rates. On one node another type with the same GPU will do; otherwise return None."""
    instance = instances.this_machine()
    if instance is None and run.devices == run.per_node:
        alike = [known for known in instances.instances().values() if re.search(rf"\b{known.gpu}\b", gpu_name)]
        instance = min(alike, key=lambda known: abs(known.gpu_memory_gb * 10**9 - gpu_bytes), default=None)
    machine = None if instance is None else machine_of(instance)
    return None if machine is None else replace(machine, per_node=run.per_node)


def main() -> None:
    """Answer the request of `smp_train.run.auto`, whose process id is the argument; end when that process ends."""
    die_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it has ended already
        return
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the log and the models' code write to stdout
    setup_logging(0, level="WARNING")
    try:
        reply = choose(json.load(sys.stdin))
    except SmpTrainError as problem:
        reply = {"error": str(problem)}
    json.dump(reply, answers)
    answers.close()


if __name__ == "__main__":
    main()
