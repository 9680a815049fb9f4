"""Text as an endless sequence of tokens, in V virtual streams whose state is five numbers and no buffer.

Files are split into pieces and assigned to V streams by size, whatever the number of ranks. A stream reads its pieces,
in an order drawn anew for each of its epochs, block by block; the documents of a block are permuted, tokenised, and
joined end to end with the tokenizer's end token behind each. Its k-th sample is tokens k * seq_len to (k + 1) * seq_len
of that; what is left at the end of an epoch begins the next. Of chats and of prompts with completions a sample is the
next one, or, packed, the next ones that have room together. Everything is a pure function of the files, the
tokenizer, the seed and V, so a stream resumes from a `Cursor` by reading one block again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from smp_train.data.bad_rows import leave_out
from smp_train.data.order import permute
from smp_train.data.prepare.tokenizer import encode
from smp_train.data.source import Row
from smp_train.data.text.conversations import Conversations
from smp_train.data.text.fields import TEXTS, Document, Fields, texts_of
from smp_train.data.text.read import TextFile, documents
from smp_train.distributed.host import cores
from smp_train.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BLOCK = 256
"""Documents that are permuted among themselves; their texts are in memory together."""
BATCH_CHARACTERS = 1 << 16
"""Characters that are tokenised in one call."""
LEAST_STREAMS, MOST_STREAMS = 16, 256
"""Streams of a data set of few large files, and of one of many."""
STREAM_BYTES = 1 << 20
"""Of text that each stream has at least."""


class Cursor(NamedTuple):
    """The position of a stream: the samples taken of it end before this token."""

    epoch: int = 0
    piece: int = 0
    """Of the pieces in the order of this epoch."""
    block: int = 0
    document: int = 0
    """In the permuted block."""
    token: int = 0


class Piece(NamedTuple):
    """Every ``parts``-th document of a file, from number ``part`` on."""

    file: TextFile
    part: int
    parts: int

    @property
    def size(self) -> float:
        """Bytes, or 1 where they are not known."""
        return (self.file.size or 1) / self.parts


def stream_count(files: Sequence[TextFile]) -> int:
    """Return the number of streams a data set is read in: a power of two that depends on its files alone."""
    wanted = min(max(LEAST_STREAMS, len(files) // 4), MOST_STREAMS)
    if all(file.size for file in files):
        wanted = min(wanted, max(1, sum(_text_bytes(file) for file in files) // STREAM_BYTES))
    if all(file.kind == "whole" for file in files):
        wanted = min(wanted, len(files))
    return 1 << (wanted.bit_length() - 1)


def _text_bytes(file: TextFile) -> int:
    return file.size * (4 if file.name.lower().endswith((".gz", ".parquet")) else 1)


def assign_pieces(files: Sequence[TextFile], streams: int) -> list[list[Piece]]:
    """Assign files to streams, the largest first, each to the stream with the fewest bytes.

    Where there are fewer files than streams, those of many documents are split into pieces.
    """
    whole = sum(file.kind == "whole" for file in files)
    parts = max(1, -(-(streams - whole) // max(1, len(files) - whole)))
    pieces = []
    for file in files:
        of_file = 1 if file.kind == "whole" else parts
        pieces += [Piece(file, part, of_file) for part in range(of_file)]
    of_streams: list[list[Piece]] = [[] for _ in range(streams)]
    loads = [0.0] * streams
    for piece in sorted(pieces, key=lambda p: -p.size):
        least = loads.index(min(loads))
        loads[least] += piece.size
        of_streams[least].append(piece)
    return of_streams


class Sample(NamedTuple):
    """One sample of a stream."""

    row: Row
    name: str
    """The tokens of documents that it is made of; empty where that is not wanted."""
    truncated: int = 0
    """Documents that lost their end."""


@dataclass(frozen=True)
class Reading:
    """How all streams of a data set read."""

    tokenizer: Tokenizer
    end: int
    """The token behind each document."""
    seq_len: int
    seed: int
    shuffled: bool
    fields: Fields = TEXTS
    named: bool = True
    left_out: Callable[[str], None] | None = None
    """Counts malformed documents, which are left out (--bad_rows skip); None: they stop the run."""
    conversations: Conversations | None = None
    """Makes rows of chats, or of prompts with completions; None: the documents are text."""
    packed: bool = False
    """Whether a sample is of as many of these as have room, rather than of one."""
    long: str = "truncate"
    """Whether the end of such a row is cut off, or it is an ``error``."""

    def rows(self, found: Sequence[tuple[TextFile, int, Document]]) -> Iterator[Row | None]:
        """Yield (file, number, document) as rows: a text with the end token behind it, a conversation as it is.

        None where there is nothing to train on. Raises DataError at what is malformed, unless it is left out.
        """
        if self.conversations is None:
            texts = [str(document) for _, _, document in found]
            yield from (Row(ids) if ids.size else None for ids in encode(self.tokenizer, texts, self.end))
            return
        for (file, number, _), row in zip(found, self._encoded(found), strict=True):
            problem = row if isinstance(row, str) else self._problem(row) if row else ""
            if problem:
                leave_out(f"{file.at(number)}: {problem}", self.left_out)
            yield None if isinstance(row, str) or problem else row

    def _encoded(self, found: Sequence[tuple[TextFile, int, Document]]) -> list[Row | str | None]:
        assert self.conversations is not None
        coming = iter(self.conversations([document for _, _, document in found if document]))
        return [next(coming) if document else None for _, _, document in found]

    def _problem(self, row: Row) -> str:
        size = row.input_ids.size
        if size > self.seq_len and self.long == "error":
            return (
                f"{size} tokens are more than the {self.seq_len} of --max_context_width; raise it, or cut off the end "
                "with --long truncate"
            )
        if not row.cut(0, self.seq_len).has_target():
            return f"none of its first {self.seq_len} tokens is counted: nothing to learn; raise --max_context_width"
        return ""


class Stream:
    """One virtual stream, read from a cursor on.

    Args:
        number: its number; part of the key of its permutations.
        pieces: its share of the data.
        reading: how.
        cursor: where to begin.
        taken: samples that have been taken before.
    """

    def __init__(self, number: int, pieces: Sequence[Piece], reading: Reading, cursor: Cursor, taken: int) -> None:
        self.number = number
        self.pieces = list(pieces)
        self.reading = reading
        self.cursor = cursor
        self.taken = taken
        self._rows = self._read()
        self._next: tuple[Cursor, str, Row] | None = None

    def open(self) -> None:
        """Read up to the first document. Raises DataError."""
        self._next = self._next or next(self._rows)

    def take(self) -> Sample:
        """Return the next sample; move the cursor behind it. Raises DataError."""
        sample = self._joined() if self.reading.conversations is None else self._whole()
        self.taken += 1
        return sample

    def _joined(self) -> Sample:
        """Return the next ``seq_len`` tokens, whatever documents they are of."""
        parts: list[np.ndarray] = []
        names: list[str] = []
        wanted = self.reading.seq_len
        while wanted:
            here, name, row = self._next or next(self._rows)
            part = row.input_ids[here.token : here.token + wanted]
            end = here.token + part.size
            if part.size:
                parts.append(part)
                names.append(self._span(name, here.token, end))
            wanted -= part.size
            self.cursor = here._replace(token=end)
            self._next = (self.cursor, name, row) if end < row.input_ids.size else None
        return Sample(Row(np.concatenate(parts)), "+".join(names) if self.reading.named else "")

    def _whole(self) -> Sample:
        """Return the next row, or, packed, the next ones that have room together."""
        rows: list[Row] = []
        names: list[str] = []
        room, truncated = self.reading.seq_len, 0
        while not rows or self.reading.packed:
            self._next = here, name, row = self._next or next(self._rows)
            size = min(row.input_ids.size, self.reading.seq_len)
            # The row that the cursor is behind comes again after a resume.
            if not here.token:
                if size > room:
                    break
                rows.append(row.cut(0, size))
                names.append(self._span(name, 0, size))
                room -= size
                truncated += row.input_ids.size > size
                self.cursor = here._replace(token=size)
            self._next = None
        return Sample(packed(rows), "+".join(names) if self.reading.named else "", truncated)

    def _span(self, name: str, begin: int, end: int) -> str:
        return span(name, begin, end) if self.reading.named else ""

    def skip_to(self, sample: int) -> None:
        """Take and drop samples until ``sample`` is next: they are other ranks'."""
        while self.taken < sample:
            self.take()

    def _order(self, size: int, what: str) -> list[int]:
        if not self.reading.shuffled:
            return list(range(size))
        key = np.full(size, f"stream {self.number} {what}")
        return [int(index) for index in permute(np.arange(size), size, self.reading.seed, key)]

    def _read(self) -> Iterator[tuple[Cursor, str, Row]]:
        """Yield (position, name, row) of documents without end, the first with the cursor's own token."""
        coming, epoch = self._documents(), self.cursor.epoch
        failure: DataError | None = None
        while failure is None:
            group: list[tuple[Cursor, TextFile, int, Document]] = []
            size = 0
            try:
                # A set of which nothing is left after an epoch shall end the run, not be read for ever.
                while size < BATCH_CHARACTERS and not (group and group[-1][0].epoch > epoch + 1):
                    group.append(next(coming))
                    size += 1 + sum(map(len, texts_of(group[-1][3])))
            except DataError as error:  # the documents before it come first
                failure = error
            rows = self.reading.rows([(file, number, document) for _, file, number, document in group])
            for (here, file, number, _), row in zip(group, rows, strict=True):
                if row is not None:
                    epoch = here.epoch
                    yield here, f"{file.name}:{number}", row
            if group and group[-1][0].epoch > epoch + 1:
                raise self._too_few()
        raise failure

    def _documents(self) -> Iterator[tuple[Cursor, TextFile, int, Document]]:
        """Yield (position, file, number, document) of documents that are not blank, without end."""
        reading = self.reading
        epoch, first_turn, block, first_document, token = self.cursor
        while True:
            found = (first_turn, block, first_document) != (0, 0, 0)
            order = self._order(len(self.pieces), f"epoch {epoch}")
            for turn in range(first_turn, len(order)):
                file, part, parts = self.pieces[order[turn]]
                coming = documents(
                    file, reading.fields, start=block * BLOCK, part=part, parts=parts, left_out=reading.left_out
                )
                while texts := list(islice(coming, BLOCK)):
                    permuted = self._order(len(texts), f"epoch {epoch} piece {order[turn]} block {block}")
                    for document in range(first_document, len(texts)):
                        number, content = texts[permuted[document]]
                        if content:
                            found = True
                            yield Cursor(epoch, turn, block, document, token), file, number, content
                            token = 0
                    block, first_document = block + 1, 0
                block = first_document = 0
            if not found:
                raise self._too_few()
            epoch, first_turn, token = epoch + 1, 0, 0

    def _too_few(self) -> DataError:
        return DataError(
            f"{self.pieces[0].file.path if self.pieces else 'the data'}: too few documents to stream; "
            "make shards of them with: smp-train prepare"
        )


def packed(rows: Sequence[Row]) -> Row:
    """Return rows with labels as one, whose documents do not see each other."""
    if len(rows) == 1:
        return rows[0]
    return Row(
        np.concatenate([row.input_ids for row in rows]),
        documents=np.array([row.input_ids.size for row in rows]),
        labels=np.concatenate([row.labels for row in rows if row.labels is not None]),
    )


def span(document: str, begin: int, end: int) -> str:
    """Return what names tokens of a document, its end token included; the name of a sample joins these by ``+``."""
    return f"{document}[{begin}:{end}]"


def spread_tokenizing(processes: int) -> None:
    """Give each of ``processes`` on this machine its share of the cores for tokenising, unless the user chose a number.

    Call it before the first text is tokenised.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, cores() // processes)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
