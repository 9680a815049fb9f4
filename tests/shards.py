"""Shards converted as one rank of several does, without a process group."""

from __future__ import annotations

from smp_train.data import token_dataset
from smp_train.data.token_cache import TokenCache
from smp_train.data.utils import list_shards


def convert(
    location: str,
    *,
    vocab_size: int,
    cache_dir: str | None = None,
    max_bad: float | None = None,
    rank: int = 0,
    world: int = 1,
    processes: int = 1,
) -> int:
    """Convert a rank's share of the shards that have no token file; return how many that were."""
    cache = TokenCache(location, vocab_size, cache_dir, max_bad is not None)
    return sum(token_dataset.convert(cache, list_shards(location), rank=rank, world=world, processes=processes))
