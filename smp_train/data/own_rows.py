"""Checks each row of a program's `Source` when the row is read, in the same way as token rows in files."""

from __future__ import annotations

from typing import Any

import numpy as np

from smp_train.arguments.program_inputs import Rows
from smp_train.data.kinds import IDS, LABELS
from smp_train.data.source import Row, Source
from smp_train.data.token_rows import checked_row, integers
from smp_train.errors import ConfigError, DataError, SmpTrainError, one_line


class Checked(Source):
    """The source that a program passes as ``keyword``; a malformed row or an exception becomes a `DataError`."""

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

    def name(self, index: int) -> str:
        """See `Source.name`."""
        return self.source.name(index)

    def report(self) -> dict[str, Any] | None:
        """See `Source.report`."""
        return self.source.report()

    def lengths(self, rows: range) -> np.ndarray:
        """See `Source.lengths`; where the program's source has only the default, the rows are read and checked."""
        default = type(self.source).lengths is Source.lengths
        return super().lengths(rows) if default else self.source.lengths(rows)

    def row(self, index: int) -> Row:
        """Return a row with int64 ids and labels; the program may give lists, or any integer type. Raises DataError."""
        try:
            row = Row(*self.source.row(index))
            ids, labels = integers(np.asarray(row.input_ids), IDS), row.labels
            labels = None if labels is None else integers(np.asarray(labels), LABELS)
            checked = checked_row(ids, None, labels, self.vocab_size)
            return checked._replace(documents=row.documents)
        except SmpTrainError:
            raise
        except Exception as problem:
            kind = "" if type(problem) is ValueError else f"{type(problem).__name__}: "
            raise DataError(f"{self.keyword}, {self.name(index)}: {kind}{one_line(problem)}") from problem
