"""The settings that a search chooses from: degrees, checkpointing, offloading and micro-batch, for one global batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd
from typing import Any, NamedTuple

from smp_train.arguments import Arguments, checkpointing
from smp_train.arguments.tuning import CHECKPOINTING, SEARCHED, SHARDING
from smp_train.distributed.degrees import divisors, plan
from smp_train.errors import ConfigError
from smp_train.parallel import context_parallel, tensor_parallel
from smp_train.planning.memory import PlannedRun

MODES = (checkpointing.NONE, checkpointing.PER_OPERATION, checkpointing.FULL)
"""Modes of activation checkpointing, by falling memory and rising time."""
UNDIVIDED = "refused: a step of {rows} rows does not divide among the ranks, or into the given micro-batches"
SEVERAL_ROWS = "slower: several rows for each context group; fewer context ranks with fewer rows send less"


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

    @property
    def share(self) -> float:
        """A rank's part of the work, in rows per micro-batch."""
        return self.rows / (self.tensor * self.context)


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

    def settings(self) -> tuple[list[Setting], Counter[str]]:
        """Return the settings to choose from, and the number of all others by reason."""
        possible: list[Setting] = []
        excluded: Counter[str] = Counter()
        devices = self.run.devices
        for tensor in self._fixed("tensor_parallel_degree") or divisors(devices):
            for context in self._fixed("context_parallel_degree") or divisors(devices // tensor or 1):
                settings = list(self._of_degrees(tensor, context))
                reason = self._refusal(tensor, context) or UNDIVIDED.format(rows=self.rows) * (not settings)
                if reason:
                    excluded[reason] += max(len(settings), 1)
                    continue
                several = [setting for setting in settings if self._has_several_rows(setting)]
                if several:
                    excluded[SEVERAL_ROWS] += len(several)
                possible += [setting for setting in settings if not self._has_several_rows(setting)]
        return possible, excluded

    def _fixed(self, name: str) -> list[Any]:
        """Return the one value of a flag that the user gives; [] if the search chooses it."""
        return [getattr(self.run.args, name)] if name in self.fixed else []

    def _of_degrees(self, tensor: int, context: int) -> Iterator[Setting]:
        run = self.run
        ranks = run.devices // tensor
        modes = [run.args.activation_checkpointing] if {*CHECKPOINTING} & self.fixed else MODES
        offload = self._fixed("sm_activation_offloading") or ([False, True] if run.gpu else [False])
        per_rank, remainder = divmod(self.rows, max(ranks // context, 1))
        if {*SHARDING} & self.fixed:
            try:
                degrees = plan(self._with(tensor, context), run.devices, run.per_node, smp=False)
            except ConfigError:  # `_refusal` gives the reason later
                return
            shards = [degrees.sharded]
        else:
            shards = [degree for degree in divisors(ranks) if degree % context == 0]
        for rows in [] if remainder else self._fixed("train_batch_size") or divisors(per_rank):
            steps, remainder = divmod(per_rank, rows)
            if remainder or steps not in (self._fixed("gradient_accumulation_steps") or [steps]):
                continue
            for shard, mode, offloads in product(shards, modes, offload):
                yield Setting(tensor, context, shard, mode, offloads, rows, steps)

    def _with(self, tensor: int, context: int) -> Arguments:
        return replace(self.run.args, tensor_parallel_degree=tensor, context_parallel_degree=context)

    def _refusal(self, tensor: int, context: int) -> str:
        """Return why the program refuses these degrees; "" if it accepts them."""
        run, args = self.run, self._with(tensor, context)
        if not {*SHARDING} & self.fixed:
            args = replace(args, hybrid_shard_degree=None, sharding_strategy="full_shard")
        try:
            plan(args, run.devices, run.per_node, smp=False)
            context_parallel.check(context, run.seq_len, args.attn_implementation, run.spec.config)
            tensor_parallel.check(run.spec.config, tensor, run.seq_len // context)
        except ConfigError as problem:
            return refused(problem)
        return ""

    def _has_several_rows(self, setting: Setting) -> bool:
        """Return whether fewer context ranks, with fewer rows each, would do the same work with less communication."""
        free = not {"context_parallel_degree", "train_batch_size", "gradient_accumulation_steps"} & self.fixed
        return free and gcd(setting.context, setting.rows) > 1

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
