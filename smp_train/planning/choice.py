"""The best settings of a run that has begun, asked for by rank 0 in a process of its own.

In the run's own process the fake process group and the fake tensors would meet the real ones.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from smp_train.arguments import Arguments
from smp_train.distributed import child
from smp_train.errors import SmpTrainError
from smp_train.launch import instances
from smp_train.models.hugging_face import trust_code
from smp_train.models.resolve import resolve, row_length
from smp_train.planning.best import search
from smp_train.planning.options import check
from smp_train.planning.search import Plan, Search
from smp_train.planning.space import Setting, Space
from smp_train.planning.step_time import Machine, machine_of
from smp_train.telemetry.logging_utils import setup_logging

TRIED = 6
"""Settings that ``--auto trial`` steps."""
MAY_FIT = 1.1
"""How many times the memory a setting may need by its plan, whose slack is an assumption, to be tried."""


def choose(request: dict[str, Any]) -> dict[str, Any]:
    """Return ``flags`` and ``plan`` of the best setting, ``rows`` of a step, and what a ``trial`` is to compare.

    ``request`` holds ``args``, ``given``, ``devices``, ``per_node``, ``memory`` in bytes of each device,
    ``host_memory`` of a node for each (None on a CPU), ``gpu`` (the name of the GPU, "" on a CPU) and ``batch`` (rows
    of a step or None). Raises `ConfigError` where nothing fits.
    """
    args = Arguments(**request["args"])
    compiled = bool(request["gpu"]) and args.use_torch_compile is not False
    check(args)
    trust_code(args.trust_remote_code)
    spec = resolve(args)
    space = Space(
        args, frozenset(request["given"]), spec, request["devices"], request["per_node"], row_length(args, spec),
        bool(request["gpu"]), request["batch"], request["host_memory"],
    )  # fmt: skip
    rates = rates_of(request["gpu"], request["memory"], space) if request["gpu"] else None
    found, complaint, of, plans = search(
        space, request["memory"], rates, compiled=compiled, cautious=args.auto == "plan"
    )  # fmt: skip
    if complaint:
        return {"error": complaint}
    best = found["best"][0]
    return {
        "flags": best["flags"], "plan": best, "rows": space.rows,
        "trial": [space.flags(each.setting) for each in beside(of, plans[0])],
    }  # fmt: skip


def rates_of(gpu: str, memory: int, space: Space) -> Machine | None:
    """Return the rates of this machine: of its instance type, or of another with the same GPU where it is one node."""
    found = instances.here()
    if found is None and space.devices == space.per_node:
        same = [each for each in instances.instances().values() if re.search(rf"\b{each.gpu}\b", gpu)]
        found = min(same, key=lambda each: abs(each.gpu_memory_gb * 10**9 - memory), default=None)
    machine = None if found is None else machine_of(found)
    return None if machine is None else replace(machine, per_node=space.per_node)


def beside(search: Search, best: Plan) -> list[Plan]:
    """Return the best and others of its degrees, by memory: another micro-batch, another checkpointing."""

    def layout(one: Setting) -> Setting:
        return one._replace(checkpointing="", rows=0, micro_steps=0)

    plans = (search.known(one) for one in search.space.settings()[0] if layout(one) == layout(best.setting))
    same = [plan for plan in plans if plan is not None and search.fits(plan, MAY_FIT)]
    return sorted(sorted(same, key=lambda plan: plan.rank)[:TRIED], key=lambda plan: plan.needed)


def main() -> None:
    """Answer the request of `smp_train.auto`."""
    request, answer = child.served()
    setup_logging(0, level="WARNING")
    try:
        found = choose(request)
    except SmpTrainError as problem:
        found = {"error": str(problem)}
    answer(found)


if __name__ == "__main__":
    main()
