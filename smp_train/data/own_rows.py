"""Rows of a program's `Source`, checked as they are read by the rules for rows of files."""

from __future__ import annotations

from typing import Any

import numpy as np

from smp_train.arguments.own import Rows
from smp_train.data.source import IGNORED, Row, Source
from smp_train.errors import ConfigError, DataError, SmpTrainError, one_line


class Checked(Source):
    """A program's source, given by a keyword; a malformed row, or an exception, becomes a `DataError` with its name."""

    def __init__(self, source: Rows, keyword: str, vocab_size: int) -> None:
        self.keyword, self.vocab_size = keyword, vocab_size
        if not isinstance(source, Source) or not hasattr(source, "fingerprint"):
            problem = "has no fingerprint; give it" if isinstance(source, Source) else "is no Source; write"
            raise ConfigError(f"{keyword}: a {type(source).__name__} {problem} one as docs/data.md shows")
        self.source: Source = source
        self.fingerprint, self.shards = str(source.fingerprint), source.shards
        self.name, self.report = source.name, source.report  # type: ignore[method-assign]
        if type(source).lengths is not Source.lengths:  # the default would read rows unchecked
            self.lengths = source.lengths  # type: ignore[method-assign]
        if len(self) < 1:
            raise DataError(f"{keyword}: the {type(source).__name__} has no row")

    def __len__(self) -> int:
        return len(self.source)

    def row(self, index: int) -> Row:
        """Return the row with int64 ids and labels, which may be lists, or of any integer type. Raises `DataError`."""
        try:
            row = Row(*self.source.row(index))
            ids = self._integers("ids", row.input_ids)
            labels = None if row.labels is None else self._integers("labels", row.labels)
            if labels is not None and labels.size != ids.size:
                raise ValueError(f"{ids.size} ids and {labels.size} labels; give equally many")
            checked = Row(ids, labels, row.documents)
            if not checked.has_target():
                raise ValueError("no token that follows another one carries loss: nothing to learn; leave the row out")
            return checked
        except SmpTrainError:
            raise
        except Exception as problem:
            kind = "" if type(problem) is ValueError else f"{type(problem).__name__}: "
            raise DataError(f"{self.keyword}, {self.name(index)}: {kind}{one_line(problem)}") from problem

    def _integers(self, field: str, values: Any) -> np.ndarray:
        """Return ids or labels as int64 [length]. Raises ValueError, also outside of the vocabulary."""
        array = np.asarray(values)
        if values is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
            raise ValueError(f"{array.dtype} values of shape {list(array.shape)}; give integers in one dimension")
        array = array.astype(np.int64)
        outside = (array < 0) | (array >= self.vocab_size)
        if field == "labels":
            outside &= array != IGNORED
        if outside.any():
            index = int(outside.argmax())
            raise ValueError(
                f"{field}[{index}] is {array[index]}, outside of the vocabulary [0, {self.vocab_size}); use the "
                "tokenizer of the model, or set --vocab_size"
            )
        return array
