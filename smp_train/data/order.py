"""Which row comes at which position of the run.

Position p of a run belongs to epoch p // N and is that epoch's (p % N)-th row, under a permutation that is
computed, not stored: a keyed 6-round Feistel network over the next power of four, with cycle walking to
stay below N (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So any position costs the
same, at any N, with no index array, and the whole state of the data is one integer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from smp_train.errors import ConfigError

SHUFFLES = ("none", "global")
ROUNDS = 6


@lru_cache(maxsize=1024)
def _keys(seed: int, epoch: int | str) -> np.ndarray:
    digest = hashlib.blake2b(f"smp-train order {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014): every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: np.ndarray, size: int, seed: int, epochs: np.ndarray) -> np.ndarray:
    """Map each of ``indices`` (in [0, size)) by the permutation of [0, size) that (seed, its epoch) names.

    Both arrays have one dimension; ``epochs`` are numbers, or texts that name more than an epoch. Returns uint64.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    if indices.size == 0:
        return indices.astype(np.uint64)
    names, which = np.unique(epochs, return_inverse=True)
    # [round, element]: many epochs in one pass, for data sets smaller than a batch. Most often there is one.
    keys = np.stack([_keys(seed, epoch) for epoch in names.tolist()], axis=1)
    alone = names.size == 1
    result = indices.astype(np.uint64)
    walking = np.arange(result.size)
    while walking.size:
        x = result[walking]
        left, right = x >> half, x & low
        for key in keys if alone else keys[:, which[walking]]:
            left, right = right, left ^ (_mix(right + key) & low)
        x = (left << half) | right
        result[walking] = x
        # Outside [0, size): walk on. The network is a bijection, so every walk comes back inside.
        walking = walking[x >= np.uint64(size)]
    return result


def read_shuffle(text: str) -> int:
    """Return how many shards are shuffled together: 0 for ``none``, -1 for ``global``, K for ``window:K``."""
    if text in SHUFFLES:
        return -SHUFFLES.index(text)
    name, _, shards = text.partition(":")
    if name == "window" and shards.isascii() and shards.isdigit() and int(shards) > 0:
        return int(shards)
    raise ConfigError(f"--shuffle {text}: is not one of {', '.join(SHUFFLES)}, window:K (K shards)")


class Order:
    """The order in which a run sees the rows of a data set, epoch after epoch, without end.

    Args:
        size: rows in the data set, at least 1.
        seed: a different seed gives a different order; with the epoch it is the key of the permutation.
        shuffle: ``global`` (every epoch a new permutation of all rows), ``none`` (stored order) or ``window:K``:
            every epoch a new permutation of the shards, and rows permuted among K shards at a time, so that only
            those need to be on disk.
        shards: the rows of each shard, for ``window:K``; default: one shard of all.
    """

    def __init__(
        self, size: int, seed: int = 0, shuffle: str = "global", shards: Sequence[range] | None = None
    ) -> None:
        if size < 1:
            raise ConfigError("the data set has no row; give --training_dir a folder with at least one shard")
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self._window = read_shuffle(shuffle)
        self._shards = np.array([(rows.start, len(rows)) for rows in shards or [range(size)]], dtype=np.int64)
        self._of_epoch = lru_cache(maxsize=4)(self._shard_order)

    def identity(self) -> dict[str, Any]:
        """Return what, with the data, decides which row is at a position."""
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle}

    def _shard_order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (shards in the order of an epoch, positions within it at which each begins, and the last ends)."""
        count = len(self._shards)
        turns = permute(np.arange(count), count, self.seed, np.full(count, epoch)).astype(np.int64)
        return turns, np.concatenate([[0], np.cumsum(self._shards[turns, 1])])

    def window(self, position: int) -> tuple[int, list[int]]:
        """Return (position at which the next window begins, shards that the one of ``position`` draws from)."""
        epoch, within = divmod(position, self.size)
        turns, begins = self._of_epoch(epoch)
        first = (int(np.searchsorted(begins, within, side="right")) - 1) // self._window * self._window
        last = min(first + self._window, len(turns))
        return epoch * self.size + int(begins[last]), sorted(turns[first:last].tolist())

    def ahead(self, first: int, last: int) -> tuple[list[int], list[int]]:
        """Return (shards that positions ``first`` to ``last`` draw from, those of the window behind), in order of need.

        For ``window:K``.
        """
        needed: list[int] = []
        position = first
        while position <= last:
            position, shards = self.window(position)
            needed += shards
        return needed, self.window(position)[1]

    def _windowed(self, epoch: int, within: np.ndarray) -> np.ndarray:
        turns, begins = self._of_epoch(epoch)
        first = (np.searchsorted(begins, within, side="right") - 1) // self._window * self._window
        rows = np.empty_like(within)
        for window in np.unique(first).tolist():
            here = first == window
            last = min(window + self._window, len(turns))
            start, size = begins[window], int(begins[last] - begins[window])
            # A key of its own for each window: two of one size must not share a permutation.
            key = np.full(int(here.sum()), f"{epoch} window {window}")
            place = permute(within[here] - start, size, self.seed, key).astype(np.int64) + start
            shard = np.searchsorted(begins, place, side="right") - 1
            rows[here] = self._shards[turns[shard], 0] + place - begins[shard]
        return rows

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, row indices), int64, for an array of positions of any shape."""
        positions = np.asarray(positions, dtype=np.int64)
        epochs, within = np.divmod(positions, self.size)
        if self.shuffle == "none":
            return epochs, within
        if self.shuffle == "global":
            found = permute(within.ravel(), self.size, self.seed, epochs.ravel()).astype(np.int64)
            return epochs, found.reshape(positions.shape)
        result = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            result[epochs == epoch] = self._windowed(epoch, within[epochs == epoch])
        return epochs, result
