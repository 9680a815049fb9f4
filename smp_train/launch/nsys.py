"""How Nsight Systems records a node: from cudaProfilerStart to Stop, which the training calls."""

from __future__ import annotations

from collections.abc import Sequence


def recording(nsys: str, report: str, words: Sequence[str]) -> list[str]:
    """Return the command that runs ``words`` under ``nsys`` and leaves ``report``.nsys-rep."""
    return [
        nsys, "profile", "--trace", "cuda,nvtx", "--sample", "none", "--capture-range", "cudaProfilerApi",
        "--capture-range-end", "stop", "--force-overwrite", "true", "--output", report, *words,
    ]  # fmt: skip
