"""The ranks of a run with another number of replicas: which stay when nodes are lost, and which are added later."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class Sizes(NamedTuple):
    """Numbers of ranks with which a run can make the same global batches."""

    sharing: int
    """Ranks of one replica, which are neighbours."""
    ranks: Sequence[int] = ()
    """Possible numbers of all ranks, multiples of ``sharing``."""


def smaller_world(nodes: Mapping[int, int], lost: Collection[int], sizes: Sizes) -> list[int]:
    """Return the ranks that stay, in order, for the largest possible world without the ``lost`` nodes.

    ``nodes`` is the node of each rank. Replicas and nodes stay whole. Empty if no possible number of ranks remains.
    """
    block = _block(nodes, sizes)
    staying: list[int] = []
    for first in range(0, len(nodes), block):
        ranks = range(first, first + block)
        if not any(nodes[rank] in lost for rank in ranks):
            staying += ranks
    size = max((size for size in sizes.ranks if size <= len(staying) and size % block == 0), default=0)
    return staying[:size]


def larger_world(nodes: Mapping[int, int], spares: Sequence[int], sizes: Sizes) -> dict[int, int]:
    """Return the node of each rank to add for the largest possible world with ``spares``; empty if none fits."""
    block, processes = _block(nodes, sizes), _processes(nodes)
    limit = len(nodes) + len(spares) * processes
    size = max((size for size in sizes.ranks if size <= limit and size % block == 0), default=0)
    return {rank: spares[(rank - len(nodes)) // processes] for rank in range(len(nodes), size)}


def _processes(nodes: Mapping[int, int]) -> int:
    return len(nodes) // len({*nodes.values()})


def _block(nodes: Mapping[int, int], sizes: Sizes) -> int:
    """Return the number of neighbouring ranks that stay or leave together: whole replicas on whole nodes."""
    smaller, larger = sorted((sizes.sharing, _processes(nodes)))
    return larger if larger % smaller == 0 else len(nodes)
