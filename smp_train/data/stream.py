"""One virtual stream of records: an order that needs no index, and a cursor of five numbers that resumes it.

Files are divided into parts, and parts assigned to V streams by size; the number of ranks does not matter. A stream
reads its parts in an order drawn anew for each epoch, block by block; the records of a block are permuted, made into
rows, and the rows into samples. The order is a function of the files, the tokenizer, the seed and V, so a stream
resumes from a `Cursor` by reading one block again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from smp_train.data.bad_records import BadRecords
from smp_train.data.files import DataFile, FileSet
from smp_train.data.order import permute
from smp_train.data.readers import Record, records
from smp_train.data.rows import GROUP_BYTES, Problem, RowMaker, size_of
from smp_train.data.samples import Piece, Sample, join, window
from smp_train.data.source import Row
from smp_train.errors import DataError

BLOCK_RECORDS = 256
"""Records that are permuted among themselves."""
BLOCK_BYTES = 1 << 22
"""A block of long records ends after so many bytes, because a block is in memory as a whole."""
FEWEST_STREAMS, MOST_STREAMS = 32, 256
"""Streams of a large data set in few files, and in many."""
STREAM_BYTES = 1 << 20
"""Least text per stream."""
COMPRESSION = 4
"""Assumed ratio of text to bytes in gzip and parquet files."""
JUDGED_RECORDS = 10_000
"""Before a stream's first epoch ends, the share of bad records is taken of at least this many."""


class Cursor(NamedTuple):
    """Position of a stream: the samples taken so far end before this token."""

    epoch: int = 0
    part: int = 0
    """Position in the order of this epoch's parts."""
    block: int = 0
    """Index of the block's first record in the part."""
    record: int = 0
    """Position in the permuted block."""
    token: int = 0
    """Tokens of this record's row that are in samples."""


BEGIN = Cursor()


class FilePart(NamedTuple):
    """Every ``step``-th record of a file, from index ``first`` on."""

    file: DataFile
    source: int
    """Number of the file's source among the run's sources."""
    first: int
    step: int

    @property
    def size(self) -> float:
        """Return the bytes, or a small number where the file's size is unknown."""
        return (self.file.size or 1) / self.step


@dataclass
class BadShare:
    """The share of bad records among the records that all streams of a rank have read."""

    bad: BadRecords
    max_bad: float | None
    read: int = 0

    def judge(self, least: int = 0) -> None:
        """Raise DataError where more than --max_bad of the records read, at least of ``least``, are bad."""
        if self.bad.count:
            self.bad.judge(self.max_bad, max(self.read, least))


@dataclass(frozen=True)
class Reading:
    """How the streams of a run turn records into samples."""

    sources: Sequence[FileSet]
    makers: Sequence[RowMaker]
    """One for each source."""
    seq_len: int
    seed: int = 0
    shuffled: bool = True
    short: str = "concat"
    long: str = "split"
    with_names: bool = True
    """Whether samples have names."""
    epochs: int | None = None
    """Epochs after which each stream ends; None: streams never end."""
    bad_share: BadShare = field(default_factory=lambda: BadShare(BadRecords(skip=False), None))

    def name(self, part: FilePart, number: int) -> str:
        """Return the name of a record, unique among all sources."""
        location = f"{self.sources[part.source].location.rstrip('/')}/" if len(self.sources) > 1 else ""
        return f"{location}{part.file.name}:{number}"

    def problem(self, row: Row) -> str:
        """Return why a row cannot be trained on, with what to do; empty for a good row."""
        if self.long == "truncate" and row.first_target() >= min(row.input_ids.size, self.seq_len):
            return (
                f"none of its first {self.seq_len} tokens carries loss: nothing to learn; raise --max_context_width, "
                "or use --long split"
            )
        return ""


class _Entry(NamedTuple):
    """A record of a block."""

    cursor: Cursor
    part: FilePart
    number: int
    """Number of the line or row in its file, from 1."""
    record: Record


