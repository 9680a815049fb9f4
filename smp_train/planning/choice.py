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
from smp_train.planning.space import Space
from smp_train.planning.step_time import Machine, machine_of
from smp_train.telemetry.logging_utils import setup_logging


def choose(request: dict[str, Any]) -> dict[str, Any]:
    """Return ``flags`` and ``plan`` of the best setting, and ``rows`` of a step.

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
    found, complaint, _ = search(space, request["memory"], rates, compiled=compiled, cautious=True)
    if complaint:
        return {"error": complaint}
    best = found["best"][0]
    return {"flags": best["flags"], "plan": best, "rows": space.rows}


def rates_of(gpu: str, memory: int, space: Space) -> Machine | None:
    """Return the rates of this machine: of its instance type, or of another with the same GPU where it is one node."""
    found = instances.here()
    if found is None and space.devices == space.per_node:
        same = [each for each in instances.instances().values() if re.search(rf"\b{each.gpu}\b", gpu)]
        found = min(same, key=lambda each: abs(each.gpu_memory_gb * 10**9 - memory), default=None)
    machine = None if found is None else machine_of(found)
    return None if machine is None else replace(machine, per_node=space.per_node)


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
