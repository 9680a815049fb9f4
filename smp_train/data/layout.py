"""Rows of any length as samples of one length: split, joined end to end, or packed whole.

A `Layout` is itself a `Source`, so order, resume and audit hold for its samples as they do for rows. What
it needs is the length of every row (one pass over the index, no token is read) and 8 to 24 bytes of memory
per row; every rank computes the same tables.
"""

from __future__ import annotations

import bisect
import hashlib

import numpy as np

from smp_train.data.source import Row, Source, lengths, refuse_uncounted, shards, trimmed
from smp_train.data.targets import NO_GAPS, empty_pieces
from smp_train.errors import ConfigError, DataError

LONG = ("truncate", "split", "crop", "error")
SHORT = ("pad", "concat", "pack")


def pack(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Put items into as few bins of ``capacity`` as best-fit decreasing finds; return the items of each.

    Best fit decreasing needs at most 11/9 of the fewest bins possible, plus one (Johnson, Demers, Ullman,
    Garey and Graham, 1974). Ties are broken by index, so the result depends on the sizes alone.
    """
    bins: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    # Bit f is set when some bin has f tokens of room: the smallest that is enough is one shift away.
    rooms = 0
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        enough = rooms >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            number = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
            bins[number].append(item)
        else:
            room, number = capacity, len(bins)
            bins.append([item])
        if room > size:
            rooms |= 1 << (room - size)
            with_room[room - size].append(number)
    # In the order of their first items, so that nearby rows stay nearby on disk.
    return sorted(sorted(items) for items in bins)


class Layout(Source):
    """Samples of at most ``seq_len`` tokens made of a source's rows, every token of every row in one of them.

    Padding at the ends of rows is left out first. ``--long split`` cuts a row into pieces of ``seq_len``
    (a last piece of a single token, with nothing to predict, is dropped); ``--short concat`` joins all rows
    end to end, in stored order, and cuts the whole; ``--short pack`` puts whole rows, or the pieces of long
    ones, together where they fit, and keeps them apart: positions start again at each, none sees another.

    Args:
        source: the rows.
        seq_len: tokens of a sample, at most.
        long: ``split``, ``truncate`` or ``error``: what becomes of rows above ``seq_len`` tokens.
        short: ``pad`` (a sample is of one row), ``concat`` or ``pack``.
    """

    def __init__(self, source: Source, seq_len: int, *, long: str = "split", short: str = "pad") -> None:
        if long == "crop":
            raise ConfigError(f"--long crop does not go with --short {short}; use split or truncate")
        self.source, self.seq_len, self._short = source, seq_len, short
        self.layout = f"--short {short} --long {long} --max_context_width {seq_len}"
        self.fingerprint = hashlib.blake2b(f"{source.fingerprint} {self.layout}".encode(), digest_size=16).hexdigest()
        self._whole = lengths(source)
        longest = int(self._whole.argmax())
        if long == "error" and self._whole[longest] > seq_len:
            raise DataError(
                f"{source.name(longest)}: row of {self._whole[longest]} tokens is longer than the {seq_len} of "
                "--max_context_width; use --long split or truncate, or prepare shorter rows"
            )
        if short == "pack":
            _refuse_holes(source, int(self._whole.sum()))
        self._sizes = np.minimum(self._whole, seq_len) if long == "truncate" else self._whole
        # Pieces of a row of n tokens: ceil((n - 1) / seq_len), as one token alone predicts nothing.
        counts = self._sizes if short == "concat" else np.maximum(1, (self._sizes - 2) // seq_len + 1)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        """The first piece of each row; of rows that are joined, its first token."""
        stored = shards(source)
        self._shard_starts = [rows.start for rows in stored]
        firsts, total = [int(self._starts[first]) for first in self._shard_starts], int(self._starts[-1])
        self._bins: list[list[int]] = []
        """Pieces of each packed sample."""
        if short == "concat":
            firsts, total = [-(-first // seq_len) for first in firsts], max(0, total - 2) // seq_len + 1
        elif short == "pack":
            firsts = [self._pack(rows) for rows in stored]
            total = len(self._bins)
        firsts = [min(first, total) for first in firsts]
        self.shards = [range(a, b) for a, b in zip(firsts, [*firsts[1:], total], strict=True)]
        self._size = total

    def _pack(self, rows: range) -> int:
        """Pack the pieces of a shard's rows; return its first sample."""
        sample, first = len(self._bins), int(self._starts[rows.start])
        pieces = [self._piece(piece) for piece in range(first, int(self._starts[rows.stop]))]
        bins = pack(np.array([end - begin for _, begin, end in pieces]), self.seq_len)
        self._bins += [[first + item for item in items] for items in bins]
        return sample

    def _piece(self, piece: int) -> tuple[int, int, int]:
        row = int(np.searchsorted(self._starts, piece, side="right")) - 1
        begin = (piece - int(self._starts[row])) * self.seq_len
        return row, begin, min(begin + self.seq_len, int(self._sizes[row]))

    def pieces(self, index: int) -> list[tuple[int, int, int]]:
        """Return what sample ``index`` is made of: (row, begin, end) in tokens of the row without padding."""
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} of {self._size}")
        if self._short != "concat":
            return [self._piece(piece) for piece in (self._bins[index] if self._bins else [index])]
        begin = index * self.seq_len
        end = min(begin + self.seq_len, int(self._starts[-1]))
        first, stop = int(np.searchsorted(self._starts, begin, "right")) - 1, int(np.searchsorted(self._starts, end))
        starts = self._starts[first : stop + 1].tolist()
        return [
            (first + at, max(begin - start, 0), min(end, starts[at + 1]) - start)
            for at, start in enumerate(starts[:-1])
            if starts[at + 1] > start
        ]

    def unlearnable(self) -> np.ndarray:
        """Return the samples without target, rising, where the source knows where its rows have none."""
        stored = enumerate(shards(self.source))
        parts = [self.source.gaps(shard) + np.array([rows.start, 0, 0]) for shard, rows in stored]
        gaps = np.concatenate([NO_GAPS, *parts])
        if self._short == "concat":
            return empty_pieces(self._joined(gaps), self._starts[-1:], self.seq_len)[1]
        rows, pieces = empty_pieces(gaps, self._sizes, self.seq_len)
        found = self._starts[rows] + pieces
        if self._short == "pack" and found.size:
            empty = set(found.tolist())
            found = np.array([n for n, items in enumerate(self._bins) if empty.issuperset(items)], dtype=np.int64)
        return found

    def _joined(self, gaps: np.ndarray) -> np.ndarray:
        """Return the gaps of all rows as those of one that holds them end to end."""
        rows, begin, end = gaps.T
        # A row whose only target is its first token: joined, that has a token before it.
        begin = np.where((begin == 0) & (end >= self._whole[rows]), 1, begin)
        begin, end = self._starts[rows] + begin, self._starts[rows] + np.minimum(end, self._sizes[rows])
        some = end > begin
        begin, end = begin[some], end[some]
        apart = begin[1:] > end[:-1]
        begin, end = begin[np.append(True, apart)[: begin.size]], end[np.append(apart, True)[: end.size]]
        return np.stack([np.zeros_like(begin), begin, end], axis=1)

    def _stored(self, shard: int) -> list[int]:
        """Return the shards of the source that samples of a shard are made of: of joined rows, the next ones too."""
        samples = self.shards[shard]
        if self._short != "concat" or not samples:
            return [shard] if samples else []
        rows = self.pieces(samples.start)[0][0], self.pieces(samples.stop - 1)[-1][0]
        first, last = (bisect.bisect_right(self._shard_starts, row) - 1 for row in rows)
        return list(range(first, last + 1))

    def want(self, needed: list[int], following: list[int]) -> None:
        """Pass on which shards are read next."""
        stored = [dict.fromkeys(one for shard in group for one in self._stored(shard)) for group in (needed, following)]
        self.source.want(*map(list, stored))

    def rest(self) -> None:
        """Pass on that reading ends."""
        self.source.rest()

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> Row:
        """Return sample ``index``; ``documents`` is given when it is packed of several.

        Raises DataError when nothing of it is counted.
        """
        spans = self.pieces(index)
        parts = [trimmed(self.source.row(row)).cut(begin, end) for row, begin, end in spans]
        sizes = [part.input_ids.size for part in parts]
        counted = labels = None
        if any(part.counted is not None for part in parts):
            counted = np.concatenate(
                [np.ones(size, bool) if part.counted is None else part.counted
                 for part, size in zip(parts, sizes, strict=True)]
            )  # fmt: skip
        if any(part.labels is not None for part in parts):
            labels = np.concatenate([part.input_ids if part.labels is None else part.labels for part in parts])
        sample = Row(
            np.concatenate([part.input_ids for part in parts]),
            None if counted is None or counted.all() else counted,
            np.array(sizes) if self._short == "pack" and len(parts) > 1 else None,
            labels,
        )
        if sample.counted is not None or labels is not None:
            refuse_uncounted(sample, f"{self.name(index)}: no token of this sample", "raise --max_context_width")
        return sample

    def name(self, index: int) -> str:
        """Return the names of the rows it is made of joined by ``+``, with ``[begin:end]`` where not whole."""
        return "+".join(
            self.source.name(row) + ("" if begin == 0 and end == self._whole[row] else f"[{begin}:{end}]")
            for row, begin, end in self.pieces(index)
        )


def _refuse_holes(source: Source, tokens: int) -> None:
    """Refuse rows that cannot be packed, where the source knows how many of its tokens are attended."""
    report = source.report()
    if report is None or report.get("attended_tokens", report["counted_tokens"]) == tokens:
        return
    # A staged row cannot be read before its window.
    holed = (source.name(i) for i in range(len(source)) if trimmed(source.row(i)).counted is not None)
    raise DataError(
        f"{'some row' if source.staged else next(holed)}: attention_mask leaves out tokens inside the row, which "
        "cannot be packed with others; use --short pad"
    )


def lay_out(source: Source, seq_len: int, *, long: str, short: str) -> Source:
    """Return ``source`` as samples of ``seq_len`` tokens; itself when a sample is a row."""
    for flag, value, known in (("long", long, LONG), ("short", short, SHORT)):
        if value not in known:
            raise ConfigError(f"--{flag} {value} is not known; use one of {', '.join(known)}")
    if short == "pad" and long != "split":
        return source
    return Layout(source, seq_len, long=long, short=short)
