"""Which row comes at which position: a keyed permutation, computed and not stored."""

from __future__ import annotations

import numpy as np


def permute(indices: np.ndarray, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Map each of ``indices`` (in [0, size)) by the permutation of [0, size) that (seed, its epoch) names; uint64.

    Both arrays have one dimension; ``epochs`` are numbers, or texts that name more than an epoch.
    """
    raise NotImplementedError
