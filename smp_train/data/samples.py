"""Makes samples of at most ``seq_len`` tokens from rows, which are cut, joined end to end, or packed.

A row of more tokens is truncated, cropped or split (--long); shorter rows are padded, joined or packed (--short).
Which tokens a sample has depends on the rows and these settings alone.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from smp_train.data.source import IGNORED, Row, Source, digest_of
from smp_train.errors import DataError

TABLE_ROWS = 1 << 22
"""Number of rows in one table of samples; only rows in the same table are packed together."""


class Piece(NamedTuple):
    """Tokens ``begin`` to ``end`` of a row, as a part of a sample."""

    row: Row  # the whole row
    name: str  # name of the row; empty where samples need no names
    begin: int
    end: int
    truncated: bool = False  # the tokens of the row after ``end`` are in no sample (--long truncate)


@dataclass(slots=True)
class Sample:
    """What a run trains on at one position."""

    row: Row
    name: str  # names of the sample's rows, such as ``a.json:3[0:512]+b.json:1``; brackets hold the part of a row
    truncated: int = 0  # number of truncated rows
    truncated_targets: int = 0  # number of tokens with loss that were cut off these rows


def join(pieces: Sequence[Piece], *, packed: bool = False) -> Sample:
    """Join pieces of rows to a sample; ``packed`` keeps them apart as documents that do not attend to each other."""
    parts = [piece.row.cut(piece.begin, piece.end) for piece in pieces]
    cut = [piece for piece in pieces if piece.truncated]
    if len(parts) == 1:
        row = parts[0]
    else:
        labels = None
        if any(part.labels is not None for part in parts):
            labels = np.concatenate([part.targets() for part in parts])
        documents = np.array([part.input_ids.size for part in parts]) if packed else None
        row = Row(np.concatenate([part.input_ids for part in parts]), labels, documents)
    lost = sum(int(np.count_nonzero(piece.row.targets()[piece.end :] != IGNORED)) for piece in cut)
    return Sample(row, "+".join(map(_piece_name, pieces)) if pieces[0].name else "", len(cut), lost)


def _piece_name(piece: Piece) -> str:
    whole = piece.begin == 0 and piece.end == piece.row.input_ids.size
    return piece.name if whole else f"{piece.name}[{piece.begin}:{piece.end}]"


def window(row: Row, name: str, seq_len: int, long: str, key: object = "") -> tuple[int, int]:
    """Return the part (begin, end) of a row that --long keeps.

    ``truncate`` keeps the first ``seq_len`` tokens. ``crop`` keeps ``seq_len`` tokens, from a position that ``key``
    draws so that the part has a target. ``split`` keeps the whole row. ``error`` raises DataError for a longer row.
    """
    size = row.input_ids.size
    if size <= seq_len or long == "split":
        return 0, size
    if long == "truncate":
        return 0, seq_len
    if long == "error":
        raise _too_long(name, size, seq_len)
    draw = int.from_bytes(hashlib.blake2b(f"smp-train crop {key}".encode(), digest_size=8).digest(), "little")
    begin = draw % (size - seq_len + 1)
    if row.labels is not None:
        targets_before = np.concatenate([[0], np.cumsum(row.labels != IGNORED)])
        # The first token of a part has no token before it, so its label does not count.
        begins = np.flatnonzero(targets_before[seq_len:] > targets_before[1 : size - seq_len + 2])
        begin = int(begins[draw % begins.size]) if begins.size else begin
    return begin, begin + seq_len


def _too_long(name: str, size: int, seq_len: int) -> DataError:
    return DataError(
        f"{name}: row of {size} tokens is longer than the {seq_len} of --max_context_width; use --long split or "
        "truncate, or prepare shorter rows"
    )


def pack(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack items into few bins of ``capacity`` by best-fit decreasing.

    Best-fit decreasing needs at most 11/9 of the fewest bins possible, plus one (Johnson, Demers, Ullman, Garey and
    Graham, 1974). Items of equal size are placed in one step, so the time hardly depends on the number of items.

    Returns:
        (items in the order of their bins, index at which each bin begins, followed by the end of the last bin). Bins
        are ordered by their first item, so that rows near each other on disk stay near each other.
    """
    items = np.argsort(capacity - sizes, kind="stable")
    counts = np.bincount(sizes, minlength=capacity + 1)
    bins_of_items = np.empty(sizes.size, dtype=np.int64)
    with_room: dict[int, list[np.ndarray]] = {}
    # Bit r is set when some bin has room for r tokens, so a shift finds the smallest room that suffices.
    rooms = done = bins = 0

    def add(room: int, numbers: np.ndarray) -> None:
        nonlocal rooms
        if room and numbers.size:
            with_room.setdefault(room, []).append(numbers)
            rooms |= 1 << room

    for size in np.flatnonzero(counts)[::-1].tolist():
        end = done + int(counts[size])
        while done < end:
            sufficient = rooms >> size
            if sufficient:
                room = size + (sufficient & -sufficient).bit_length() - 1
                numbers = np.concatenate(with_room.pop(room))
                rooms ^= 1 << room
                per_bin = room // size
                used = min(numbers.size, -(-(end - done) // per_bin))
            else:
                room, per_bin = capacity, capacity // size
                used = -(-(end - done) // per_bin)
                numbers = np.arange(bins, bins + used)
                bins += used
            placed = min(end - done, used * per_bin)
            bins_of_items[items[done : done + placed]] = np.repeat(numbers[:used], per_bin)[:placed]
            in_last = placed - (used - 1) * per_bin
            add(room, numbers[used:])
            add(room - per_bin * size, numbers[: used - 1])
            add(room - in_last * size, numbers[used - 1 : used])
            done += placed
    first_items = np.unique(bins_of_items, return_index=True)[1]
    bins_of_items = np.argsort(np.argsort(first_items))[bins_of_items]
    order = np.argsort(bins_of_items, kind="stable")
    return order, np.concatenate([[0], np.cumsum(np.bincount(bins_of_items))])


class Table(NamedTuple):
    """Samples made of consecutive rows."""

    rows: np.ndarray  # row of each piece, counted from the table's first row
    begins: np.ndarray  # first token of each piece
    bounds: np.ndarray  # first piece of each sample, and the end of the last sample


def needs_tables(source: Source, seq_len: int, long: str, short: str) -> bool:
    """Return whether samples of these rows are looked up in tables."""
    if short == "pack":
        return True
    report = source.report() or {}
    return short == "pad" and long == "split" and report.get("longest", seq_len + 1) > seq_len


def table_ranges(source: Source) -> list[range]:
    """Return the rows of each table."""
    return [range(first, min(first + TABLE_ROWS, len(source))) for first in range(0, len(source), TABLE_ROWS)]


def make_table(source: Source, rows: range, seq_len: int, long: str, short: str) -> Table:
    """Return a table of the samples of ``rows``: pieces of up to ``seq_len`` tokens, packed, or one per sample."""
    sizes = source.lengths(rows)
    if long == "truncate":
        sizes = np.minimum(sizes, seq_len)
    elif long == "error" and sizes.max() > seq_len:
        raise _too_long(source.name(rows.start + int(sizes.argmax())), int(sizes.max()), seq_len)
    # A last piece of one token is left out: it has no token to predict.
    counts = np.maximum(1, (sizes - 2) // seq_len + 1)
    row_of_piece = np.repeat(np.arange(len(rows)), counts)
    begins = (np.arange(row_of_piece.size) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    order, bounds = np.arange(begins.size), np.arange(begins.size + 1)
    if short == "pack":
        order, bounds = pack(np.minimum(seq_len, sizes[row_of_piece] - begins), seq_len)
    return Table(*(values.astype("<u4") for values in (row_of_piece[order], begins[order], bounds)))


class Samples:
    """Samples of at most ``seq_len`` tokens made of a source's rows.

    Args:
        source: the rows.
        seq_len: largest number of tokens of a sample.
        long: ``truncate``, ``split``, ``crop`` or ``error``: treatment of rows above ``seq_len`` tokens.
        short: ``pad`` (a sample has one row), ``concat`` (all rows are joined in stored order, and cut) or ``pack``
            (whole rows, or pieces of long rows, are put together where they fit, and kept apart as documents).
        tables: one table for each of `table_ranges`; None: if `needs_tables`, the tables are made here, in memory.
    """

    def __init__(
        self, source: Source, seq_len: int, *, long: str = "truncate", short: str = "pad",
        tables: Sequence[Table] | None = None,
    ) -> None:  # fmt: skip
        self.source, self.seq_len, self.long, self.short = source, seq_len, long, short
        report = source.report()
        cuts = report is None or report["longest"] > seq_len
        if long == "error" and report is not None and cuts:
            raise _too_long(report["longest_at"], report["longest"], seq_len)
        self.layout = f"--short {short}"
        if short != "pad" or (cuts and long != "error"):
            self.layout += f" --long {long} --max_context_width {seq_len}"
        self.fingerprint = digest_of(source.fingerprint, self.layout)
        self._of_whole_rows = short != "concat" and not needs_tables(source, seq_len, long, short)
        self._size = len(source)
        if short == "concat":
            self._size = max(0, source.token_count() - 2) // seq_len + 1
        elif not self._of_whole_rows:
            if tables is None:
                tables = [make_table(source, rows, seq_len, long, short) for rows in table_ranges(source)]
            self._tables = tables
            self._table_starts = list(accumulate((table.bounds.size - 1 for table in tables), initial=0))
            self._size = self._table_starts[-1]

    def __len__(self) -> int:
        return self._size

    def last_shard(self) -> range:
        """Return the samples of the last shard; all samples if a sample may combine rows of several shards."""
        shards = [rows for rows in self.source.shards or [] if rows]
        return shards[-1] if shards and self._of_whole_rows else range(len(self))

    def sample(self, index: int, key: object = "", *, with_name: bool = True) -> Sample:
        """Return a sample; ``key`` decides the part that --long crop takes. Raises DataError for damaged data."""
        if self._of_whole_rows:
            row = self.source.row(index)
            if row.input_ids.size <= self.seq_len:
                return Sample(row, self.source.name(index) if with_name else "")
            begin, end = window(row, self.source.name(index), self.seq_len, self.long, key)
            return join([self._piece(index, begin, end - begin, with_name)])
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of {self._size}")
        pieces: list[Piece] = []
        if self.short == "concat":
            begin = index * self.seq_len
            end = min(begin + self.seq_len, self.source.token_count())
            number, start = self.source.find_token(begin)
            while start < end:
                first = max(begin - start, 0)
                pieces.append(self._piece(number, first, end - start - first, with_name))
                start += pieces[-1].row.input_ids.size
                number += 1
        else:
            number = bisect.bisect_right(self._table_starts, index) - 1
            table, sample = self._tables[number], index - self._table_starts[number]
            for piece in range(*table.bounds[sample : sample + 2].tolist()):
                row_number = number * TABLE_ROWS + int(table.rows[piece])
                pieces.append(self._piece(row_number, int(table.begins[piece]), self.seq_len, with_name))
        return join(pieces, packed=self.short == "pack")

    def _piece(self, number: int, begin: int, most: int, with_name: bool) -> Piece:
        """Return up to ``most`` tokens of a row, from token ``begin`` on."""
        row = self.source.row(number)
        end = min(begin + most, row.input_ids.size)
        cut = self.long == "truncate" and end < row.input_ids.size
        return Piece(row, self.source.name(number) if with_name else "", begin, end, cut)