class _NextRow(NamedTuple):
    """The row that the next sample begins with."""

    cursor: Cursor
    row: Row
    name: str
    begin: int
    """Its first token that is in no sample yet."""
    end: int
    """Its last token that goes into a sample, plus one."""


def stream_count(files: Sequence[DataFile]) -> int:
    """Return the number of streams of a data set: a power of two, by its files alone."""
    count = min(max(FEWEST_STREAMS, len(files) // 4), MOST_STREAMS)
    if all(file.size for file in files):
        count = min(count, max(1, sum(map(_text_bytes, files)) // STREAM_BYTES))
    if all(file.kind == "text" for file in files):
        count = min(count, len(files))
    return 1 << (count.bit_length() - 1)


def _text_bytes(file: DataFile) -> int:
    compressed = file.kind == "parquet" or file.name.lower().endswith(".gz")
    return file.size * (COMPRESSION if compressed else 1)


def assign_parts(sources: Sequence[FileSet], streams: int) -> list[list[FilePart]]:
    """Return the parts of each stream: together every record of the sources, once.

    The largest part comes first, each goes to the stream with the fewest bytes. Where there are fewer files than
    streams, files of many records are divided.
    """
    files = [(file, source) for source, file_set in enumerate(sources) for file in file_set.files]
    whole = sum(file.kind == "text" for file, _ in files)
    step = max(1, -(-(streams - whole) // max(1, len(files) - whole)))
    parts = [
        FilePart(file, source, first, 1 if file.kind == "text" else step)
        for file, source in files
        for first in range(1 if file.kind == "text" else step)
    ]
    of_streams: list[list[FilePart]] = [[] for _ in range(streams)]
    loads = [0.0] * streams
    for part in sorted(parts, key=lambda part: -part.size):
        least = loads.index(min(loads))
        loads[least] += part.size
        of_streams[least].append(part)
    return of_streams


class Stream:
    """One virtual stream, read from a cursor on.

    Args:
        number: its number; part of the key of its permutations.
        parts: its share of the data.
        reading: how records become samples.
        cursor: where to begin.
        samples: number of samples before the cursor.
    """

    def __init__(
        self, number: int, parts: Sequence[FilePart], reading: Reading, cursor: Cursor = BEGIN, samples: int = 0
    ) -> None:
        self.number, self.parts, self.reading = number, list(parts), reading
        self.cursor, self.samples = cursor, samples
        self._blocks = self._read_blocks(cursor)
        self._rows = self._make_rows(cursor)
        self._next: _NextRow | None = None

    def open(self) -> None:
        """Read the first block, without making its rows: several streams can be opened in threads."""
        self._blocks = chain(list(islice(self._blocks, 1)), self._blocks)

    def check(self) -> None:
        """Make the rows of the first block, from which the first samples are then taken. Raises DataError."""
        rows: list[_NextRow] = []
        for row in self._rows:
            rows.append(row)
            if row.cursor[:3] != rows[0].cursor[:3]:
                break
        self._rows = chain(rows, self._rows)

    @property
    def ended(self) -> bool:
        """Return whether no sample is left; reads the next row."""
        return self._peek() is None

    def take(self) -> Sample | None:
        """Return the next sample and move the cursor; None after the last epoch. Raises DataError."""
        reading = self.reading
        pieces: list[Piece] = []
        room = reading.seq_len
        self.samples += 1
        while room and (row := self._peek()):
            size = min(row.end - row.begin, room if reading.short == "concat" else reading.seq_len)
            if size > room:
                break
            end = row.begin + size
            truncated = reading.long == "truncate" and end == row.end < row.row.input_ids.size
            pieces.append(Piece(row.row, row.name, row.begin, end, truncated=truncated))
            room -= size
            self.cursor = row.cursor._replace(token=end)
            self._next = row._replace(begin=end) if end < row.end else None
            if reading.short == "pad":
                break
        return join(pieces, packed=reading.short == "pack") if pieces else None

    def skip_to(self, sample: int) -> None:
        """Take and drop samples until ``sample`` is next: other ranks train on them."""
        while self.samples < sample:
            self.take()

    def _peek(self) -> _NextRow | None:
        if self._next is None:
            self._next = next(self._rows, None)
            if self._next is None:
                self.cursor = Cursor(epoch=self.cursor.epoch if self.reading.epochs is None else self.reading.epochs)
        return self._next

    def _permutation(self, size: int, key: str) -> list[int]:
        if not self.reading.shuffled:
            return list(range(size))
        keys = np.full(size, f"stream {self.number} {key}")
        return [int(index) for index in permute(np.arange(size), size, self.reading.seed, keys)]

    def _read_blocks(self, start: Cursor) -> Iterator[list[_Entry] | None]:
        """Yield the records of one block after another, permuted, from a cursor on; None at the end of each epoch."""
        epoch, first_part, block, first_record, _ = start
        while self.reading.epochs is None or epoch < self.reading.epochs:
            order = self._permutation(len(self.parts), f"epoch {epoch}")
            for turn in range(first_part, len(order)):
                part = self.parts[order[turn]]
                fields = self.reading.sources[part.source].kind.fields
                remaining = records(part.file, fields, first=part.first + block * part.step, step=part.step)
                while size := len(records_of_block := _take_block(remaining)):
                    permuted = self._permutation(size, f"epoch {epoch} part {order[turn]} block {block}")
                    yield [
                        _Entry(Cursor(epoch, turn, block, index), part, *records_of_block[permuted[index]])
                        for index in range(first_record, size)
                    ]
                    block, first_record = block + size, 0
                block = first_record = 0
            yield None
            epoch, first_part = epoch + 1, 0

    def _make_rows(self, start: Cursor) -> Iterator[_NextRow]:
        """Yield the rows of all blocks, from a cursor on."""
        # A stream without a row would be read for ever; the cursor of a resumed stream is after a row.
        rows = int(start != Cursor(start.epoch))
        reading = self.reading
        for block in self._blocks:
            if block is None:
                if not rows:
                    raise self._no_row()
                reading.bad_share.judge()
                rows = 0
                continue
            for entry, row in self._make_block(block):
                rows += 1
                name = reading.name(entry.part, entry.number)
                key = f"{reading.seed} {entry.cursor.epoch} {name}"
                begin, end = window(row, name, reading.seq_len, reading.long, key)
                if entry.cursor == start._replace(token=0):
                    begin = max(begin, start.token)
                if begin < end:
                    yield _NextRow(entry.cursor, row, name if reading.with_names else "", begin, end)
            reading.bad_share.judge(JUDGED_RECORDS)

    def _make_block(self, block: list[_Entry]) -> Iterator[tuple[_Entry, Row]]:
        """Yield the rows of a block's good records. Raises DataError for a bad one, unless it is left out."""
        reading, share = self.reading, self.reading.bad_share
        for group in _groups(block):
            share.read += len(group)
            rows = reading.makers[group[0].part.source].rows([entry.record for entry in group])
            for entry, row in zip(group, rows, strict=True):
                if row is None:
                    continue
                problem = row if isinstance(row, Problem) else reading.problem(row)
                if problem:
                    share.bad.add(entry.part.file, entry.number, problem)
                elif not isinstance(row, Problem):
                    yield entry, row

    def _no_row(self) -> DataError:
        path = self.parts[0].file.shown if self.parts else "the data"
        return DataError(f"{path}: a stream found no record in it; use --streaming 0 for a data set this small")


def _take_block(remaining: Iterator[tuple[int, int, Record]]) -> list[tuple[int, Record]]:
    """Return (number, record) of the next block; empty at the end of the part."""
    block = []
    size = 0
    for _, number, record in remaining:
        block.append((number, record))
        size += size_of(record)
        if len(block) == BLOCK_RECORDS or size >= BLOCK_BYTES:
            break
    return block


def _groups(block: list[_Entry]) -> Iterator[list[_Entry]]:
    """Yield the records of a block in groups of about `GROUP_BYTES`."""
    group: list[_Entry] = []
    size = 0
    for entry in block:
        group.append(entry)
        size += size_of(entry.record)
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
