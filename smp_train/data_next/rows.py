"""Records into rows: the only place where a record becomes tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from smp_train.data_next.bad_records import BadRecords
from smp_train.data_next.files import DataFile
from smp_train.data_next.kinds import Kind
from smp_train.data_next.readers import Record
from smp_train.data_next.source import Row

ANY_VOCABULARY = 1 << 31


class Problem(str):
    """The reason why a record is no row: ``reason; what to do``."""


@dataclass(frozen=True)
class Recipe:
    """All that decides the tokens of a record; can be pickled for worker processes."""

    kind: Kind
    vocab_size: int = ANY_VOCABULARY
    """Token ids must be below it."""
    tokenizer: str | None = None
    """A folder, file, ``s3://`` location or name on the hub; not needed for token rows."""
    chat_template: str | None = None
    """A file that replaces the tokenizer's chat template."""
    eos_token: str | None = None
    """Token after each text and completion; None: the tokenizer's own."""
    trust_remote_code: bool = False

    def identity(self) -> str:
        """Return a digest of all that decides tokens: the content of the tokenizer, not its name."""
        raise NotImplementedError

    def open(self) -> RowMaker:
        """Return the `RowMaker`; loads the tokenizer. Raises ConfigError."""
        raise NotImplementedError


class RowMaker:
    """Makes rows of records. Use one per thread."""

    identity: str
    """`Recipe.identity`."""

    def rows(self, records: Sequence[Record]) -> list[Row | Problem | None]:
        """Return the row of each record, the problem with it, or None for a record without visible text."""
        raise NotImplementedError


def read_rows(
    file: DataFile, maker: RowMaker, bad: BadRecords, *, first: int = 0, step: int = 1, copy: str | None = None,
    tick: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, Row]]:  # fmt: skip
    """Yield (number from 1: of the line or row, row) of a file's records; see `readers.records` for the arguments.

    Malformed records go to ``bad``. Raises DataError.
    """
    raise NotImplementedError
