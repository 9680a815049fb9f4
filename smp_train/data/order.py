"""The order of a run: which row comes at which position.

With N rows, position p belongs to epoch p // N and takes the (p % N)-th row of that epoch's permutation. The
permutation is a keyed 6-round Feistel network over the next power of four, with cycle walking to stay below N (Black
and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). It is computed and not stored, so every position costs the
same at any N, and the state of the data is one integer.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

from smp_train.errors import ConfigError

ROUNDS = 6


@lru_cache(maxsize=1024)
def _keys(seed: int, epoch: int | str) -> np.ndarray:
    """Return one key per round, uint64 [ROUNDS]."""
    digest = hashlib.blake2b(f"smp-train order {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser (Steele, Lea and Flood 2014): every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: np.ndarray, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Map each of ``indices`` (in [0, size), shape [n]) by a permutation of [0, size); return uint64 [n].

    The permutation is keyed by the seed and the index's epoch, a number or a text; ``epochs`` has shape [n].
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    # ``keys`` is [ROUNDS, epochs]: a batch larger than the data set has many epochs; usually there is one.
    distinct, numbers = np.unique(epochs, return_inverse=True)
    keys = np.stack([_keys(seed, epoch) for epoch in distinct.tolist()], axis=1)
    result = indices.astype(np.uint64)
    walking = np.arange(result.size)
    while walking.size:
        x = result[walking]
        left, right = x >> half, x & low
        for key in keys if distinct.size == 1 else keys[:, numbers[walking]]:
            left, right = right, left ^ (_mix(right + key) & low)
        x = (left << half) | right
        result[walking] = x
        # Elements outside [0, size) are mapped again. The network is a bijection, so each walk returns inside.
        walking = walking[x >= np.uint64(size)]
    return result


class Order:
    """The order in which a run sees the ``size`` rows of a data set, epoch after epoch, without end.

    ``shuffle`` is ``global`` (a new permutation of all rows in every epoch, by the seed) or ``none`` (stored order).
    """

    def __init__(self, size: int, seed: int = 0, shuffle: str = "global") -> None:
        if size < 1:
            raise ConfigError("the data set has no row; give --training_dir a folder with at least one shard")
        self.size, self.seed, self.shuffle = size, seed, shuffle

    def sizes(self) -> dict[str, int]:
        """Return the number of rows, under the key ``""``."""
        return {"": self.size}

    def identity(self) -> dict[str, Any]:
        """Return the settings that, together with the data, decide which row is at each position."""
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle}

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, row indices), int64, for an array of positions of any shape."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, steps = np.divmod(positions, self.size)
        if self.shuffle == "none":
            return epochs, steps
        rows = permute(steps.ravel(), self.size, self.seed, epochs.ravel()).astype(np.int64)
        return epochs, rows.reshape(positions.shape)
