"""Several data sets as one, joined or blended by weight; the sample at each position is computed, not stored.

The positions of a blend are divided into blocks. Every block gives each source the same number of slots, in proportion
to the weights; a permutation keyed by (seed, block) decides which slots. So the number of rows that a source has
provided before a position is computed directly, and each source is read in its own order.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from smp_train.data.order import Order, permute
from smp_train.data.samples import Sample, Samples
from smp_train.data.source import digest_of
from smp_train.errors import ConfigError

BLOCK = 10_000
"""Number of slots in a block, so that weights are rounded to one part in ten thousand."""


class Joined:
    """The samples of several sources, one source after the other; their names begin with the sources' locations."""

    def __init__(self, sources: Sequence[Samples], locations: Sequence[str]) -> None:
        self.sources, self.locations = list(sources), list(locations)
        self.starts = [0, *accumulate(map(len, sources))]
        self.fingerprint = digest_of(*(source.fingerprint for source in sources))
        self.layout = "; ".join(dict.fromkeys(source.layout for source in sources))

    def __len__(self) -> int:
        return self.starts[-1]

    def sample(self, index: int, key: object = "", *, with_name: bool = True) -> Sample:
        """Return a sample of the source that ``index`` falls into."""
        number = bisect.bisect_right(self.starts, index) - 1
        sample = self.sources[number].sample(index - self.starts[number], key, with_name=with_name)
        if with_name:
            sample.name = f"{self.locations[number]}/{sample.name}"
        return sample


class BlendOrder:
    """The order of a blend: draws from each source in proportion to its weight, in the source's own order.

    The weights may have any sum. For ``--epochs``, an epoch of the blend has as many positions as all sources have
    rows. A source whose weight is larger than its share of the rows begins its own next epoch earlier. The seed decides
    the slots; the seed and the number of a source decide the order within that source. ``shuffle`` is as in `Order`.
    """

    def __init__(self, samples: Joined, weights: Sequence[float], seed: int = 0, shuffle: str = "global") -> None:
        self.size, self.seed, self.shuffle, self.locations = len(samples), seed, shuffle, samples.locations
        self.slots = apportion(weights, BLOCK)
        for location, slots in zip(self.locations, self.slots, strict=True):
            if slots == 0:
                raise ConfigError(f"--training_dir {location}: its weight is below one in {BLOCK}; leave it out")
        self.orders = [
            Order(len(source), seed if number == 0 else seed + (number << 64), shuffle)
            for number, source in enumerate(samples.sources)
        ]
        self._starts = np.array(samples.starts[:-1])
        self._slots_of_block = lru_cache(maxsize=64)(self._draw)

    def sizes(self) -> dict[str, int]:
        """Return the number of samples of each source, by its location."""
        return {location: order.size for location, order in zip(self.locations, self.orders, strict=True)}

    def shares(self) -> str:
        """Return the percentage of samples that comes from each source, as a text for the log."""
        parts = zip(self.locations, self.slots, strict=True)
        return ", ".join(f"{100 * slots / BLOCK:g} % from {location}" for location, slots in parts)

    def identity(self) -> dict[str, Any]:
        """Return the settings that, together with the data, decide which row is at each position."""
        blend = [[order.size, slots] for order, slots in zip(self.orders, self.slots, strict=True)]
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle, "blend": blend}

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each slot of a block, and how often the block draws from that source before the slot."""
        sources = sources_of_block(block, self.slots, self.seed)
        earlier = np.empty(BLOCK, dtype=np.int64)
        for number, slots in enumerate(self.slots):
            earlier[sources == number] = np.arange(slots)
        return sources, earlier

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs of the source, row indices in the joined sources), int64, in the shape of ``positions``."""
        positions = np.asarray(positions, dtype=np.int64)
        blocks, slots = np.divmod(positions, BLOCK)
        sources, drawn = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks).tolist():
            selected = blocks == block
            sources[selected], drawn[selected] = (table[slots[selected]] for table in self._slots_of_block(block))
        drawn += blocks * np.array(self.slots)[sources]
        epochs, rows = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(sources).tolist():
            selected = sources == number
            epochs[selected], rows[selected] = self.orders[number].rows(drawn[selected])
        return epochs, rows + self._starts[sources]


def sources_of_block(block: int, slots: Sequence[int], seed: int) -> np.ndarray:
    """Return the source of each position of a block; source s has ``slots[s]`` of the positions."""
    permuted = permute(np.arange(BLOCK), BLOCK, seed, np.full(BLOCK, f"blend {block}")).astype(np.int64)
    return np.searchsorted(np.cumsum(slots), permuted, side="right")


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Divide ``total`` in proportion to ``weights``, by largest remainder."""
    # Keep both divisions: any other rounding could change the slots of a run that resumes.
    parts = [weight / sum(weights) for weight in weights]
    exact = [part / sum(parts) * total for part in parts]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: (shares[number] - exact[number], number))
    for number in by_remainder[: total - sum(shares)]:
        shares[number] += 1
    return shares
