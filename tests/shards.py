"""Shards for tests, and the rows and batches of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data.convert import open_token_rows
from smp_train.data.files import list_files
from smp_train.data.indexed import TrainingData
from smp_train.data.order import Order
from smp_train.data.rows import Recipe
from smp_train.data.samples import Samples
from smp_train.data.source import Row, Source
from smp_train.data.token_file import TokenRows
from smp_train.errors import DataError

FIELDS = ("input_ids", "attention_mask", "labels")


def write_shard(path: Path, rows: Iterable[Any], blanks: bool = False) -> Path:
    """Write rows (an object, ids, or a tuple of ids, mask and labels) as JSON lines, gzipped where the name says so."""
    text = ""
    for row in rows:
        record = dict(zip(FIELDS, row, strict=False)) if isinstance(row, tuple) else row
        text += json.dumps(record if isinstance(record, dict) else {"input_ids": record}) + ("\n\n" if blanks else "\n")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode())
    return path


def opened(location: object, vocab_size: int = 97, **options: Any) -> TokenRows:
    """Return the token rows of a location, converted by this process alone."""
    files = list_files(str(location))
    return open_token_rows(files, Recipe(files.kind, vocab_size), **options)


class Documents(Source):
    """Rows of given lengths, in which no token comes twice; shards of three rows. The row ``broken`` is damaged."""

    fingerprint = "documents"

    def __init__(self, sizes: Iterable[int], broken: int | None = None) -> None:
        sizes, self.broken = list(sizes), broken
        ends = np.cumsum(sizes)
        self.tokens = [np.arange(end - size, end) + 1 for size, end in zip(sizes, ends, strict=True)]
        self.shards = [range(first, min(first + 3, len(sizes))) for first in range(0, len(sizes), 3)]

    def __len__(self) -> int:
        return len(self.tokens)

    def row(self, index: int) -> Row:
        if index == self.broken:
            raise DataError(f"{self.name(index)}: broken")
        return Row(self.tokens[index])

    def name(self, index: int) -> str:
        return f"d:{index + 1}"


def training(
    source: Source | Any, seq_len: int, micro_batch: int = 1, *, order: Any = None, long: str = "truncate",
    short: str = "pad", **changes: Any,
) -> TrainingData:  # fmt: skip
    """Return the data of one rank, in stored order and read on demand, unless ``changes`` say otherwise."""
    samples = Samples(source, seq_len, long=long, short=short) if isinstance(source, Source) else source
    options = {"accumulation": 1, "dp_rank": 0, "dp_size": 1, "prefetch": 0, **changes}
    order = order or Order(len(samples), shuffle="none")
    return TrainingData(samples, order, seq_len=seq_len, micro_batch=micro_batch, **options)
