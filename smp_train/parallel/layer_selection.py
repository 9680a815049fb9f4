"""Selection of evenly spaced layers."""

from __future__ import annotations

from fractions import Fraction


def chosen(count: int, share: Fraction) -> list[int]:
    """Return which of ``count`` layers are checkpointed for a share from 0 to 1: evenly spread, as fms-fsdp does.

    Layer i (from 0) is chosen where (i + 1) * share passes another k + 1/2; of a share of 1/N the middle of every N.
    """
    half = Fraction(1, 2)
    return [i for i in range(count) if (share * (i + 1) + half) // 1 > (share * i + half) // 1]
