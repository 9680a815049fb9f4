"""The settings that a search chooses from: degrees, checkpointing, offloading and micro-batch, for one global batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from smp_train.arguments import checkpointing
from smp_train.arguments.tuning import CHECKPOINTING, SEARCHED, SHARDING
from smp_train.distributed.degrees import divisors, plan
from smp_train.errors import ConfigError
from smp_train.parallel import context_parallel, tensor_parallel
from smp_train.planning.memory import PlannedRun

MODES = (checkpointing.NONE, checkpointing.PER_OPERATION, checkpointing.FULL)
"""Modes of activation checkpointing, by falling memory and rising time."""
UNDIVIDED = "refused: a step of {rows} rows does not divide among the ranks, or into the given micro-batches"


class Setting(NamedTuple):
    """One combination of the flags that are searched."""

    tensor: int
    context: int
    shard: int
    """Ranks that share parameters, context ranks included: the shard degree of `smp_train.distributed.degrees`."""
    checkpointing: str
    offload: bool
    """Activations are offloaded."""
    rows: int
    """Rows per micro-batch."""
    micro_steps: int

    @property
    def sharing(self) -> int:
        """Ranks that hold one copy of parameters, gradients and optimizer."""
        return self.tensor * self.shard


@dataclass(frozen=True)
class Space:
    """All settings of a run."""

    run: PlannedRun
    fixed: frozenset[str]
    """Flags in `SEARCHED` that the user gives; no setting changes them."""
    batch: int | None = None
    """Rows per step, over all devices; if None, computed from the flags and the number of devices."""
    host: int | None = None
    """Bytes of host memory per GPU; None if unknown, or if the devices are CPUs."""

    @cached_property
    def rows(self) -> int:
        """Rows per step, over all devices."""
        run = self.run
        per_rank = run.args.train_batch_size * run.args.gradient_accumulation_steps
        return self.batch or per_rank * run.degrees.data_parallel

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of activation checkpointing to choose from, by falling memory."""
        return (self.run.args.activation_checkpointing,) if {*CHECKPOINTING} & self.fixed else MODES

    def settings(self) -> tuple[list[Setting], Counter[str]]:
        """Return the settings to choose from, and the number of excluded degrees by reason."""
        possible: list[Setting] = []
        excluded: Counter[str] = Counter()
        devices = self.run.devices
        for tensor in self._choices("tensor_parallel_degree", divisors(devices)):
            for context in self._choices("context_parallel_degree", divisors(devices // tensor or 1)):
                try:
                    settings = list(self._of_degrees(tensor, context))
                except ConfigError as problem:
                    excluded[refused(problem)] += 1
                    continue
                possible += settings
                excluded[UNDIVIDED.format(rows=self.rows)] += not settings
        return possible, +excluded

    def _choices(self, flag: str, values: list[Any]) -> list[Any]:
        """Return the values to choose from; only the user's value if the user gives the flag."""
        return [getattr(self.run.args, flag)] if flag in self.fixed else values

    def _of_degrees(self, tensor: int, context: int) -> Iterator[Setting]:
        """Yield the settings with these degrees. Raises `ConfigError` if the program refuses the degrees."""
        run = self.run
        args = replace(run.args, tensor_parallel_degree=tensor, context_parallel_degree=context)
        shards = [degree for degree in divisors(run.devices // tensor or 1) if degree % context == 0]
        if not {*SHARDING} & self.fixed:
            args = replace(args, hybrid_shard_degree=None, sharding_strategy="full_shard")
        degrees = plan(args, run.devices, run.per_node, smp=False)
        if {*SHARDING} & self.fixed:
            shards = [degrees.sharded]
        context_parallel.check(context, run.seq_len, args.attn_implementation, run.spec.config)
        tensor_parallel.check(run.spec.config, tensor, run.seq_len // context)
        offload = self._choices("sm_activation_offloading", [False, True] if run.gpu else [False])
        per_rank, remainder = divmod(self.rows, run.devices // (tensor * context))
        for rows in [] if remainder else self._choices("train_batch_size", divisors(per_rank)):
            steps, remainder = divmod(per_rank, rows)
            if not remainder and steps in self._choices("gradient_accumulation_steps", [steps]):
                for shard, mode, offloads in product(shards, self.modes, offload):
                    yield Setting(tensor, context, shard, mode, offloads, rows, steps)

    def nodes(self, ranks: int, stride: int) -> int:
        """Return the number of nodes that ``ranks`` span if neighbours are ``stride`` ranks apart."""
        return min(-(-ranks * stride // self.run.per_node), ranks)

    def applied(self, setting: Setting) -> PlannedRun:
        """Return the run with a setting."""
        changes: dict[str, Any] = {
            "tensor_parallel_degree": setting.tensor, "context_parallel_degree": setting.context,
            "sm_activation_offloading": setting.offload, "train_batch_size": setting.rows,
            "gradient_accumulation_steps": setting.micro_steps,
        }  # fmt: skip
        if not {*SHARDING} & self.fixed:
            whole = setting.sharing == self.run.devices
            changes |= {"sharding_strategy": "full_shard", "hybrid_shard_degree": None if whole else setting.shard}
        if not {*CHECKPOINTING} & self.fixed:
            changes["activation_checkpointing"] = setting.checkpointing
        return self.run.with_flags(changes)

    def flags(self, setting: Setting) -> dict[str, Any]:
        """Return the flags to add to the user's command for a setting."""
        args = self.applied(setting).args
        names = {*SEARCHED} - self.fixed - {"selective_checkpointing"}
        if {*SHARDING} & self.fixed:
            names -= {*SHARDING}
        elif args.hybrid_shard_degree is not None:  # the strategy follows from it
            names -= {"sharding_strategy"}
        defaults = {"tensor_parallel_degree": 1, "context_parallel_degree": 1, "sm_activation_offloading": False}
        values = {name: getattr(args, name) for name in SEARCHED if name in names}
        return {name: value for name, value in values.items() if value not in (None, defaults.get(name))}


def refused(problem: ConfigError) -> str:
    """Return a refusal as a reason that settings of several degrees have in common."""
    return "refused: " + re.sub(r"(--\w+) \d+", r"\1", str(problem).partition(";")[0])
