"""The parts of `benchmarks.gpu`: each returns its cells, in order of worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Where a part runs: on the GPU in full, or rehearsed on a CPU at sizes that take seconds."""

    device: str
    """``cuda`` or ``cpu``."""
    rehearse: bool
    out: str
    """Folder of the results, for what a part leaves beside them."""
    scratch: str
    """Folder for what is large and of no use afterwards."""
    processes: int = 1
    """Of each driver of the part `peers`."""
    untied: bool = False
    """Whether the model of `peers` has a head of its own, as torchtitan's has."""
