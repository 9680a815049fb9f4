"""Gaps: where rows carry no loss. They are kept in the index, so that samples without loss are found unread.

A gap is a run of tokens of which none is a target, between the first and the last attended token of its row, as
(row, begin, end), counted from that first token. Gaps do not depend on the context length.
"""

from __future__ import annotations

import numpy as np

NO_GAPS = np.empty((0, 3), dtype=np.int64)


def row_gaps(targets: np.ndarray, attended: np.ndarray | None, starts: np.ndarray) -> np.ndarray:
    """Return the gaps of rows that lie end to end, int64 [gaps, 3], in order.

    A row whose only target is its first attended token, after padding, has no target left when the padding is removed.
    Its gap is (row, 0, size - 1): longer than the row without padding, and than any context that truncates the row.

    Args:
        targets: bool [tokens].
        attended: bool [tokens]; None when all are.
        starts: int64 [rows + 1], where each row begins, and the last ends.
    """
    begins, sizes = starts[:-1], np.diff(starts)
    lengths, gap = sizes, ~targets
    if attended is not None:
        begins, lengths = attended_spans(attended, starts)
        edges = np.zeros(targets.size + 1, dtype=np.int8)
        edges[begins[lengths > 0]] += 1
        edges[(begins + lengths)[lengths > 0]] -= 1
        gap &= np.cumsum(edges[:-1], dtype=np.int8) > 0
    row_edge = np.zeros(targets.size + 1, dtype=bool)
    row_edge[starts] = True
    first = np.flatnonzero(gap & (row_edge[:-1] | ~np.concatenate([[False], gap[:-1]])))
    last = np.flatnonzero(gap & (row_edge[1:] | ~np.concatenate([gap[1:], [False]])))
    rows = np.searchsorted(starts, first, side="right") - 1
    gaps = np.stack([rows, first - begins[rows], last + 1 - begins[rows]], axis=1).astype(np.int64)
    lost = np.union1d(np.flatnonzero(lengths < 2), without_target(gaps, lengths))
    if not lost.size:
        return gaps
    behind_padding = np.stack([lost, np.zeros_like(lost), sizes[lost] - 1], axis=1)
    gaps = np.concatenate([gaps[~np.isin(gaps[:, 0], lost)], behind_padding])
    return gaps[np.argsort(gaps[:, 0], kind="stable")]


def attended_spans(attended: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each row, the index of its first attended token and the number of tokens to its last; 0 if none."""
    places = np.flatnonzero(attended)
    low, high = np.searchsorted(places, starts[:-1]), np.searchsorted(places, starts[1:])
    some = high > low
    begins, lengths = starts[:-1].copy(), np.zeros(starts.size - 1, dtype=np.int64)
    begins[some] = places[low[some]]
    lengths[some] = places[high[some] - 1] - begins[some] + 1
    return begins, lengths


def without_target(gaps: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the rows without a target after their first token, given all rows' lengths without padding."""
    rows, begin, end = gaps.T
    return np.unique(rows[(begin <= 1) & (end >= lengths[rows])])


def latest(gaps: np.ndarray) -> int:
    """Return the largest index that the first target of a row has; contexts above it leave a target in every row."""
    early = gaps[gaps[:, 1] <= 1]
    return int(max(1, early[:, 2].max(initial=1)))


def empty_pieces(gaps: np.ndarray, sizes: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (row, piece) of the pieces of ``seq_len`` tokens without target; a row's last may be shorter.

    Args:
        gaps: of rows without padding.
        sizes: tokens of each row that are split into pieces; a last piece of one token is dropped.
        seq_len: tokens of a piece. Its first token is no target, as none is before it.
    """
    rows, begin, end = gaps.T
    last_piece = np.maximum(0, (sizes[rows] - 2) // seq_len)
    first = np.maximum(0, -((1 - begin) // seq_len))
    last = np.where(end >= sizes[rows], last_piece, end // seq_len - 1)
    counts = np.maximum(0, last - first + 1)
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    single = np.flatnonzero(sizes < 2)
    found_rows = np.concatenate([np.repeat(rows, counts), single])
    pieces = np.concatenate([np.repeat(first, counts) + within, np.zeros_like(single)])
    found = np.unique(np.stack([found_rows, pieces]), axis=1)
    return found[0], found[1]
