"""One virtual stream of records: an order that needs no index, and a cursor of five numbers that resumes the stream.

Files are divided into parts, and parts are assigned to V streams by size; the number of ranks does not matter. A stream
reads its parts, block by block, in an order that is drawn anew for each epoch; the records of a block are permuted and
made into rows, and the rows are made into samples. The order is a function of the files, the tokenizer, the seed and V,
so a stream resumes from a `Cursor` by reading one block again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np

from smp_train.data.bad_records import BadRecords
from smp_train.data.files import DataFile, FileSet
from smp_train.data.order import permute
from smp_train.data.readers import Record, records
from smp_train.data.rows import GROUP_BYTES, RowMaker, grouped
from smp_train.data.samples import Piece, Sample, join, window
from smp_train.data.source import Problem, Row
from smp_train.errors import DataError

BLOCK_RECORDS, BLOCK_BYTES = 256, 1 << 22
"""A block ends at this many records, or at this size; its records are permuted among themselves."""
FEWEST_STREAMS, MOST_STREAMS = 32, 256
"""Number of streams of a large data set: the first if it has few files, the second if it has many."""
STREAM_BYTES = 1 << 20
"""A small data set has fewer streams, each of at least this size."""
FEWEST_JUDGED, FEWEST_RECORDS = 10_000, 1000
"""Bad records are judged as a fraction of at least this many records: the first in an epoch, the second at its end."""


class Cursor(NamedTuple):
    """Position of a stream: the samples taken so far end before this token.

    ``part`` is an index into the epoch's order of parts; ``block`` is the index of the block's first record in the
    part; ``record`` is an index into the permuted block; ``token`` is an index into the row of this record.
    """

    epoch: int = 0
    part: int = 0
    block: int = 0
    record: int = 0
    token: int = 0


BEGIN = Cursor()


class FilePart(NamedTuple):
    """Every ``step``-th record of a file, from index ``first`` on; the file belongs to source number ``source``."""

    file: DataFile
    source: int
    first: int
    step: int


@dataclass(frozen=True)
class Reading:
    """How the streams of a run turn records into samples."""

    sources: Sequence[FileSet]
    makers: Sequence[RowMaker]  # one for each source
    seq_len: int
    seed: int = 0
    shuffled: bool = True
    short: str = "concat"
    long: str = "split"
    epochs: int | None = None  # epochs after which each stream ends; None: streams never end
    bad: BadRecords = field(default_factory=BadRecords)

    def name(self, part: FilePart, number: int) -> str:
        """Return the name of a record, unique among all sources."""
        location = f"{self.sources[part.source].location.rstrip('/')}/" if len(self.sources) > 1 else ""
        return f"{location}{part.file.name}:{number}"

    def rows(self, part: FilePart, group: Sequence[tuple[Cursor, int, Record]]) -> Iterator[tuple[Cursor, int, Row]]:
        """Yield (cursor, number, row) for well-formed records. Raises DataError for malformed ones, or skips them."""
        self.bad.read += len(group)
        made = self.makers[part.source].rows([record for _, _, record in group])
        for (cursor, number, _), row in zip(group, made, strict=True):
            if isinstance(row, Row) and self.long == "truncate" and row.first_target() >= self.seq_len:
                row = Problem(
                    f"none of its first {self.seq_len} tokens carries loss: nothing to learn; raise "
                    "--max_context_width, or use --long split"
                )
            if isinstance(row, Problem):
                self.bad.add(part.file, number, row)
            elif row is not None:
                yield cursor, number, row


def stream_count(files: Sequence[DataFile]) -> int:
    """Return the number of streams of a data set: a power of two that depends on the files alone."""
    count = min(max(FEWEST_STREAMS, len(files) // 4), MOST_STREAMS)
    if all(file.size for file in files):
        count = min(count, max(1, sum(file.size for file in files) // STREAM_BYTES))
    if all(file.kind == "text" for file in files):
        count = min(count, len(files))
    return 1 << (count.bit_length() - 1)


def assign_parts(sources: Sequence[FileSet], streams: int) -> list[list[FilePart]]:
    """Return the parts of each stream; together they hold every record of the sources once.

    Parts are assigned from the largest on, each to the stream with the fewest bytes. If there are fewer files than
    streams, files of many records are divided into several parts.
    """
    files = [(file, source) for source, file_set in enumerate(sources) for file in file_set.files]
    whole = sum(file.kind == "text" for file, _ in files)
    step = max(1, -(-(streams - whole) // max(1, len(files) - whole)))
    steps = [1 if file.kind == "text" else step for file, _ in files]
    parts = [FilePart(*file, first, n) for file, n in zip(files, steps, strict=True) for first in range(n)]
    assigned: list[list[FilePart]] = [[] for _ in range(streams)]
    loads = [0.0] * streams
    for part in sorted(parts, key=lambda part: -(part.file.size or 1) / part.step):
        least = loads.index(min(loads))
        loads[least] += (part.file.size or 1) / part.step
        assigned[least].append(part)
    return assigned


class Stream:
    """One virtual stream, which reads some parts from a cursor on.

    ``samples`` counts the samples before the cursor; ``number`` is part of the key of the stream's permutations.
    """

    def __init__(
        self, number: int, parts: Sequence[FilePart], reading: Reading, samples: int = 0, cursor: Cursor = BEGIN
    ) -> None:
        self.number, self.parts, self.reading = number, list(parts), reading
        self.cursor, self.samples = cursor, samples
        self._blocks = self._read_blocks(cursor)
        self._first_block: Future[list[Any]] | None = None
        self._groups = self._make_pieces(cursor)
        self._ready: deque[tuple[Cursor, Piece]] = deque()

    def open(self, pool: Executor) -> None:
        """Begin to read the first block in a thread of ``pool``, unless it is being read."""
        self._first_block = self._first_block or pool.submit(list, islice(self._blocks, 1))

    def check(self) -> None:
        """Make the first rows, and keep them for the first samples. Raises DataError."""
        self._peek()

    @property
    def ended(self) -> bool:
        """Return whether no sample is left; reads the next row."""
        return self._peek() is None

    def take(self) -> Sample | None:
        """Return the next sample and move the cursor; None after the last epoch. Raises DataError."""
        short, seq_len = self.reading.short, self.reading.seq_len
        pieces: list[Piece] = []
        room = seq_len
        self.samples += 1
        while room and (following := self._peek()):
            cursor, piece = following
            end = min(piece.end, piece.begin + (room if short == "concat" else seq_len))
            if end - piece.begin > room:
                break
            pieces.append(piece._replace(end=end, truncated=piece.truncated and end == piece.end))
            room -= end - piece.begin
            self.cursor = cursor._replace(token=end)
            self._ready.popleft()
            if end < piece.end:
                self._ready.appendleft((cursor, piece._replace(begin=end)))
            if short == "pad":
                break
        return join(pieces, packed=short == "pack") if pieces else None

    def skip_to(self, sample: int) -> Stream:
        """Take and drop samples, which other ranks train on, until ``sample`` is next; return this stream."""
        while self.samples < sample:
            self.take()
        return self

    def _peek(self) -> tuple[Cursor, Piece] | None:
        """Return the next piece with its cursor; after the last epoch, return None and move the cursor to the end."""
        while not self._ready and (group := next(self._groups, None)) is not None:
            self._ready.extend(group)
        if self._ready:
            return self._ready[0]
        if self.reading.epochs is not None:
            self.cursor = Cursor(self.reading.epochs)
        return None

    def _permutation(self, size: int, key: str) -> list[int]:
        if not self.reading.shuffled:
            return list(range(size))
        keys = np.full(size, f"stream {self.number} {key}")
        return [int(index) for index in permute(np.arange(size), size, self.reading.seed, keys)]

    def _read_blocks(self, start: Cursor) -> Iterator[tuple[FilePart, list[tuple[Cursor, int, Record]]] | None]:
        """Yield (part, permuted records) of one block after another from a cursor on; None at the end of each epoch."""
        epoch, first_part, block, first_record, _ = start
        while self.reading.epochs is None or epoch < self.reading.epochs:
            order = self._permutation(len(self.parts), f"epoch {epoch}")
            for turn in range(first_part, len(order)):
                part = self.parts[order[turn]]
                fields = self.reading.sources[part.source].kind.fields
                remaining = records(part.file, fields, first=part.first + block * part.step, step=part.step)
                for contents in grouped(remaining, BLOCK_BYTES, BLOCK_RECORDS):
                    size = len(contents)
                    permuted = self._permutation(size, f"epoch {epoch} part {order[turn]} block {block}")
                    turns = range(first_record, size)
                    yield part, [(Cursor(epoch, turn, block, n), *contents[permuted[n]][1:]) for n in turns]
                    block, first_record = block + size, 0
                block = first_record = 0
            yield None
            epoch, first_part = epoch + 1, 0

    def _make_pieces(self, start: Cursor) -> Iterator[list[tuple[Cursor, Piece]]]:
        """Yield the part of each row that --long keeps, from a cursor on, in groups of records."""
        reading = self.reading
        # A stream without any row would be read for ever. A stream whose cursor has moved has had rows.
        rows = int(start != Cursor(start.epoch))
        for block in chain(self._first_block.result() if self._first_block else (), self._blocks):
            if block is None:
                if not rows:
                    path = self.parts[0].file.shown
                    raise DataError(f"{path}: a stream found no record in it; use --streaming 0 for a set this small")
                reading.bad.judge(max(reading.bad.read, FEWEST_RECORDS))
                rows = 0
                continue
            part, entries = block
            for group in grouped(entries, GROUP_BYTES):
                pieces: list[tuple[Cursor, Piece]] = []
                for cursor, number, row in reading.rows(part, group):
                    rows += 1
                    name = reading.name(part, number)
                    key = f"{reading.seed} {cursor.epoch} {name}"
                    begin, end = window(row, name, reading.seq_len, reading.long, key)
                    name = f"{name}@{cursor.epoch}" if cursor.epoch else name
                    if cursor == start._replace(token=0):
                        begin = max(begin, start.token)
                    if begin < end:
                        truncated = reading.long == "truncate" and end < row.input_ids.size
                        pieces.append((cursor, Piece(row, name, begin, end, truncated)))
                yield pieces
            reading.bad.judge(max(reading.bad.read, FEWEST_JUDGED))
