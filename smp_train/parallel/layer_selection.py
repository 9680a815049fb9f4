"""Which layers a share of them is."""

from __future__ import annotations

from fractions import Fraction


def chosen(count: int, share: Fraction) -> list[int]:
    """Return which of ``count`` layers are checkpointed for a share from 0 to 1: evenly spread, as fms-fsdp does.

    Layer i is, where (i + 1) * share passes another k + 1/2: of every N for a share of 1/N the middle one.
    """
    half = Fraction(1, 2)
    return [i for i in range(count) if (share * (i + 1) + half) // 1 > (share * i + half) // 1]
