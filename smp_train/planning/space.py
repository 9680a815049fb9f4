"""The settings that a search may choose: degrees, checkpointing, offloading and micro-batch, for one global batch."""

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
from smp_train.arguments.chosen import CHECKPOINTING, CHOSEN, SHARDING
from smp_train.distributed.degrees import divisors, plan
from smp_train.errors import ConfigError
from smp_train.models.resolve import ModelSpec
from smp_train.parallel import context_parallel, tensor_parallel

MODES = (checkpointing.NONE, checkpointing.PER_OPERATION, checkpointing.FULL)
"""Of activation checkpointing, from the most memory and least time to the least memory."""
SEVERAL_ROWS = "slower: several rows for each context group; fewer context ranks with fewer rows send less"


class Setting(NamedTuple):
    """One combination of what is searched."""

    tensor: int
    context: int
    shard: int
    """Ranks that share parameters, context ranks included: the shard degree of `smp_train.distributed.degrees`."""
    checkpointing: str
    offload: bool
    """Activations."""
    rows: int
    """Of a micro-batch."""
    micro_steps: int

    @property
    def sharing(self) -> int:
        """Ranks that hold one copy of parameters, gradients and optimizer."""
        return self.tensor * self.shard

    @property
    def share(self) -> float:
        """A rank's part of the work, in rows of a micro-batch."""
        return self.rows / (self.tensor * self.context)


@dataclass(frozen=True)
class Space:
    """What is searched."""

    args: Arguments
    given: frozenset[str]
    """The flags of `CHOSEN` that the user has given, and that stay as they are."""
    spec: ModelSpec
    devices: int
    per_node: int
    seq_len: int
    gpu: bool = True
    batch: int | None = None
    """Rows of a step, over all devices; None for those of the flags on this number of devices."""
    host: int | None = None
    """Bytes of host memory for each GPU; None: unknown, or the devices are CPUs."""

    @cached_property
    def rows(self) -> int:
        """Rows of a step, over all devices."""
        per_rank = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return self.batch or per_rank * plan(self.args, self.devices, self.per_node, smp=False).data_parallel

    def settings(self) -> tuple[list[Setting], Counter[str]]:
        """Return the settings to choose from, and how many others are left out, by reason."""
        left: list[Setting] = []
        out: Counter[str] = Counter()
        tensors = self._fixed("tensor_parallel_degree") or divisors(self.devices)
        for tensor in tensors:
            for context in self._fixed("context_parallel_degree") or divisors(self.devices // tensor or 1):
                found = list(self._of_degrees(tensor, context))
                reason = self._refusal(tensor, context) or ("" if found else self._undivided(tensor * context))
                if reason:
                    out[reason] += max(len(found), 1)
                    continue
                for each in found:
                    if self._has_several_rows(each):
                        out[SEVERAL_ROWS] += 1
                    else:
                        left.append(each)
        return left, out

    def _fixed(self, name: str) -> list[Any]:
        """Return the one value of a flag that is given; [] where the search chooses it."""
        return [getattr(self.args, name)] if name in self.given else []

    def _of_degrees(self, tensor: int, context: int) -> Iterator[Setting]:
        ranks = self.devices // tensor
        modes = [self.args.activation_checkpointing] if {*CHECKPOINTING} & self.given else MODES
        offload = self._fixed("sm_activation_offloading") or ([False, True] if self.gpu else [False])
        per_rank, rest = divmod(self.rows, max(ranks // context, 1))
        if {*SHARDING} & self.given:
            try:
                degrees = plan(self._with(tensor, context), self.devices, self.per_node, smp=False)
            except ConfigError:  # which `_refusal` says
                return
            shards = [degrees.sharded]
        else:
            shards = [each for each in divisors(ranks) if each % context == 0]
        for rows in [] if rest else self._fixed("train_batch_size") or divisors(per_rank):
            steps, rest = divmod(per_rank, rows)
            if rest or steps not in (self._fixed("gradient_accumulation_steps") or [steps]):
                continue
            for shard, mode, offloaded in product(shards, modes, offload):
                yield Setting(tensor, context, shard, mode, offloaded, rows, steps)

    def _with(self, tensor: int, context: int) -> Arguments:
        return replace(self.args, tensor_parallel_degree=tensor, context_parallel_degree=context)

    def _refusal(self, tensor: int, context: int) -> str:
        """Return why the program refuses these degrees, "" where it takes them."""
        args, config = self._with(tensor, context), self.spec.config
        if not {*SHARDING} & self.given:
            args = replace(args, hybrid_shard_degree=None, sharding_strategy="full_shard")
        try:
            plan(args, self.devices, self.per_node, smp=False)
            context_parallel.check(context, self.seq_len, args.attn_implementation, config)
            tensor_parallel.check(config, tensor, self.seq_len // context)
        except ConfigError as problem:
            return refused(problem)
        return ""

    def _undivided(self, peers: int) -> str:
        ranks = max(self.devices // peers, 1)
        if self.rows % ranks:
            return f"refused: a step of {self.rows} rows does not divide among the ranks that read rows"
        return f"refused: the micro-batch or accumulation that is given does not fit a step of {self.rows} rows"

    def _has_several_rows(self, one: Setting) -> bool:
        """Return whether fewer context ranks with fewer rows each do the same with less communication."""
        free = not {"context_parallel_degree", "train_batch_size", "gradient_accumulation_steps"} & self.given
        return free and gcd(one.context, one.rows) > 1

    def applied(self, one: Setting) -> Arguments:
        """Return the run's arguments with a setting."""
        changes: dict[str, Any] = {
            "tensor_parallel_degree": one.tensor, "context_parallel_degree": one.context,
            "sm_activation_offloading": one.offload, "train_batch_size": one.rows,
            "gradient_accumulation_steps": one.micro_steps,
        }  # fmt: skip
        if not {*SHARDING} & self.given:
            whole = one.sharing == self.devices
            changes |= {"sharding_strategy": "full_shard", "hybrid_shard_degree": None if whole else one.shard}
        if not {*CHECKPOINTING} & self.given:
            changes["activation_checkpointing"] = one.checkpointing
        return replace(self.args, **changes)

    def flags(self, one: Setting) -> dict[str, Any]:
        """Return the flags of a setting that the user has not given, which are to be added to the command."""
        args = self.applied(one)
        names = [name for name in CHOSEN if name not in self.given]
        if {*SHARDING} & self.given:
            names = [name for name in names if name not in SHARDING]
        found = {name: getattr(args, name) for name in names}
        found.pop("selective_checkpointing", None)
        if found.get("hybrid_shard_degree") is not None:  # from which the strategy follows
            found.pop("sharding_strategy")
        quiet = {"tensor_parallel_degree": 1, "context_parallel_degree": 1, "sm_activation_offloading": False}
        return {
            name: value for name, value in found.items() if value is not None and value != quiet.get(name, ())
        }  # fmt: skip


def refused(problem: ConfigError) -> str:
    """Return a refusal as a reason that settings of several degrees have in common."""
    return "refused: " + re.sub(r"(--\w+) \d+", r"\1", str(problem).partition(";")[0])
