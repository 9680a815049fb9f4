"""The ranks of a run in one process, and the names of their samples."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from smp_train.data.stream import BEGIN, Reading
from smp_train.data.streamed import StreamedData


def streamed_ranks(reading: Reading, streams: int, dp_size: int, **share) -> list[StreamedData]:
    """Return the ranks of a run that reads a few records in more streams than it would by itself."""
    ranks = [StreamedData(reading, dp_rank=rank, dp_size=dp_size, **share) for rank in range(dp_size)]
    for rank in ranks:
        rank.restore_state({**rank.state(0), "cursors": [BEGIN] * streams})
    return ranks


def state_of(ranks, consumed: int) -> dict:
    """Return the state that all ranks agree on, after they have exchanged what each knows."""
    parts: list[list[int]] = []
    for rank in ranks:
        rank._merge = lambda rows: parts.append(list(rows)) or [1] * len(rows)
        rank.state(consumed)
    together = np.max(np.array(parts), axis=0).tolist() if parts else []
    for rank in ranks:
        rank._merge = lambda rows: together
    states = [rank.state(consumed) for rank in ranks]
    assert all(state == states[0] for state in states)
    return json.loads(json.dumps(states[0]))


def positions_of(ranks, iterators, consumed: int) -> list[tuple[str, list[int]]]:
    """Return (name, tokens) of the samples of one global batch in the order of their positions, without fillers."""
    samples: dict[int, tuple[str, list[int]]] = {}
    for rank, iterator in zip(ranks, iterators, strict=True):
        for positions, batch in zip(rank.positions(consumed), next(iterator), strict=True):
            rows = zip(batch.samples, batch.input_ids.tolist(), strict=True)
            samples |= dict(zip(positions.tolist(), rows, strict=True))
    assert sorted(samples) == list(range(consumed, consumed + ranks[0].global_batch))
    return [samples[position] for position in sorted(samples) if samples[position][0]]


def spans_of(name: str) -> Iterator[tuple[str, int, int | None]]:
    """Yield (record, begin, end or None for a whole record) of the tokens in the name of a sample."""
    for part in filter(None, name.split("+")):
        record, _, span = part.partition("[")
        begin, _, end = span.rstrip("]").partition(":")
        yield record.partition("@")[0], int(begin or 0), int(end) if end else None
