"""Samples with nothing to learn at this context length: found before the first step, refused or left out."""

from __future__ import annotations

import hashlib

import numpy as np

from smp_train.data import bad_rows
from smp_train.data.layout import Layout
from smp_train.data.source import Row, Source, View, shards
from smp_train.data.targets import without_target


class Kept(View):
    """A source without the rows ``left_out`` (their numbers, rising); the others keep their order."""

    def __init__(self, source: Source, left_out: np.ndarray) -> None:
        self.source = source
        self._left_out = left_out
        # For each row left out, the number of kept rows before it: memory grows with the former alone.
        self._kept_before = left_out - np.arange(left_out.size)
        self.fingerprint = hashlib.blake2b(
            source.fingerprint.encode() + left_out.astype("<i8").tobytes(), digest_size=16
        ).hexdigest()
        starts = [rows.start - int(np.searchsorted(left_out, rows.start)) for rows in shards(source)]
        self.shards = [range(a, b) for a, b in zip(starts, [*starts[1:], len(self)], strict=True)]
        self.layout = source.layout

    def _number(self, index: int) -> int:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return index + int(np.searchsorted(self._kept_before, index, side="right"))

    def __len__(self) -> int:
        return len(self.source) - self._left_out.size

    def row(self, index: int) -> Row:
        """Return a kept row."""
        return self.source.row(self._number(index))

    def name(self, index: int) -> str:
        """Return its name in the source."""
        return self.source.name(self._number(index))

    def fill(self, indices: list[int], into: np.ndarray) -> bool:
        """Read kept rows, as the source does."""
        return self.source.fill([self._number(index) for index in indices], into)


def leave_out_unlearnable(source: Source, seq_len: int, *, long: str, max_bad: float | None, place: str = "") -> Source:
    """Return the source without the samples that have no target within ``seq_len`` tokens.

    Masks, labels and lengths decide, which the source knows without reading rows; a source that does not know them is
    returned as it is. ``max_bad`` is the fraction of samples that may be left out (--bad_rows skip), never all; None
    tolerates none. ``place`` is where messages say that the samples are. Raises DataError.
    """
    left_out = source.unlearnable() if isinstance(source, Layout) else _rows_without_target(source, seq_len, long)
    if not left_out.size:
        return source
    cut = not isinstance(source, Layout) and long == "truncate"
    what = f"none of its first {seq_len} tokens" if cut else "no token of this sample"
    then = "raise --max_context_width" + (", or leave it out by --bad_rows skip" if max_bad is None else "")
    name = source.name(int(left_out[0]))
    bad_rows.judge(
        [(f"{place}: {name}" if place else name, left_out.size, f" {what} is counted: nothing to learn; {then}")],
        len(source) - left_out.size,
        None if left_out.size == len(source) else max_bad,
        what=("samples", "have nothing to learn"),
    )
    return Kept(source, left_out)


def _rows_without_target(source: Source, seq_len: int, long: str) -> np.ndarray:
    found = [np.empty(0, dtype=np.int64)]
    if long in ("truncate", "crop"):
        for shard, rows in enumerate(shards(source)):
            gaps = source.gaps(shard, seq_len if long == "truncate" else 0)
            if gaps.size:
                # A window is drawn where there is a target; only a row without any has no such place.
                ends = np.full(len(rows), seq_len) if long == "truncate" else source.lengths(shard)
                found.append(rows.start + without_target(gaps, ends))
    return np.concatenate(found)
