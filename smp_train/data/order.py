"""Which row comes at which position of the run.

Position p of a run belongs to epoch p // N and is that epoch's (p % N)-th row, under a permutation that is
computed, not stored: a keyed 6-round Feistel network over the next power of four, with cycle walking to
stay below N (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So any position costs the
same, at any N, with no index array, and the whole state of the data is one integer.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from smp_train.errors import ConfigError

SHUFFLES = ("global", "none")
ROUNDS = 6


@lru_cache(maxsize=1024)
def _keys(seed: int, epoch: int) -> np.ndarray:
    digest = hashlib.blake2b(f"smp-train order {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: np.ndarray, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Map each of ``indices`` (in [0, size)) by the permutation of [0, size) that (seed, its epoch) names.

    Both arrays have one dimension; returns uint64.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    if indices.size == 0:
        return indices.astype(np.uint64)
    names, which = np.unique(epochs, return_inverse=True)
    # [round, element]: many epochs in one pass, for data sets smaller than a batch.
    keys = np.stack([_keys(seed, int(epoch)) for epoch in names], axis=1)[:, which]
    result = indices.astype(np.uint64)
    walking = np.arange(result.size)
    while walking.size:
        x = result[walking]
        left, right = x >> half, x & low
        for key in keys[:, walking]:
            left, right = right, left ^ (_mix(right + key) & low)
        x = (left << half) | right
        result[walking] = x
        # Outside [0, size): walk on. The network is a bijection, so every walk comes back inside.
        walking = walking[x >= np.uint64(size)]
    return result


class Order:
    """The order in which a run sees the rows of a data set, epoch after epoch, without end.

    Args:
        size: rows in the data set, at least 1.
        seed: a different seed gives a different order; with the epoch it is the key of the permutation.
        shuffle: ``global`` (every epoch a new permutation of all rows) or ``none`` (stored order).
    """

    def __init__(self, size: int, seed: int = 0, shuffle: str = "global") -> None:
        if size < 1:
            raise ConfigError("the data set has no row; give --training_dir a folder with at least one shard")
        if shuffle not in SHUFFLES:
            raise ConfigError(f"--shuffle {shuffle} is not known; use one of {', '.join(SHUFFLES)}")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, row indices), int64, for an array of positions of any shape."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, within = np.divmod(positions, self.size)
        if self.shuffle == "none":
            return epochs, within
        rows = permute(within.ravel(), self.size, self.seed, epochs.ravel())
        return epochs, rows.astype(np.int64).reshape(positions.shape)

    def row(self, position: int) -> tuple[int, int]:
        """Return (epoch, row index) of one position."""
        epochs, rows = self.rows(np.array([position]))
        return int(epochs[0]), int(rows[0])
