"""One Arrow file of a data set on disk: every row of it checked once, and where in the file its lists are.

The file is read batch by batch and never mapped here. What is found is kept, so that afterwards a row is at a known
place of the file and Arrow's own library is not needed to read it.
"""

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

CHECK_VERSION = 3
"""Of `Checked`: what was kept by another version is checked again."""
FILE_MAGIC = b"ARROW1"
END_MARKS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")


class Lists(NamedTuple):
    """Where the lists of one batch are: numbers end to end, and where each list begins."""

    rows: int
    starts: int
    """Byte at which ``rows`` + 1 beginnings are; -1 when all lists are of ``size``."""
    starts_type: str
    size: int
    values: int
    """Byte at which the numbers are."""
    values_type: str


@dataclass(frozen=True)
class Checked:
    """What the check of one file found."""

    rows: int
    """Good ones."""
    tokens: int
    attended: int
    """Tokens whose attention_mask is 1."""
    counted: int
    """Of those, the ones whose label is not -100."""
    longest: int
    longest_row: int
    """Counted from 1, among all rows of the file."""
    digest: str
    left_out: list[int] = field(default_factory=list)
    """Rows of the file, from 0, that are none (--bad_rows skip)."""
    first_bad: str = ""
    """The first of them: `` row NUMBER: reason; what to do``."""
    batches: list[tuple[Lists, Lists | None, Lists | None]] = field(default_factory=list)
    """Ids, masks and labels of each batch."""
    labelled: bool = False
    latest: int = 1
    """The largest index that the first target of a row has, padding in front left out."""
    version: int = CHECK_VERSION

    @classmethod
    def read(cls, kept: dict[str, Any]) -> Checked | None:
        """Return what was kept as JSON; None when another version kept it. Raises TypeError for what is none."""
        if kept.get("version") != CHECK_VERSION:
            return None
        batches = [
            (Lists(*ids), None if mask is None else Lists(*mask), None if labels is None else Lists(*labels))
            for ids, mask, labels in kept.pop("batches")
        ]
        return cls(**kept, batches=batches)


class _Batch(NamedTuple):
    place: Lists
    values: np.ndarray
    starts: np.ndarray
    """int64, one more than rows; the first is 0."""
    null: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        return np.diff(self.starts)


def _batch(path: str, name: str, column: Any, body: Any, begin: int) -> _Batch:
    """Take a column of a batch whose ``body`` is at byte ``begin`` of the file."""
    import pyarrow as pa

    def byte_of(buffer: Any) -> int:
        if buffer is None or not buffer.size:
            return 0
        place = buffer.address - body.address
        if not 0 <= place <= body.size - buffer.size:
            raise DataError(f"{path}: is compressed; save it again with save_to_disk")
        return int(begin + place)

    if column.values.null_count:
        raise DataError(f"{path}: column {name} has empty places (null) in its lists; leave those rows out")
    buffers = column.buffers()
    values = column.values.to_numpy(zero_copy_only=True)
    rows, null = len(column), ~column.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_fixed_size_list(column.type):
        starts, place = np.arange(rows + 1, dtype=np.int64) * column.type.list_size, -1
        kind, size = "", column.type.list_size
    else:
        offsets = column.offsets.to_numpy()
        starts, place, kind, size = offsets.astype(np.int64), byte_of(buffers[1]), offsets.dtype.str, 0
    values = values[starts[0] : starts[-1]]
    lists = Lists(rows, place, kind, size, byte_of(buffers[-1]), values.dtype.str)
    return _Batch(lists, values, starts - starts[0], null)


