"""One Arrow file of a Hugging Face data set: mapped into memory, and every row of it checked once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from smp_train.data import targets
from smp_train.data.rows import IDS, LABELS, MASK
from smp_train.data.source import IGNORED
from smp_train.errors import ConfigError, DataError, install

CHECK_VERSION = 4
"""Of `Checked`: a file that another version checked is checked again."""
FILE_MAGIC = b"ARROW1"
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of a whole stream of batches."""


class Lists(NamedTuple):
    """The lists of one column in one batch; views of the mapped file."""

    values: np.ndarray
    """The numbers of all rows, end to end."""
    starts: np.ndarray
    """Where each row begins among them, [rows + 1]; the first may be above 0."""

    def row(self, index: int) -> np.ndarray:
        """Return the numbers of one row."""
        return self.values[int(self.starts[index]) : int(self.starts[index + 1])]

    def all_rows(self) -> Lists:
        """Return the same with int64 starts, of which the first is 0."""
        starts = self.starts.astype(np.int64)
        return Lists(self.values[starts[0] : starts[-1]], starts - starts[0])


class Columns(NamedTuple):
    """Ids, masks and labels of one batch."""

    ids: Lists
    mask: Lists | None
    labels: Lists | None

    def targets(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Return (where a token carries loss, where it is attended), bool [tokens], each None when everywhere.

        Rows whose lists differ in length, which are malformed, have neither.
        """
        starts = self.ids.all_rows().starts
        attended = counted = None
        if self.mask is not None:
            mask, its_starts = self.mask.all_rows()
            if not mask.all():
                attended = counted = _aligned(mask != 0, its_starts, starts)
        if self.labels is not None:
            labels, its_starts = self.labels.all_rows()
            counted = _aligned(labels != IGNORED, its_starts, starts)
            if attended is not None:
                counted = counted & attended
        return counted, attended


def _aligned(where: np.ndarray, its_starts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    if np.array_equal(its_starts, starts):
        return where
    found = np.zeros(int(starts[-1]), dtype=bool)
    for row in np.flatnonzero(np.diff(its_starts) == np.diff(starts)).tolist():
        found[starts[row] : starts[row + 1]] = where[its_starts[row] : its_starts[row + 1]]
    return found


def columns_of(batch: Any) -> Columns:
    """Return the columns of a record batch, without a copy."""

    def lists(name: str) -> Lists | None:
        if name not in batch.schema.names:
            return None
        column = batch.column(name)
        if hasattr(column, "offsets"):
            starts = column.offsets.to_numpy()
        else:
            starts = np.arange(len(column) + 1, dtype=np.int64) * column.type.list_size
        return Lists(column.values.to_numpy(zero_copy_only=True), starts)

    ids = lists(IDS)
    assert ids is not None, "seen in the schema"
    return Columns(ids, lists(MASK), lists(LABELS))


def batches(path: str) -> Iterator[Any]:
    """Yield the record batches of a file that are not empty, mapped into memory. Raises DataError."""
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError(f"Arrow files need the package pyarrow: {install('hf')}") from None
    try:
        with pa.memory_map(path) as file:
            mapped = file.read_buffer()
        if mapped[: len(FILE_MAGIC)].to_pybytes() == FILE_MAGIC:
            opened = pa.ipc.open_file(mapped)
            found = map(opened.get_batch, range(opened.num_record_batches))
        else:
            # A stream that was cut between two batches reads like a whole one, except that its end mark is missing.
            if mapped[-len(END_MARK) :].to_pybytes() != END_MARK:
                raise DataError(f"{path}: not a whole Arrow file (it has no end mark); copy it again")
            opened = found = pa.ipc.open_stream(mapped)
        _check_schema(path, opened.schema)
        for batch in found:
            # Arrow does not compare lengths with the sizes of buffers while it reads.
            batch.validate()
            for name in _present(batch):
                for buffer in batch.column(name).buffers():
                    if buffer and not 0 <= buffer.address - mapped.address <= mapped.size - buffer.size:
                        raise DataError(f"{path}: is compressed; save it again with save_to_disk")
            if batch.num_rows:
                yield batch
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DataError(f"{path}: not a whole Arrow file ({' '.join(str(error).split())}); copy it again") from None


def _present(batch: Any) -> list[str]:
    return [name for name in (IDS, MASK, LABELS) if name in batch.schema.names]


def _check_schema(path: str, schema: Any) -> None:
    """Raise DataError for a file without ids, and for columns of other types."""
    import pyarrow as pa

    if IDS not in schema.names:
        has = ", ".join(schema.names)
        raise DataError(
            f"{path}: no column {IDS} (it has {has}); train on text by --dataset, or first: smp-train prepare"
        )
    for name in (IDS, MASK, LABELS):
        if name not in schema.names:
            continue
        kind = schema.field(name).type
        lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
        if not lists or not pa.types.is_integer(kind.value_type):
            or_none = "" if name == IDS else ", or no such column"
            raise DataError(f"{path}: column {name} is {kind}; lists of integers are needed{or_none}")


@dataclass
class Checked:
    """What the check of one file found."""

    rows: int = 0
    """Good ones."""
    tokens: int = 0
    attended: int = 0
    """Tokens whose attention_mask is 1."""
    counted: int = 0
    """Of those, the ones whose label is not -100."""
    longest: int = 0
    longest_row: int = 0
    """Counted from 1, among all rows of the file."""
    digest: str = ""
    left_out: list[int] = field(default_factory=list)
    """Malformed rows of the file, from 0 (--bad_rows skip)."""
    first_bad: str = ""
    """The first of them: `` row NUMBER: reason; what to do``."""
    labelled: bool = False
    latest: int = 1
    """The largest index that the first target of a row has, leading padding left out."""
    version: int = CHECK_VERSION

    def fits(self) -> bool:
        """True when the numbers of a check that was kept are possible ones."""
        numbers = (self.rows, self.tokens, self.attended, self.counted, self.longest, self.longest_row, self.latest)
        rows = self.rows + len(self.left_out)
        return all(type(n) is int and n >= 0 for n in numbers) and all(
            type(row) is int and 0 <= row < rows for row in self.left_out
        )


def check(path: str, vocab_size: int, bad: Callable[[int, str], None] | None = None) -> Checked:
    """Look at every token of a file.

    ``bad`` is called with each malformed row, (number from 1, reason; what to do), which is then left out. Without it
    the first raises DataError ``PATH: row N: reason; what to do``, as does what is wrong with the file itself.
    """
    digest = hashlib.blake2b(digest_size=16)
    all_of_it = Checked()
    seen = 0
    for batch in batches(path):
        _validate(path, batch)
        columns = columns_of(batch)
        (values, starts), labels = columns.ids.all_rows(), columns.labels
        sizes = attended_of_row = counted_of_row = np.diff(starts)
        gaps = targets.NO_GAPS
        found = _malformed(batch, columns, vocab_size)
        where, attended = columns.targets()
        digest.update(values.tobytes() + sizes.tobytes())
        if attended is not None:
            attended_of_row = _per_row(attended, starts)
            digest.update(np.packbits(columns.mask.all_rows().values.astype(bool)).tobytes())  # type: ignore[union-attr]
        if labels is not None:
            all_of_it.labelled = True
            digest.update(b"labels" + labels.all_rows().values.tobytes())
        if where is not None:
            counted_of_row = _per_row(where, starts)
            gaps = targets.row_gaps(where, attended, starts)
            fields = MASK if labels is None else f"{LABELS} and {MASK}"
            # The first token of a row is no target: none is before it.
            after_first = where.copy()
            after_first[starts[:-1][sizes > 0]] = False
            for row in np.flatnonzero(_per_row(after_first, starts) == 0).tolist():
                found.setdefault(row, f"{fields} counts no token that has one before it; remove the row")
        keep = np.ones(sizes.size, dtype=bool)
        for row in sorted(found):
            number = seen + row + 1
            if bad is None:
                raise DataError(f"{path}: row {number}: {found[row]}")
            bad(number, found[row])
            all_of_it.first_bad = all_of_it.first_bad or f" row {number}: {found[row]}"
            all_of_it.left_out.append(number - 1)
            keep[row] = False
        if found:
            digest.update(np.packbits(keep).tobytes())
        sizes = sizes * keep
        if sizes.max() > all_of_it.longest:
            all_of_it.longest, all_of_it.longest_row = int(sizes.max()), seen + int(sizes.argmax()) + 1
        all_of_it.rows += int(keep.sum())
        all_of_it.tokens += int(sizes.sum())
        all_of_it.attended += int(attended_of_row[keep].sum())
        all_of_it.counted += int(counted_of_row[keep].sum())
        all_of_it.latest = max(all_of_it.latest, targets.latest(gaps[keep[gaps[:, 0]]]))
        seen += keep.size
    all_of_it.digest = digest.hexdigest()
    return all_of_it


def _validate(path: str, batch: Any) -> None:
    """Raise DataError for offsets that are out of order, and for lists with nulls in them."""
    for name in _present(batch):
        try:
            batch.column(name).validate(full=True)
        except ValueError as error:
            raise DataError(f"{path}: column {name} is damaged ({error}); copy the file again") from None
        if batch.column(name).values.null_count:
            raise DataError(f"{path}: column {name} has empty places (null) in its lists; leave those rows out")


def _per_row(where: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return how many are true in each row."""
    before = np.concatenate([[0], np.cumsum(where, dtype=np.int64)])
    return np.asarray(before[starts[1:]] - before[starts[:-1]])


def _malformed(batch: Any, columns: Columns, vocab_size: int) -> dict[int, str]:
    """Return why rows of a batch are malformed, by their place in it; of a row with several faults the first."""
    found: dict[int, str] = {}
    ids, *others = (None if lists is None else lists.all_rows() for lists in columns)
    assert ids is not None
    sizes = np.diff(ids.starts)

    def refuse(rows: np.ndarray, why: str) -> None:
        for row in rows.tolist():
            found.setdefault(row, why)

    def refuse_values(lists: Lists, wrong: np.ndarray, why: str) -> None:
        places = np.flatnonzero(wrong)
        rows, firsts = np.unique(np.searchsorted(lists.starts, places, side="right") - 1, return_index=True)
        for row, value in zip(rows.tolist(), lists.values[places[firsts]].tolist(), strict=True):
            found.setdefault(row, why.format(value))

    for name in _present(batch):
        if batch.column(name).null_count:
            refuse(np.flatnonzero(batch.column(name).is_null()), f"{name} is null; remove the row")
    refuse(np.flatnonzero(sizes < 2), "a row of fewer than two tokens has none to predict; remove the row")
    vocabulary = f"is outside the vocabulary [0, {vocab_size}); "
    # The ends first: of good rows, one pass without an array of the same size.
    if ids.values.size and (ids.values.min() < 0 or ids.values.max() >= vocab_size):
        refuse_values(
            ids, (ids.values < 0) | (ids.values >= vocab_size),
            f"token id {{}} {vocabulary}use the tokenizer of the model, or set --vocab_size",
        )  # fmt: skip
    for name, lists in zip((MASK, LABELS), others, strict=True):
        if lists is not None:
            refuse(np.flatnonzero(np.diff(lists.starts) != sizes), f"{IDS} and {name} differ in length")
    mask, labels = others
    if mask is not None and mask.values.size and (mask.values.min() < 0 or mask.values.max() > 1):
        refuse_values(mask, (mask.values < 0) | (mask.values > 1), f"{MASK} holds {{}}; use 0 or 1")
    if labels is not None:
        wrong = ((labels.values < 0) | (labels.values >= vocab_size)) & (labels.values != IGNORED)
        refuse_values(
            labels, wrong, f"label {{}} {vocabulary}use a token id, or {IGNORED} where nothing is to be learnt"
        )
    return found
