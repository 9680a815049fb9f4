"""Rows of a program's own `Source`, checked as they are read by the rules for rows of files."""

from __future__ import annotations

from typing import Any

import numpy as np

from smp_train.arguments.own import Rows
from smp_train.data.rows import checked_row
from smp_train.data.source import Row, Source, View
from smp_train.errors import ConfigError, DataError, SmpTrainError, one_line


class Checked(View):
    """A source whose rows are checked: a malformed row, or an exception, becomes a `DataError` that names the row.

    Args:
        source: a program's own; ids and labels may be any integer type, or lists.
        what: the name of the keyword it was given by.
        vocab_size: ids must be in [0, vocab_size).
    """

    def __init__(self, source: Rows, what: str, vocab_size: int) -> None:
        self.what, self.vocab_size = what, vocab_size
        if not isinstance(source, Source) or not hasattr(source, "fingerprint"):
            lacks = "has no fingerprint; give it" if isinstance(source, Source) else "is no Source; write"
            raise ConfigError(f"{what}: a {type(source).__name__} {lacks} one as docs/data.md shows")
        self.source: Source = source
        self.fingerprint, self.shards = str(source.fingerprint), source.shards
        self.layout, self.staged = source.layout, source.staged
        if len(self) < 1:
            raise DataError(f"{what}: the {type(source).__name__} has no row")

    def __len__(self) -> int:
        return len(self.source)

    def row(self, index: int) -> Row:
        """Return the row, its ids and labels int64. Raises `DataError`."""
        try:
            row = Row(*self.source.row(index))
            ids, mask, labels = (_whole(values) for values in (row.input_ids, row.counted, row.labels))
            if ids is None:
                raise ValueError("has no ids; return Row(ids)")
            return checked_row(ids, mask, labels, self.vocab_size)._replace(documents=row.documents)
        except SmpTrainError:
            raise
        except Exception as problem:
            kind = "" if type(problem) is ValueError else f"{type(problem).__name__}: "
            raise DataError(f"{self.what}, {self.name(index)}: {kind}{one_line(problem)}") from problem

    def name(self, index: int) -> str:
        """Return its name in the source."""
        return self.source.name(index)

    def lengths(self, shard: int) -> np.ndarray:
        """Return the lengths as the source knows them; a source that does not has its rows read, and checked."""
        known = type(self.source).lengths is not Source.lengths
        return self.source.lengths(shard) if known else super().lengths(shard)

    def gaps(self, shard: int, beginning: int = 0) -> np.ndarray:
        """Return the stretches without loss as the source knows them."""
        return self.source.gaps(shard, beginning)

    def fill(self, indices: list[int], into: np.ndarray) -> bool:
        """Read rows the source's faster way; False where an id is outside of the vocabulary, which `row` then names."""
        filled = self.source.fill(indices, into)
        return filled and bool(into.min() >= 0 and into.max() < self.vocab_size)


def _whole(values: Any) -> np.ndarray | None:
    """Return whole numbers in one dimension, int64. Raises ValueError."""
    if values is None:
        return None
    found = np.asarray(values)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iub"):
        raise ValueError(f"{found.dtype} values of shape {list(found.shape)}; give whole numbers in one dimension")
    return found.astype(np.int64)