def _batches(path: str) -> Iterator[tuple[_Batch, _Batch | None, _Batch | None]]:
    """Yield ids, masks and labels of each batch of a file. Raises DataError."""
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError(f"Arrow files need the package pyarrow: {install('hf')}") from None
    try:
        with pa.OSFile(path) as file:
            file.seek(8 if file.read(len(FILE_MAGIC)) == FILE_MAGIC else 0)
            schema = _schema(path, pa.ipc.read_schema(pa.ipc.read_message(file)))
            while True:
                end = file.tell()
                try:
                    message = pa.ipc.read_message(file)
                except EOFError:
                    break
                if message.type != "record batch":
                    continue
                batch, begin = pa.ipc.read_record_batch(message, schema), file.tell() - message.body.size
                if batch.num_rows:
                    ids, mask, labels = (
                        _batch(path, name, batch.column(name), message.body, begin) if name in schema.names else None
                        for name in (IDS, MASK, LABELS)
                    )
                    assert ids is not None, "seen in the schema"
                    yield ids, mask, labels
            # A file that was cut between two batches reads like a whole one, but for this.
            file.seek(end)
            if not file.read(8).startswith(END_MARKS):
                raise DataError(f"{path}: not a whole Arrow file (it has no end mark); copy it again")
    except (pa.ArrowException, OSError, EOFError) as error:
        raise DataError(f"{path}: not a whole Arrow file ({' '.join(str(error).split())}); copy it again") from None


def _schema(path: str, schema: Any) -> Any:
    """Refuse columns of other types; return the schema under which batches can be read one by one."""
    import pyarrow as pa

    if IDS not in schema.names:
        has = ", ".join(schema.names)
        raise DataError(
            f"{path}: no column {IDS} (it has {has}); train on text by --dataset, or first: smp-train prepare"
        )
    for number, name in enumerate(schema.names):
        kind = schema.field(name).type
        if pa.types.is_dictionary(kind):
            # In a batch there are its indices alone, as of any column of integers.
            schema = schema.set(number, pa.field(name, kind.index_type))
        if name in (IDS, MASK, LABELS):
            lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
            if not lists or not pa.types.is_integer(kind.value_type):
                or_none = "" if name == IDS else ", or no such column"
                raise DataError(f"{path}: column {name} is {kind}; lists of integers are needed{or_none}")
    return schema


