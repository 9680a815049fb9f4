"""Text as an endless sequence of tokens, in V virtual streams whose state is five numbers and no buffer.

Files are split into pieces and assigned to V streams by size, whatever the number of ranks. A stream reads its pieces,
in an order drawn anew for each of its epochs, block by block; the documents of a block are permuted, tokenised, and
joined end to end with the tokenizer's end token behind each. Its k-th sample is tokens k * seq_len to (k + 1) * seq_len
of that; what is left at the end of an epoch begins the next. Everything is a pure function of the files, the
tokenizer, the seed and V, so a stream resumes from a `Cursor` by reading one block again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from smp_train.data.bad_rows import LeftOut
from smp_train.data.order import permute
from smp_train.data.prepare.tokenizer import encode
from smp_train.data.text.read import TextFile, documents
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


@dataclass(frozen=True)
class Reading:
    """How all streams of a data set read."""

    tokenizer: Tokenizer
    end: int
    """The token behind each document."""
    seq_len: int
    seed: int
    shuffled: bool
    column: str = "text"
    named: bool = True
    left_out: LeftOut | None = None
    """Counts malformed documents, which are left out (--bad_rows skip); None: they stop the run."""

    def tokenise(self, texts: list[str]) -> list[np.ndarray]:
        """Return the tokens of each text, uint32, with the end token behind them; none of an empty text."""
        return encode(self.tokenizer, texts, self.end)


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
        self._tokenised = self._read()
        self._next: tuple[Cursor, str, np.ndarray] | None = None

    def open(self) -> None:
        """Read up to the first document. Raises DataError."""
        self._next = self._next or next(self._tokenised)

    def take(self) -> tuple[np.ndarray, str]:
        """Return the next sample, uint32 [seq_len], and its name where that is wanted; move the cursor behind it.

        Raises DataError.
        """
        parts: list[np.ndarray] = []
        names: list[str] = []
        wanted = self.reading.seq_len
        while wanted:
            here, name, ids = self._next or next(self._tokenised)
            part = ids[here.token : here.token + wanted]
            end = here.token + part.size
            if part.size:
                parts.append(part)
                if self.reading.named:
                    names.append(span(name, here.token, end))
            wanted -= part.size
            self.cursor = here._replace(token=end)
            self._next = (self.cursor, name, ids) if end < ids.size else None
        self.taken += 1
        return np.concatenate(parts), "+".join(names)

    def skip_to(self, sample: int) -> None:
        """Take and drop samples until ``sample`` is next: they are other ranks'."""
        while self.taken < sample:
            self.take()

    def _order(self, size: int, what: str) -> list[int]:
        if not self.reading.shuffled:
            return list(range(size))
        key = np.full(size, f"stream {self.number} {what}")
        return [int(index) for index in permute(np.arange(size), size, self.reading.seed, key)]

    def _read(self) -> Iterator[tuple[Cursor, str, np.ndarray]]:
        """Yield (position, name, tokens) of documents without end, the first with the cursor's own token."""
        coming = self._documents()
        failure: DataError | None = None
        while failure is None:
            group: list[tuple[Cursor, str, str]] = []
            size = 0
            try:
                while size < BATCH_CHARACTERS:
                    group.append(next(coming))
                    size += len(group[-1][2])
            except DataError as error:  # the documents before it come first
                failure = error
            for (here, name, _), ids in zip(group, self.reading.tokenise([one[2] for one in group]), strict=True):
                yield here, name, ids
        raise failure

    def _documents(self) -> Iterator[tuple[Cursor, str, str]]:
        """Yield (position, name, text) of documents that are not blank, without end."""
        reading = self.reading
        epoch, first_turn, block, first_document, token = self.cursor
        while True:
            found = (first_turn, block, first_document) != (0, 0, 0)
            order = self._order(len(self.pieces), f"epoch {epoch}")
            for turn in range(first_turn, len(order)):
                file, part, parts = self.pieces[order[turn]]
                coming = documents(
                    file, reading.column, start=block * BLOCK, part=part, parts=parts, left_out=reading.left_out
                )
                while texts := list(islice(coming, BLOCK)):
                    permuted = self._order(len(texts), f"epoch {epoch} piece {order[turn]} block {block}")
                    for document in range(first_document, len(texts)):
                        number, text = texts[permuted[document]]
                        if text:
                            found = True
                            yield Cursor(epoch, turn, block, document, token), f"{file.name}:{number}", text
                            token = 0
                    block, first_document = block + 1, 0
                block = first_document = 0
            if not found:
                raise DataError(
                    f"{self.pieces[0].file.path if self.pieces else 'the data'}: too few documents to stream; "
                    "make shards of them with: smp-train prepare"
                )
            epoch, first_turn, token = epoch + 1, 0, 0


def span(document: str, begin: int, end: int) -> str:
    """Return what names tokens of a document, its end token included; the name of a sample joins these by ``+``."""
    return f"{document}[{begin}:{end}]"


def spread_tokenizing(processes: int) -> None:
    """Give each of ``processes`` on this machine its share of the cores for tokenising, unless the user chose a number.

    Call it before the first text is tokenised.
    """
    os.environ.setdefault("RAYON_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
