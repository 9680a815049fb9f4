"""Converts records to rows: the only place where a record becomes tokens."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from smp_train.data.bad_records import BadRecords
from smp_train.data.chats import Chats
from smp_train.data.files import DataFile
from smp_train.data.kinds import LABELS, Kind
from smp_train.data.readers import Record, records
from smp_train.data.source import Problem, Row, digest_of
from smp_train.data.text import Completions, Texts
from smp_train.data.token_rows import TokenRecords
from smp_train.data.tokenizer import load_for_chats, load_with_end
from smp_train.errors import ConfigError, DataError

ANY_VOCABULARY = 1 << 31
ROWS_VERSION = 1
"""Increase this number when a change to the code gives the same records other tokens than before."""
GROUP_BYTES = 1 << 16
"""Size of the records that are converted in one call: tokenizers are faster on many texts at once."""


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the tokens of a record; can be pickled for worker processes."""

    kind: Kind
    vocab_size: int = ANY_VOCABULARY  # token ids must be below it
    tokenizer: str | None = None  # a folder, file, s3:// location or name on the hub; not for token rows
    chat_template: str | None = None  # a file that replaces the tokenizer's chat template
    eos_token: str | None = None  # token after each text and completion; None: the tokenizer's own
    trust_remote_code: bool = False  # run the tokenizer's code

    @cached_property
    def identity(self) -> str:
        """A digest of everything that decides the tokens: the content of the tokenizer, not its name."""
        return self.open().identity

    def open(self) -> RowMaker:
        """Return the `RowMaker`; loads the tokenizer. Raises ConfigError."""
        kind, name = self.kind, self.tokenizer
        if self.chat_template is not None and kind.name != "chats":
            raise ConfigError(f"--chat_template {self.chat_template}: the data holds {kind.plural}; leave it out")
        if kind.name == "tokens":
            return RowMaker(kind, TokenRecords(self.vocab_size), digest_of(ROWS_VERSION, kind, self.vocab_size))
        if name is None:
            raise ConfigError(f"the data holds {kind.plural}, and no tokenizer is known; give --tokenizer")
        make: Chats | Texts | Completions
        if kind.name == "chats":
            with_template = load_for_chats(name, self.trust_remote_code)
            tokenizer = with_template.backend_tokenizer
            make = Chats(with_template, kind, name, self.chat_template)
            content = make.template
        else:
            tokenizer, end = load_with_end(name, self.eos_token, special_as_text=kind.name == "text")
            make = Texts(tokenizer, end, kind.fields[0]) if kind.name == "text" else Completions(tokenizer, end, kind)
            content = str(end)
        highest = max(tokenizer.get_vocab(with_added_tokens=True).values())
        if highest >= self.vocab_size:
            raise ConfigError(
                f"--tokenizer {name}: has ids up to {highest}, the model a vocabulary of {self.vocab_size}; "
                "use the tokenizer of the model, or set --vocab_size"
            )
        return RowMaker(kind, make, digest_of(ROWS_VERSION, kind, tokenizer.to_str(), content))


@dataclass
class RowMaker:
    """Converts records to rows: ``rows`` returns for each record its row, its problem, or None if the record is blank.

    Use one `RowMaker` per thread. ``identity`` is `Recipe.identity`.
    """

    kind: Kind
    rows: Callable[[Sequence[Record]], list[Row | Problem | None]]
    identity: str


def read_rows(
    file: DataFile, maker: RowMaker, bad: BadRecords, *, raw: io.BufferedReader | None = None,
    tick: Callable[[int], None] = lambda done: None,
) -> Iterator[tuple[int, Row]]:  # fmt: skip
    """Yield (number of the line or table row from 1, row) for each record; see `readers.records` for the arguments.

    Malformed records are added to ``bad``. In a damaged file, yields the rows before the damage, then raises DataError.
    """
    labelled: bool | None = None
    damage: list[DataError] = []
    numbered = _until_damage(records(file, maker.kind.fields, raw=raw, tick=tick), damage)
    for group in grouped(numbered, GROUP_BYTES):
        for (_, number, _), row in zip(group, maker.rows([record for _, _, record in group]), strict=True):
            if isinstance(row, Row):
                labelled = row.labels is not None if labelled is None else labelled
                if labelled == (row.labels is not None):
                    yield number, row
                    continue
                has, had = (f"no {LABELS}", LABELS) if labelled else (LABELS, f"no {LABELS}")
                row = Problem(f"has {has}, but earlier rows have {had}; give all rows of a file {LABELS}, or no row")
            if row is not None:
                bad.add(file, number, row)
    for error in damage:
        raise error


def _until_damage(numbered: Iterable[Any], damage: list[DataError]) -> Iterator[Any]:
    try:
        yield from numbered
    except DataError as error:
        damage.append(error)


def grouped(
    entries: Iterable[Any], most_size: float, most: int = sys.maxsize, size: Callable[[Any], float] | None = None
) -> Iterator[list[Any]]:  # fmt: skip
    """Yield the entries in groups; a group ends when its size reaches ``most_size``, or at ``most`` entries.

    By default, the size of an entry is the size of its last element, the record.
    """
    group, total = [], 0.0
    for entry in entries:
        group.append(entry)
        total += size(entry) if size else size_of(entry[-1])
        if total >= most_size or len(group) == most:
            yield group
            group, total = [], 0.0
    if group:
        yield group


def size_of(record: Any) -> int:
    """Return the approximate size of a record or a field in bytes; the same wherever the record is read."""
    if isinstance(record, dict):
        return sum(map(size_of, record.values()))
    if isinstance(record, list) and record and isinstance(record[0], dict | list | str):
        return sum(map(size_of, record))
    return len(record) if isinstance(record, bytes | str | list | np.ndarray) else 1