def _rows_of(batch: _Batch, wrong: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that hold a wrong number, and where the first of each is."""
    places = np.flatnonzero(wrong)
    rows, firsts = np.unique(np.searchsorted(batch.starts, places, side="right") - 1, return_index=True)
    return rows, places[firsts]


def _bad_rows(ids: _Batch, mask: _Batch | None, labels: _Batch | None, vocab_size: int) -> dict[int, str]:
    """Return why rows of a batch are malformed, by their place in it."""
    found: dict[int, str] = {}

    def refuse(rows: np.ndarray, why: Callable[[int], str]) -> None:
        for number, row in enumerate(rows.tolist()):
            found.setdefault(row, why(number))

    for name, batch in ((IDS, ids), (MASK, mask), (LABELS, labels)):
        if batch is not None and batch.null.any():
            why_null = f"{name} is null; remove the row"
            refuse(np.flatnonzero(batch.null), lambda _, why=why_null: why)  # type: ignore[misc]
    if ids.sizes.min() < 2:
        why = "a row of fewer than two tokens has none to predict; remove the row"
        refuse(np.flatnonzero(ids.sizes < 2), lambda _: why)
    if ids.values.size and (ids.values.min() < 0 or ids.values.max() >= vocab_size):
        rows, ids_at = _rows_of(ids, (ids.values < 0) | (ids.values >= vocab_size))
        refuse(
            rows,
            lambda number: f"token id {int(ids.values[ids_at[number]])} is outside the vocabulary [0, {vocab_size}); "
            "use the tokenizer of the model, or set --vocab_size",
        )
    for name, batch in ((MASK, mask), (LABELS, labels)):
        if batch is not None:
            why_differ = f"{IDS} and {name} differ in length"
            refuse(np.flatnonzero(batch.sizes != ids.sizes), lambda _, why=why_differ: why)  # type: ignore[misc]
    if mask is not None and mask.values.size and (mask.values.min() < 0 or mask.values.max() > 1):
        rows, mask_at = _rows_of(mask, (mask.values < 0) | (mask.values > 1))
        refuse(rows, lambda number: f"{MASK} holds {int(mask.values[mask_at[number]])}; use 0 or 1")
    if labels is not None:
        wrong = ((labels.values < 0) | (labels.values >= vocab_size)) & (labels.values != IGNORED)
        rows, labels_at = _rows_of(labels, wrong)
        refuse(
            rows,
            lambda number: f"label {int(labels.values[labels_at[number]])} is outside the vocabulary "
            f"[0, {vocab_size}); use a token id, or {IGNORED} where nothing is to be learnt",
        )
    return found


Column = tuple[np.ndarray, np.ndarray]
"""Values of all rows end to end, and where each row begins among them, int64 [rows + 1]."""


def targets_of(
    starts: np.ndarray, mask: Column | None, labels: Column | None
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return (where a token carries loss, where it is attended) by the places of the ids, each None when everywhere.

    Rows whose lists differ in length, which are malformed, have neither.
    """
    attended = counted = None
    if mask is not None and not mask[0].all():
        attended = counted = _aligned(mask[0] != 0, mask[1], starts)
    if labels is not None:
        counted = _aligned(labels[0] != IGNORED, labels[1], starts)
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


def check(path: str, vocab_size: int, bad: Callable[[int, str], None] | None = None) -> Checked:
    """Look at every token of a file.

    ``bad`` is told of each row that is none, (number from 1, reason; what to do), which is then left out. Without it
    the first raises DataError ``PATH: row N: reason; what to do``, as does what is wrong with the file itself.
    """
    digest = hashlib.blake2b(digest_size=16)
    rows = seen = tokens = attended = counted = longest = longest_row = 0
    latest, labelled = 1, False
    left_out: list[int] = []
    first_bad = ""
    places = []
    for ids, mask, labels in _batches(path):
        sizes = attended_of_row = counted_of_row = ids.sizes
        gaps = targets.NO_GAPS
        digest.update(np.ascontiguousarray(ids.values).tobytes() + sizes.tobytes())
        found = _bad_rows(ids, mask, labels, vocab_size)
        where, where_attended = targets_of(
            ids.starts, *(None if column is None else (column.values, column.starts) for column in (mask, labels))
        )
        if where_attended is not None:
            attended_of_row = _per_row(where_attended, ids.starts)
            digest.update(np.packbits(mask.values.astype(bool)).tobytes())  # type: ignore[union-attr]
        if labels is not None:
            labelled = True
            digest.update(b"labels" + np.ascontiguousarray(labels.values).tobytes())
        if where is not None:
            counted_of_row = _per_row(where, ids.starts)
            gaps = targets.row_gaps(where, where_attended, ids.starts)
            fields = MASK if labels is None else f"{LABELS} and {MASK}"
            # The first token of a row has none before it.
            after_first = where.copy()
            after_first[ids.starts[:-1][sizes > 0]] = False
            for row in np.flatnonzero(_per_row(after_first, ids.starts) == 0).tolist():
                found.setdefault(row, f"{fields} counts no token that has one before it; remove the row")
        keep = np.ones(sizes.size, dtype=bool)
        for row in sorted(found):
            if bad is None:
                raise DataError(f"{path}: row {seen + row + 1}: {found[row]}")
            bad(seen + row + 1, found[row])
            first_bad = first_bad or f" row {seen + row + 1}: {found[row]}"
            left_out.append(seen + row)
            keep[row] = False
        if found:
            digest.update(np.packbits(keep).tobytes())
            sizes, attended_of_row, counted_of_row = sizes * keep, attended_of_row * keep, counted_of_row * keep
        if sizes.max() > longest:
            longest, longest_row = int(sizes.max()), seen + int(sizes.argmax()) + 1
        rows += int(keep.sum())
        seen += keep.size
        tokens += int(sizes.sum())
        attended += int(attended_of_row.sum())
        counted += int(counted_of_row.sum())
        latest = max(latest, targets.latest(gaps[keep[gaps[:, 0]]]))
        places.append((ids.place, mask and mask.place, labels and labels.place))
    return Checked(
        rows, tokens, attended, counted, longest, longest_row, digest.hexdigest(), left_out, first_bad, places,
        labelled, latest,
    )  # fmt: skip


def _per_row(where: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return how many are true in each row."""
    before = np.concatenate([[0], np.cumsum(where, dtype=np.int64)])
    return np.asarray(before[starts[1:]] - before[starts[:-1]])
