"""Shards for tests, and their conversion as one rank of several does it, without a process group."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from smp_train.data import token_dataset
from smp_train.data.order import Order
from smp_train.data.pipelines.data_pipeline import Source, TrainingData
from smp_train.data.rows import FIELDS, IDS
from smp_train.data.token_cache import TokenCache
from smp_train.data.utils import list_shards


def write_shard(path: Path, rows: Iterable[Any], blanks: bool = False) -> Path:
    """Write rows (an object, ids, or a tuple of ids, mask and labels) as JSON lines, gzipped where the name says so."""
    text = ""
    for row in rows:
        record = dict(zip(FIELDS, row, strict=False)) if isinstance(row, tuple) else row
        text += json.dumps(record if isinstance(record, dict) else {IDS: record}) + ("\n\n" if blanks else "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return path


def convert(
    location: str, *, vocab_size: int, cache_dir: str | None = None, max_bad: float | None = None, rank: int = 0,
    world: int = 1, processes: int = 1,
) -> int:  # fmt: skip
    """Convert a rank's share of the shards that have no token file; return how many that were."""
    cache = TokenCache(location, vocab_size, cache_dir, max_bad is not None)
    return sum(token_dataset.convert(cache, list_shards(location), rank=rank, world=world, processes=processes))


def training(
    source: Source, seq_len: int, micro_batch: int = 1, *, order: Order | None = None, **changes: Any
) -> TrainingData:
    """Return the data of one rank, in stored order and read when it is asked for, unless ``changes`` say otherwise."""
    given = {"accumulation": 1, "dp_rank": 0, "dp_size": 1, "prefetch": 0, **changes}
    order = order or Order(len(source), shuffle="none")
    return TrainingData(source, order, seq_len=seq_len, micro_batch=micro_batch, **given)
