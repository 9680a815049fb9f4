"""The work of a step on one rank: FLOPs and bytes of its operations, and its collectives, by phase."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils.flop_counter import flop_registry

FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "resize_",
                  "set_", "lift_fresh", "record_stream", "scatter_"})  # fmt: skip
"""Operations besides views that move no bytes; `scatter_` writes one element of each row of the logits."""
LOOK_UPS = frozenset({"embedding", "gather", "index_select", "index"})
"""Operations that read as many bytes as they write, rather than all of their arguments."""
OVERWRITES = frozenset({"copy_", "_foreach_copy_", "fill_", "zero_"})
"""Operations that do not read the argument they write to."""


class Operation:
    """Classes of operations."""

    PRODUCTS, FLOAT32_PRODUCTS = "products", "products in float32"
    ATTENTION, MEMORY_BOUND = "attention", "memory-bound"


class Transfer:
    """Kinds of collectives."""

    GATHER, REDUCE, SUM, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
    KINDS = GATHER, REDUCE, SUM, EXCHANGE


class Cost(NamedTuple):
    """FLOPs, bytes and number of operations on one device; of a collective, the bytes of the group's whole tensor."""

    flops: float = 0
    size: float = 0
    """Bytes."""
    calls: float = 0

    def plus(self, addend: Cost, times: float = 1) -> Cost:
        """Return the sum with ``times`` the addend."""
        return Cost(*(value + times * more for value, more in zip(self, addend, strict=True)))


class Collective(NamedTuple):
    """A kind of collective among the ranks of one dimension."""

    kind: str
    dimension: str
    """Name of the mesh dimension, or several joined: ``shard_context``."""
    ranks: int
    nodes: int
    """Number of nodes that the ranks are on."""


@dataclass(frozen=True)
class Work:
    """The work of one step on rank 0, over all micro-batches."""

    operations: dict[tuple[Any, str], Cost] = field(default_factory=lambda: defaultdict(Cost))
    """Cost of operations by phase and class of operation."""
    collectives: dict[tuple[Any, Collective], Cost] = field(default_factory=lambda: defaultdict(Cost))

    def grown(self, deeper: Work, times: float) -> Work:
        """Return this work plus ``times`` its difference from a deeper model's work."""

        def sums(costs: Mapping[Any, Cost], larger: Mapping[Any, Cost]) -> dict[Any, Cost]:
            pairs = {key: (costs.get(key, Cost()), larger.get(key, Cost())) for key in {**costs, **larger}}
            return {key: cost.plus(more.plus(cost, -1), times) for key, (cost, more) in pairs.items()}

        return Work(sums(self.operations, deeper.operations), sums(self.collectives, deeper.collectives))


