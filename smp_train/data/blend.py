"""Several data sets as one: joined, or blended by weight, with every position still computed and not stored.

Positions come in blocks of `BLOCK`. Every block gives each source the same number of its slots, in proportion
to the weights, and a permutation keyed by (seed, block) decides which slots. So how often a source has been drawn
before any position is known at once, and that many rows of its own order have been used.
"""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data.order import Order, permute
from smp_train.data.source import Row, Source, shards
from smp_train.data.utils import is_shard_name
from smp_train.errors import ConfigError

BLOCK = 10_000
"""Slots of a block: weights are kept to one part in ten thousand."""


def read_weights(given: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Take ``a:0.7 b:0.3`` apart into locations and weights; weights are None when no location has one."""
    places, weights = [], []
    for word in given:
        place, colon, number = word.rpartition(":")
        try:
            weight = float(number) if colon and not Path(word).exists() else None
        except ValueError:
            weight = None
        places.append(word if weight is None else place)
        weights.append(weight)
    _refuse_twice(given, places)
    found = [weight for weight in weights if weight is not None]
    if not found:
        return places, None
    if len(found) < len(weights):
        bare = places[weights.index(None)]
        raise ConfigError(f"--training_dir {bare}: give it a weight too, as {bare}:0.5, or no place one")
    if not all(0 < weight < float("inf") for weight in found):
        raise ConfigError(f"--training_dir {' '.join(given)}: weights must be above 0")
    return places, found


def _refuse_twice(given: Sequence[str], places: Sequence[str]) -> None:
    """Refuse one place under two names, and a file beside the folder that it is in."""
    seen = [place.rstrip("/") if place.startswith("s3://") else os.path.realpath(place) for place in places]
    for one in seen:
        folder, _, name = one.rpartition("/")
        is_file = is_shard_name(name) or os.path.isfile(one)
        if seen.count(one) > 1 or (is_file and folder in seen):
            raise ConfigError(f"--training_dir {' '.join(given)}: names one place twice; its rows would count twice")


class Joined(Source):
    """The rows of several sources, one source after the other.

    Args:
        sources: at least one.
        places: what each is called in the names of its rows.
    """

    def __init__(self, sources: Sequence[Source], places: Sequence[str]) -> None:
        self.sources, self.places = list(sources), list(places)
        self.starts = [0, *accumulate(len(source) for source in sources)]
        text = "\n".join(source.fingerprint for source in sources)
        self.fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self.shards = [
            range(start + rows.start, start + rows.stop)
            for source, start in zip(self.sources, self.starts, strict=False)
            for rows in shards(source)
        ]
        self.shard_starts = [0, *accumulate(len(shards(source)) for source in self.sources)]
        self.layout = self.sources[0].layout

    def __len__(self) -> int:
        return self.starts[-1]

    def _locate(self, index: int) -> tuple[Source, int, str]:
        """Return (source, row of it, its place)."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = bisect.bisect_right(self.starts, index) - 1
        return self.sources[number], index - self.starts[number], self.places[number]

    def row(self, index: int) -> Row:
        """Return a row of the source that ``index`` falls into."""
        source, row, _ = self._locate(index)
        return source.row(row)

    def name(self, index: int) -> str:
        """Return ``place/name``."""
        source, row, place = self._locate(index)
        return f"{place}/{source.name(row)}"

    def fill(self, indices: list[int], into: np.ndarray) -> bool:
        """Read rows as their sources do, where each of these can."""
        found = map(self._locate, indices)
        return all(source.fill([row], into[i : i + 1]) for i, (source, row, _) in enumerate(found))

    def report(self) -> dict[str, Any] | None:
        """Totals over all, and the longest row of any; None where a source does not know."""
        reports = [report for source in self.sources if (report := source.report()) is not None]
        if len(reports) < len(self.sources):
            return None
        added = ("shards", "rows", "tokens", "counted_tokens", "lines_left_out")
        longest = max(reports, key=lambda report: report["longest"])
        totals = {key: sum(report.get(key, 0) for report in reports) for key in added}
        return {**totals, "longest": longest["longest"], "longest_at": longest["longest_at"]}

    def want(self, needed: list[int], following: list[int]) -> None:
        """Pass on to each source which of its shards are read next."""
        for source, (begin, end) in zip(self.sources, pairwise(self.shard_starts), strict=True):
            source.want(*([shard - begin for shard in group if begin <= shard < end] for group in (needed, following)))

    def rest(self) -> None:
        """Pass on that reading ends."""
        for source in self.sources:
            source.rest()


class BlendOrder:
    """The order of a blend: each source in an order of its own, taken from as its weight says.

    An epoch of the blend, for ``--epochs``, is as many positions as all sources have rows; sources with more than
    their share of weight come to an epoch of their own sooner.

    Args:
        source: the sources, joined.
        weights: one for each, above 0, of any sum.
        seed: decides the slots, and with the source's number the order of each.
        shuffle: as in `Order`, for each source.
    """

    def __init__(self, source: Joined, weights: Sequence[float], seed: int = 0, shuffle: str = "global") -> None:
        self.size, self.seed, self.shuffle, self.places = len(source), seed, shuffle, source.places
        self.slots = apportion(weights, BLOCK)
        for place, slots in zip(source.places, self.slots, strict=True):
            if slots == 0:
                raise ConfigError(f"--training_dir {place}: its weight is below one in {BLOCK}; leave it out")
        self.orders = [
            Order(len(one), seed if number == 0 else seed + (number << 64), shuffle, shards(one))
            for number, one in enumerate(source.sources)
        ]
        self._starts, self._shard_starts = np.array(source.starts[:-1]), source.shard_starts
        self._block = lru_cache(maxsize=64)(self._draw)

    def sizes(self) -> dict[str, int]:
        """Return how many rows each source has, by its place."""
        return {place: order.size for place, order in zip(self.places, self.orders, strict=True)}

    def shares(self) -> str:
        """Return what part of the samples comes from each source, for the log."""
        parts = zip(self.places, self.slots, strict=True)
        return ", ".join(f"{100 * slots / BLOCK:g} % from {place}" for place, slots in parts)

    def identity(self) -> dict[str, Any]:
        """Return what, with the data, decides which row is at a position."""
        blend = [[order.size, slots] for order, slots in zip(self.orders, self.slots, strict=True)]
        return {"size": self.size, "seed": self.seed, "shuffle": self.shuffle, "blend": blend}

    def _drawn(self, position: int) -> list[int]:
        """Return how many rows of each source come before a position."""
        block, slot = divmod(position, BLOCK)
        counts = np.bincount(self._block(block)[0][:slot], minlength=len(self.slots))
        return (counts + block * np.array(self.slots)).tolist()

    def ahead(self, first: int, last: int) -> tuple[list[int], list[int]]:
        """Return what `Order.ahead` does, for all sources, in numbers of the joined source's shards."""
        needed: list[int] = []
        following: list[int] = []
        spans = zip(self._drawn(first), self._drawn(last + 1), strict=True)
        for order, begin, (before, after) in zip(self.orders, self._shard_starts, spans, strict=False):
            now, then = order.ahead(before, max(before, after - 1))
            needed += [begin + shard for shard in now]
            following += [begin + shard for shard in then]
        return needed, following

    def _draw(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, how often it was drawn in this block before) of each slot."""
        whose = sources_of(block, self.slots, self.seed)
        before = np.empty(BLOCK, dtype=np.int64)
        for number, share in enumerate(self.slots):
            before[whose == number] = np.arange(share)
        return whose, before

    def rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs of the source drawn from, row indices in the joined source), int64, of the same shape."""
        positions = np.asarray(positions, dtype=np.int64)
        blocks, slots = np.divmod(positions, BLOCK)
        whose, drawn = np.empty_like(positions), np.empty_like(positions)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            whose[here], drawn[here] = (of_slot[slots[here]] for of_slot in self._block(block))
        drawn += blocks * np.array(self.slots)[whose]
        epochs, rows = np.empty_like(positions), np.empty_like(positions)
        for number in np.unique(whose).tolist():
            here = whose == number
            epochs[here], rows[here] = self.orders[number].rows(drawn[here])
        return epochs, rows + self._starts[whose]


def sources_of(block: int, slots: Sequence[int], seed: int) -> np.ndarray:
    """Return the source of each position of a block, of which source s has ``slots[s]``."""
    places = permute(np.arange(BLOCK), BLOCK, seed, np.full(BLOCK, f"blend {block}")).astype(np.int64)
    return np.searchsorted(np.cumsum(slots), places, side="right")


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Share ``total`` out in proportion to ``weights``, by largest remainder."""
    # In two divisions: rounded otherwise, slots could be other than those of a run that resumes.
    parts = [weight / sum(weights) for weight in weights]
    exact = [part / sum(parts) * total for part in parts]
    shares = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], i))
    for number in by_rest[: total - sum(shares)]:
        shares[number] += 1
    return shares
