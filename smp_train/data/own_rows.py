"""Rows of a program's `Source`, checked as they are read by the rules for rows of files."""

from __future__ import annotations

from typing import Any

import numpy as np

from smp_train.arguments.own import Rows
from smp_train.data.source import IGNORED, Row, Source
from smp_train.errors import ConfigError, DataError, SmpTrainError, one_line


class Checked(Source):
    """A program's source with checked rows: a malformed row, or an exception, becomes a `DataError` with its name.

    Args:
        source: the program's source; ids and labels may be lists, or arrays of any integer type.
        keyword: the keyword by which the program passed it.
        vocab_size: ids must be in [0, vocab_size).
    """

    def __init__(self, source: Rows, keyword: str, vocab_size: int) -> None:
        self.keyword, self.vocab_size = keyword, vocab_size
        if not isinstance(source, Source) or not hasattr(source, "fingerprint"):
            problem = "has no fingerprint; give it" if isinstance(source, Source) else "is no Source; write"
            raise ConfigError(f"{keyword}: a {type(source).__name__} {problem} one as docs/data.md shows")
        self.source: Source = source
        self.fingerprint, self.shards = str(source.fingerprint), source.shards
        if len(self) < 1:
            raise DataError(f"{keyword}: the {type(source).__name__} has no row")

    def __len__(self) -> int:
        return len(self.source)

    def row(self, index: int) -> Row:
        """Return the row with int64 ids and labels. Raises `DataError`."""
        try:
            row = Row(*self.source.row(index))
            ids, labels = _integers(row.input_ids), None if row.labels is None else _integers(row.labels)
            _check("ids", ids, self.vocab_size)
            if labels is not None:
                if labels.size != ids.size:
                    raise ValueError(f"{ids.size} ids and {labels.size} labels; give equally many")
                _check("labels", np.where(labels == IGNORED, 0, labels), self.vocab_size)
            checked = Row(ids, labels, row.documents)
            if not checked.has_target():
                raise ValueError("no token that follows another one carries loss: nothing to learn; leave the row out")
            return checked
        except SmpTrainError:
            raise
        except Exception as problem:
            kind = "" if type(problem) is ValueError else f"{type(problem).__name__}: "
            raise DataError(f"{self.keyword}, {self.name(index)}: {kind}{one_line(problem)}") from problem

    def name(self, index: int) -> str:
        """Return the row's name in the program's source."""
        return self.source.name(index)

    def lengths(self, rows: range) -> np.ndarray:
        """Return the lengths that the program's source knows; otherwise read and check the rows."""
        known = type(self.source).lengths is not Source.lengths
        return self.source.lengths(rows) if known else super().lengths(rows)

    def report(self) -> dict[str, Any] | None:
        """Return the totals that the program's source knows."""
        return self.source.report()


def _integers(values: Any) -> np.ndarray:
    """Return integers in one dimension as int64. Raises ValueError."""
    array = np.asarray(values)
    if values is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        raise ValueError(f"{array.dtype} values of shape {list(array.shape)}; give integers in one dimension")
    return array.astype(np.int64)


def _check(field: str, values: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError for the first value outside of the vocabulary."""
    outside = np.flatnonzero((values < 0) | (values >= vocab_size))
    if outside.size:
        raise ValueError(
            f"{field}[{outside[0]}] is {values[outside[0]]}, outside of the vocabulary [0, {vocab_size}); "
            "use the tokenizer of the model, or set --vocab_size"
        )
