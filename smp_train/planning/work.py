"""What a step computes, moves and sends: FLOPs and bytes of each operation, and collectives, by phase of the step."""

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

PRODUCTS, WIDE_PRODUCTS = "products", "products in float32"
ATTENTION, ELEMENTWISE = "attention", "memory-bound"
GATHER, REDUCE, SUM, EXCHANGE = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"
KINDS = {"allgather": GATHER, "all_gather": GATHER, "reduce_scatter": REDUCE, "allreduce": SUM, "all_reduce": SUM,
         "all_to_all": EXCHANGE, "alltoall": EXCHANGE}  # fmt: skip
"""Of a collective, by the beginning of its operation's name."""
FREE = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "resize_",
                  "set_", "lift_fresh", "record_stream", "scatter_"})  # fmt: skip
"""Beside views: what moves nothing; `scatter_` writes one element of each row of the logits."""
LOOK_UPS = frozenset({"embedding", "gather", "index_select", "index"})
"""They read what they write, not all that they are given."""
OVERWRITES = frozenset({"copy_", "_foreach_copy_", "fill_", "zero_"})
"""They do not read what they write to."""


class Cost(NamedTuple):
    """Of operations of one kind in one phase, on one device; of collectives, of the whole group's tensor."""

    flops: float = 0
    size: float = 0
    """Bytes."""
    calls: float = 0

    def plus(self, other: Cost, times: float = 1) -> Cost:
        """Return the sum with another, that one so many times."""
        return Cost(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


class Collective(NamedTuple):
    """One kind of collective: what it does, and between whom."""

    kind: str
    dimension: str
    """Of the mesh."""
    ranks: int
    nodes: int
    """That these ranks lie on."""


@dataclass(frozen=True)
class Work:
    """What one step does on rank 0, all micro-batches together."""

    operations: dict[tuple[Any, str], Cost] = field(default_factory=lambda: defaultdict(Cost))
    """By phase and class."""
    collectives: dict[tuple[Any, Collective], Cost] = field(default_factory=lambda: defaultdict(Cost))

    def grown(self, other: Work, times: float) -> Work:
        """Return this and ``times`` the difference to ``other``: of a model that is so many repetitions deeper."""

        def sums(mine: Mapping[Any, Cost], theirs: Mapping[Any, Cost]) -> dict[Any, Cost]:
            each = {key: (mine.get(key, Cost()), theirs.get(key, Cost())) for key in {*mine, *theirs}}
            return {key: one.plus(two.plus(one, -1), times) for key, (one, two) in each.items()}

        return Work(sums(self.operations, other.operations), sums(self.collectives, other.collectives))


class WorkCounter:
    """Counts what is dispatched into `Work`."""

    def __init__(self, per_node: int) -> None:
        """Start counting; ``per_node`` is the number of ranks on a node."""
        self.work = Work()
        self.dimensions: Mapping[tuple[int, ...], str] = {}
        """Names of the mesh's dimensions, by the ranks that this rank communicates with along them."""
        self.times = 1
        """How many micro-batches, or chunks of the loss, the one that runs stands for."""
        self._per_node = per_node

    def add(self, phase: Any, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count one operation on plain tensors."""
        how = _how(operation)
        if how is None:
            return
        if how.collective:
            size = max(map(_bytes, (*args, result)))
            collective = Collective(how.collective, *self._group(args))
            self.work.collectives[phase, collective] = self.work.collectives[phase, collective].plus(
                Cost(0, size, 1), self.times
            )
            return
        kind, cost = ELEMENTWISE, Cost(0, how.moved(args, kwargs, result), 1)
        if how.flops is not None:
            kind, flops = how.flops(args, kwargs, result)
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
        named = [each for each in args if isinstance(each, str)]
        if named:
            group = _resolve_process_group(named[-1])  # type: ignore[arg-type]
        else:
            held = next(each for each in args if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each))
            group = dist.ProcessGroup.unbox(held)
        ranks = tuple(dist.get_process_group_ranks(group))
        return self.dimensions.get(ranks, "all"), len(ranks), len({rank // self._per_node for rank in ranks})


class How(NamedTuple):
    """What is counted of an operation."""

    name: str
    collective: str
    flops: Callable[..., tuple[str, float]] | None
    written: frozenset[int | str]
    """Positions and names of the arguments that it writes to."""
    unread: frozenset[int | str]
    """Those of them that it does not read."""

    def moved(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
        """Return the bytes that are read and written, each tensor as a whole."""
        if self.name in LOOK_UPS:
            return 2 * _bytes(result)
        if self.name == "all_gather_copy_in":  # into this rank's part of the second argument
            return 2 * _bytes(args[0])
        total = 0
        for place, value in (*enumerate(args), *kwargs.items()):
            total += _bytes(value) * ((place not in self.unread) + (place in self.written))
        return total if self.written else total + _bytes(result)


@functools.cache
def _how(operation: Any) -> How | None:
    """Return what is counted of an operation; None where it moves nothing."""
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return None
    namespace, _, name = schema.name.partition("::")
    if namespace in ("c10d", "_c10d_functional"):
        kind = next((kind for start, kind in KINDS.items() if name.lstrip("_").startswith(start)), "")
        return How(name, kind, None, frozenset(), frozenset()) if kind else None
    written, unread = set(), set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            place: int | str = argument.name if argument.kwarg_only else position
            written.add(place)
            if argument.is_out or argument.name == "out" or name in OVERWRITES:
                unread.add(place)
    view = not written and any(each.alias_info is not None for each in schema.returns)
    if namespace in ("prim", "profiler") or name in FREE or (view and name != "all_gather_copy_in"):
        return None
    return How(name, "", _flops(operation, name), frozenset(written), frozenset(unread))


def _flops(operation: Any, name: str) -> Callable[..., tuple[str, float]] | None:
    """Return what gives an operation's class and FLOPs; of attention, of what the kernel computes."""
    if "scaled_dot_product" in name or "flash_attention" in name or "efficient_attention" in name:
        return functools.partial(_of_attention, backward="backward" in name)
    if name == "_grouped_mm":
        return lambda args, kwargs, result: (_class(args[1]), 2.0 * args[0].numel() * args[1].shape[-1])
    formula = flop_registry.get(getattr(torch.ops.aten, name.rstrip("_"), None))
    if formula is None:
        return None

    def of_products(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> tuple[str, float]:
        factors = [each for each in args if isinstance(each, Tensor)]
        return _class(factors[-1]), float(formula(*(factors if "mm" in name else args), out_val=result))

    return of_products


def _class(factor: Tensor) -> str:
    return WIDE_PRODUCTS if factor.dtype == torch.float32 else PRODUCTS


def _of_attention(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, *, backward: bool) -> tuple[str, float]:
    """Two products of scores and values; backward, the scores once more and four, as in FlashAttention-2.

    Under a causal mask kernels leave out what is not seen; under any other they compute all.
    """
    query, key, value = args[backward : backward + 3]
    rows, heads, queries, size = query.shape
    keys = key.shape[2]
    causal = kwargs.get("is_causal", any(each is True for each in args))
    if not causal and queries < keys and kwargs.get("attn_mask") is not None and kwargs["attn_mask"].dim() == 2:
        causal = True  # the last of the keys, as `causal_lower_right` has it
    seen = queries * (keys - (queries - 1) / 2) if causal and queries <= keys else queries * keys
    per_pair = 3 * size + 2 * value.shape[3] if backward else size + value.shape[3]
    return ATTENTION, 2.0 * rows * heads * seen * per_pair


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, list | tuple) else 0
