"""One Arrow file of a Hugging Face data set: mapped into memory, and every row of it checked once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from smp_train.data import targets
from smp_train.data.rows import FIELDS, IDS, LABELS, MASK, checked_row
from smp_train.data.source import IGNORED, Row
from smp_train.errors import ConfigError, DataError, install

FILE_MAGIC = b"ARROW1"
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of a whole stream of batches."""


class Lists(NamedTuple):
    """The lists of one column; views of the mapped file."""

    values: np.ndarray
    starts: np.ndarray
    """Where each row begins among the values, [rows + 1]; the first may be above 0."""

    def row(self, index: int) -> np.ndarray:
        """Return the numbers of one row."""
        return self.values[int(self.starts[index]) : int(self.starts[index + 1])]

    def trimmed(self) -> Lists:
        """Return the values of these rows alone, and int64 starts from 0."""
        starts = self.starts.astype(np.int64)
        return Lists(self.values[starts[0] : starts[-1]], starts - starts[0])


Columns = tuple[Lists, "Lists | None", "Lists | None"]
"""Ids, attention mask and labels."""


class Part:
    """Consecutive rows of one record batch.

    Args:
        batch: the rows.
        first: number of its first row in the file, from 0.
    """

    def __init__(self, batch: Any, first: int) -> None:
        self.batch = batch
        self.first = first

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @cached_property
    def _views(self) -> Columns:
        """Made when they are first asked for, and no copies: all rows of a data set may be asked for."""
        here = {name: _lists(column) for name, column in _columns(self.batch).items()}
        return here[IDS], here.get(MASK), here.get(LABELS)

    def columns(self) -> Columns:
        """Return the columns, `Lists.trimmed`."""
        ids, *others = self._views
        mask, labels = (None if lists is None else lists.trimmed() for lists in others)
        return ids.trimmed(), mask, labels

    def row(self, index: int) -> Row:
        """Return one row; its ids are a view of the file."""
        ids, *others = self._views
        mask, labels = (None if lists is None else lists.row(index) for lists in others)
        return Row(ids.row(index), None if mask is None or mask.all() else mask.astype(bool), labels=labels)

    def targets(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return (where a token carries loss, where it is attended), bool [tokens], each None when everywhere."""
        _, mask, labels = self.columns()
        attended = None if mask is None or mask.values.all() else mask.values != 0
        if labels is None:
            return attended, attended
        counted = labels.values != IGNORED
        return counted if attended is None else counted & attended, attended

    def lengths(self) -> np.ndarray:
        """Return the tokens of each row, without padding at its ends."""
        attended = self.targets()[1] if self._views[1] is not None else None
        starts = self._views[0].trimmed().starts
        return np.diff(starts) if attended is None else targets.attended_spans(attended, starts)[1]

    def gaps(self) -> np.ndarray:
        """Return the gaps of the rows, as `targets.row_gaps`."""
        where, attended = self.targets()
        return targets.NO_GAPS if where is None else targets.row_gaps(where, attended, self.columns()[0].starts)

    def without(self, rows: Sequence[int]) -> Iterator[Part]:
        """Yield the rows between some that are left out; those are given by their numbers in the file, in order."""
        begin = self.first
        for row in (*rows, self.first + len(self)):
            if row > begin:
                yield Part(self.batch.slice(begin - self.first, row - begin), begin)
            begin = row + 1


def _columns(batch: Any) -> dict[str, Any]:
    return {name: batch.column(name) for name in FIELDS if name in batch.schema.names}


def _lists(column: Any) -> Lists:
    if hasattr(column, "offsets"):
        starts = column.offsets.to_numpy()
    else:
        starts = (np.arange(len(column) + 1) + column.offset) * column.type.list_size
    return Lists(column.values.to_numpy(zero_copy_only=True), starts)


def parts_of(path: str, *, full: bool = False) -> Iterator[Part]:
    """Yield the record batches of a file that are not empty, mapped into memory. Raises DataError.

    ``full`` also looks whether offsets are in order and lists free of nulls, which reads the columns.
    """
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError(f"Arrow files need the package pyarrow: {install('hf')}") from None
    try:
        with pa.memory_map(path) as file:
            mapped = file.read_buffer()
        if mapped[: len(FILE_MAGIC)].to_pybytes() == FILE_MAGIC:
            opened = pa.ipc.open_file(mapped)
            batches = map(opened.get_batch, range(opened.num_record_batches))
        else:
            # Of a stream that was truncated between two batches only the end mark is missing.
            if mapped[-len(END_MARK) :].to_pybytes() != END_MARK:
                raise DataError(f"{path}: not a whole Arrow file (it has no end mark); copy it again")
            opened = batches = pa.ipc.open_stream(mapped)
        _check_schema(path, opened.schema)
        first = 0
        for batch in batches:
            # Arrow does not compare lengths with the sizes of buffers while it reads.
            batch.validate()
            for name, column in _columns(batch).items():
                for buffer in column.buffers():
                    if buffer and not 0 <= buffer.address - mapped.address <= mapped.size - buffer.size:
                        raise DataError(f"{path}: is compressed; save it again with save_to_disk")
                column.validate(full=full)
                if full and column.values.null_count:
                    raise DataError(f"{path}: column {name} has nulls in its lists; leave those rows out")
            if batch.num_rows:
                yield Part(batch, first)
            first += batch.num_rows
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DataError(f"{path}: not a whole Arrow file ({' '.join(str(error).split())}); copy it again") from None


def _check_schema(path: str, schema: Any) -> None:
    """Raise DataError for a file without ids, and for columns of other types."""
    import pyarrow as pa

    if IDS not in schema.names:
        has = ", ".join(schema.names)
        raise DataError(
            f"{path}: no column {IDS} (it has {has}); train on text by --dataset, or first: smp-train prepare"
        )
    for name in (name for name in FIELDS if name in schema.names):
        kind = schema.field(name).type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not lists or not pa.types.is_integer(kind.value_type):
            or_none = "" if name == IDS else ", or no such column"
            raise DataError(f"{path}: column {name} is {kind}; lists of integers are needed{or_none}")


@dataclass
class Checked:
    """What the check of one file found."""

    rows: int = 0
    """Good ones; so are all numbers below."""
    tokens: int = 0
    attended: int = 0
    """Tokens whose attention_mask is 1."""
    counted: int = 0
    """Of those, the ones whose label is not -100."""
    longest: int = 0
    longest_line: int = 0
    """Counted from 1, among all rows of the file."""
    digest: str = ""
    left_out: list[int] = field(default_factory=list)
    """Malformed rows of the file, from 0 (--bad_rows skip)."""
    first_bad: str = ""
    """The first of them: `` row NUMBER: reason; what to do``."""
    labelled: bool = False
    latest: int = 1
    """The largest index that the first target of a row has, leading padding left out."""

    @property
    def skipped(self) -> int:
        """The number of malformed rows."""
        return len(self.left_out)

    def add(self, part: Part) -> None:
        """Count good rows."""
        (ids, _, labels), (where, attended) = part.columns(), part.targets()
        sizes, tokens = np.diff(ids.starts), ids.values.size
        if sizes.max() > self.longest:
            self.longest, self.longest_line = int(sizes.max()), part.first + int(sizes.argmax()) + 1
        self.rows += len(part)
        self.tokens += tokens
        self.attended += tokens if attended is None else int(attended.sum())
        self.counted += tokens if where is None else int(where.sum())
        self.latest = max(self.latest, targets.latest(part.gaps()))
        self.labelled |= labels is not None


def check(path: str, vocab_size: int, bad: Callable[[int, str], None] | None = None) -> Checked:
    """Look at every token of a file.

    ``bad`` is called with each malformed row, (number from 1, reason; what to do), which is then left out. Without it
    the first raises DataError ``PATH: row N: reason; what to do``, as does what is wrong with the file itself.
    """
    digest = hashlib.blake2b(digest_size=16)
    found = Checked()
    for part in parts_of(path, full=True):
        malformed = _malformed(part, vocab_size)
        for row, why in malformed.items():
            if bad is None:
                raise DataError(f"{path}: row {row + 1}: {why}")
            bad(row + 1, why)
            found.first_bad = found.first_bad or f" row {row + 1}: {why}"
        found.left_out += malformed
        for good in part.without(list(malformed)):
            found.add(good)
        ids, mask, labels = part.columns()
        digest.update(ids.values.tobytes() + np.diff(ids.starts).tobytes())
        if mask is not None and not mask.values.all():
            digest.update(np.packbits(mask.values.astype(bool)).tobytes())
        if labels is not None:
            digest.update(b"labels" + labels.values.tobytes())
        if malformed:
            keep = np.isin(np.arange(len(part)) + part.first, list(malformed), invert=True)
            digest.update(np.packbits(keep).tobytes())
    found.digest = digest.hexdigest()
    return found


def _all_good(part: Part, vocab_size: int) -> bool:
    """Return whether no row is malformed: few passes over whole columns, and no array of their size for plain rows."""
    ids, mask, labels = part.columns()
    if any(column.null_count for column in _columns(part.batch).values()) or np.diff(ids.starts).min() < 2:
        return False
    if any(other is not None and not np.array_equal(other.starts, ids.starts) for other in (mask, labels)):
        return False
    limits = [(ids.values, vocab_size)]
    limits += [] if mask is None else [(mask.values, 2)]
    limits += [] if labels is None else [(labels.values[labels.values != IGNORED], vocab_size)]
    if any(values.size and (values.min() < 0 or values.max() >= limit) for values, limit in limits):
        return False
    where, _ = part.targets()
    if where is None:
        return True
    # The first token of a row is no target: none is before it.
    where = where.copy()
    where[ids.starts[:-1]] = False
    return bool(np.logical_or.reduceat(where, ids.starts[:-1]).all())


def _malformed(part: Part, vocab_size: int) -> dict[int, str]:
    """Return why rows are malformed, by their number in the file: halves are searched until one row is left."""
    if _all_good(part, vocab_size):
        return {}
    if len(part) > 1:
        half = len(part) // 2
        halves = (Part(part.batch.slice(0, half), part.first), Part(part.batch.slice(half), part.first + half))
        return _malformed(halves[0], vocab_size) | _malformed(halves[1], vocab_size)
    nulls = [name for name, column in _columns(part.batch).items() if column.null_count]
    if nulls:
        return {part.first: f"{nulls[0]} is null; remove the row"}
    ids, *others = part.columns()
    mask, labels = (None if lists is None else lists.values.astype(np.int64) for lists in others)
    try:
        checked_row(ids.values.astype(np.int64), mask, labels, vocab_size)
    except ValueError as error:
        return {part.first: str(error)}
    return {}