class WorkCounter:
    """Adds up the `Work` of dispatched operations."""

    def __init__(self, per_node: int) -> None:
        """Start counting; ``per_node`` is the number of ranks per node."""
        self.work = Work()
        self.dimensions: Mapping[tuple[int, ...], str] = {}
        """Names of the mesh's dimensions, by the ranks of this rank's group in each."""
        self.times = 1
        """How many micro-batches, or chunks of the loss, the running one represents."""
        self._per_node = per_node

    def add(self, phase: Any, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count one operation on plain tensors."""
        rule = _rule(operation)
        if rule is None:
            return
        if rule.collective:
            cost = Cost(0, max(map(_bytes, (*args, result))), 1)
            collective = Collective(rule.collective, *self._group(args))
            self.work.collectives[phase, collective] = self.work.collectives[phase, collective].plus(cost, self.times)
            return
        kind, cost = Operation.MEMORY_BOUND, Cost(0, rule.moved(args, kwargs, result), 1)
        if rule.flops is not None:
            kind, flops = rule.flops(args, kwargs, result)
            cost = cost._replace(flops=flops)
        self.work.operations[phase, kind] = self.work.operations[phase, kind].plus(cost, self.times)

    def sampled_chunks(self, tokens: int, chunk: int) -> Iterator[int]:
        """Yield the starts of at most three chunks; the second stands for all but the first and the last."""
        starts, times = range(0, tokens, chunk), self.times
        yield from starts[:1]
        if len(starts) > 2:
            self.times = times * (len(starts) - 2)
            yield starts[1]
            self.times = times
        yield from starts[1:][-1:]

    def _group(self, args: tuple[Any, ...]) -> tuple[str, int, int]:
        """Return the dimension, the number of ranks and the number of nodes of a collective's group."""
        names = [arg for arg in args if isinstance(arg, str)]
        if names:
            group = _resolve_process_group(names[-1])  # type: ignore[arg-type]
        else:
            boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg))
            group = dist.ProcessGroup.unbox(boxed)
        ranks = tuple(dist.get_process_group_ranks(group))
        return self.dimensions.get(ranks, "all"), len(ranks), len({rank // self._per_node for rank in ranks})


class Rule(NamedTuple):
    """How an operation is counted."""

    name: str
    collective: str
    flops: Callable[..., tuple[str, float]] | None
    written: frozenset[int | str]
    """Positions and names of the arguments that the operation writes to."""
    unread: frozenset[int | str]
    """The written arguments that it does not read."""

    def moved(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """Return the bytes that are read and written, each tensor as a whole."""
        if self.name in LOOK_UPS:
            return 2 * _bytes(result)
        if self.name == "all_gather_copy_in":  # writes only this rank's part of the second argument
            return 2 * _bytes(args[0])
        total = 0
        for key, value in (*enumerate(args), *kwargs.items()):
            total += _bytes(value) * ((key not in self.unread) + (key in self.written))
        return total if self.written else total + _bytes(result)


@functools.cache
def _rule(operation: Any) -> Rule | None:
    """Return how an operation is counted; None if it moves no bytes."""
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return None
    namespace, _, name = schema.name.partition("::")
    if namespace in ("c10d", "_c10d_functional"):
        plain = name.replace("_", "")  # _allgather_base_ or all_gather_into_tensor
        kind = next((kind for kind in Transfer.KINDS if plain.startswith(kind.replace("-", ""))), "")
        return Rule(name, kind, None, frozenset(), frozenset()) if kind else None
    written, unread = set(), set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            key: int | str = argument.name if argument.kwarg_only else position
            written.add(key)
            if argument.is_out or argument.name == "out" or name in OVERWRITES:
                unread.add(key)
    view = not written and any(result.alias_info is not None for result in schema.returns)
    if namespace in ("prim", "profiler") or name in FREE or (view and name != "all_gather_copy_in"):
        return None
    return Rule(name, "", _flops(operation, name), frozenset(written), frozenset(unread))


def _flops(operation: Any, name: str) -> Callable[..., tuple[str, float]] | None:
    """Return the function that computes an operation's class and FLOPs; None for memory-bound operations."""
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        return functools.partial(_attention, backward="backward" in name)
    if name == "_grouped_mm":
        return lambda args, kwargs, result: (_class(args[1]), 2.0 * args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), None))
    if formula is None:
        return None

    def product(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, float]:
        factors = [arg for arg in args if isinstance(arg, Tensor)]
        return _class(factors[-1]), float(formula(*(factors if "mm" in name else args), out_val=result))

    return product


def _class(factor: Tensor) -> str:
    return Operation.FLOAT32_PRODUCTS if factor.dtype == torch.float32 else Operation.PRODUCTS


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, backward: bool) -> tuple[str, float]:
    """Return the FLOPs that a kernel computes: two products forward; backward five, as in FlashAttention-2.

    Kernels skip the masked half of a causal matrix. They compute all of any other mask.
    """
    query, key, value = args[backward : backward + 3]
    rows, heads, queries, size = query.shape
    keys = key.shape[2]
    causal = kwargs.get("is_causal", any(arg is True for arg in args))
    if not causal and queries < keys and kwargs.get("attn_mask") is not None and kwargs["attn_mask"].dim() == 2:
        causal = True  # the queries are the last positions, as in `causal_lower_right`
    seen = queries * (keys - (queries - 1) / 2) if causal and queries <= keys else queries * keys
    per_pair = 3 * size + 2 * value.shape[3] if backward else size + value.shape[3]
    return Operation.ATTENTION, 2.0 * rows * heads * seen * per_pair


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
