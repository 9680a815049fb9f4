"""Whether the nodes of a step are alike: each leaves word of itself in a folder that all share, and reads the others'.

Ranks follow from the number of processes on each node; where one node counts fewer GPUs than the others, they would
wait for ranks that nobody starts. Standard library only.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """What a node found out about itself; ``efa`` counts Elastic Fabric Adapters, 0 where nobody asks."""

    name: str
    processes: int
    efa: int = 0


def tell(folder: Path, number: int, node: Node) -> None:
    """Leave word of node ``number``; OSError when the folder cannot be written."""
    scratch = folder / f".node-{number}.json"
    scratch.write_text(json.dumps(asdict(node)), encoding="utf-8")
    scratch.replace(folder / f"node-{number}.json")


def gather(
    folder: Path, count: int, seconds: float, sleep: Callable[[float], None] = time.sleep
) -> list[Node | None]:
    """Return what ``count`` nodes left, in order; None for those that have not within ``seconds``."""
    found: list[Node | None] = [None] * count
    deadline = time.monotonic() + seconds
    while True:
        for number in range(count):
            if found[number] is None:
                with suppress(OSError, ValueError, TypeError):
                    path = folder / f"node-{number}.json"
                    found[number] = Node(**json.loads(path.read_text(encoding="utf-8")))
        if None not in found or time.monotonic() >= deadline:
            return found
        sleep(0.2)


def odd(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes that are not as most are; of two halves, those that have less."""
    kinds = Counter((node.processes, node.efa) for node in nodes)
    usual = max(kinds, key=lambda kind: (kinds[kind], kind))
    return [node for node in nodes if (node.processes, node.efa) != usual]
