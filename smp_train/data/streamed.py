"""Trains on streams of records, without a cache on disk or a conversion: each record once per epoch, exact resume.

Position p of the run is sample p // V of virtual stream p % V, on any number of ranks. A checkpoint keeps the number of
positions consumed and the cursor of each stream; the ranks merge their cursors when they save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from math import gcd
from typing import Any

import numpy as np

from smp_train.data.batch import Batch, collate
from smp_train.data.loader import Loader
from smp_train.data.samples import Sample
from smp_train.data.source import Row, Source, digest_of
from smp_train.data.stream import BEGIN, Cursor, FilePart, Reading, Stream, assign_parts, stream_count
from smp_train.errors import DataError

OPENED_TOGETHER = 8
"""Number of streams that are opened at the same time: each reads the beginning of a file."""
CHECKED_STREAMS = 4
"""Number of streams per rank whose first block is checked before the model is built."""

Step = tuple[list[Batch], int, dict[int, tuple[int, Cursor]], bool]
"""(batches of a step, positions consumed after the step, (samples, cursor) by stream, whether nothing is left)."""


class StreamedData(Loader):
    """The samples of V virtual streams, for data-parallel ranks.

    ``merge`` returns the elementwise maximum over all ranks of a list of numbers; the default is for a single rank. V
    is a function of the files; a resumed run keeps the V of its checkpoint.
    """

    kind = "streamed"

    def __init__(self, reading: Reading, *, merge: Callable[[Sequence[int]], list[int]] = list, **share: Any) -> None:
        super().__init__(**share)
        self.reading, self._merge = reading, merge
        self.fingerprint = fingerprint(reading)
        files = [file for file_set in reading.sources for file in file_set.files]
        self._begin(0, [BEGIN] * stream_count(files))

    def _begin(self, consumed: int, cursors: list[Cursor]) -> None:
        self.streams, self._consumed = len(cursors), consumed
        self._cursors = {v: (self._samples(v, consumed), cursor) for v, cursor in enumerate(cursors)}
        # State to save if no rank trains on the step that was yielded last, because another rank has no data for it.
        self._before = consumed, self._cursors
        self._deal = min((self._by_turn, self._by_stream), key=lambda deal: self._readers(deal).size)
        """Maps positions of a step to ranks: `_by_turn` or `_by_stream`, whichever makes ranks read fewer streams."""
        stream, rank = np.divmod(self._readers(self._deal), self.dp_size)
        self.readers = stream.size / self.streams
        """Average number of ranks that read a record. A rank makes the rows of all records in the streams it reads."""
        self._numbers = stream[rank == self.dp_rank].tolist()
        self._open: dict[int, Stream] = {}  # streams that `check` has made and `_steps` has not used yet
        epochs = self.reading.epochs
        self.exhausted = epochs is not None and all(cursor.epoch >= epochs for cursor in cursors)

    def _samples(self, stream: int, consumed: int) -> int:
        """Return how many of the first ``consumed`` positions belong to a stream."""
        return (consumed - stream + self.streams - 1) // self.streams

    def positions(self, consumed: int) -> np.ndarray:
        """Return this rank's positions of one step, int64 [accumulation, micro_batch]."""
        step = consumed + np.arange(self.global_batch)
        return step[self._deal(step) == self.dp_rank].reshape(self.accumulation, self.micro_batch)

    def _by_turn(self, step: np.ndarray) -> np.ndarray:
        """Return the rank of each position; ranks take turns. If dp_size divides V, each reads V / dp_size streams."""
        return step % self.dp_size

    def _by_stream(self, step: np.ndarray) -> np.ndarray:
        """Return the rank of each position: the positions, sorted by stream, are divided evenly among the ranks."""
        ranks = np.empty_like(step)
        ranks[np.argsort(step % self.streams, kind="stable")] = np.arange(step.size)
        return ranks // (step.size // self.dp_size)

    def _readers(self, deal: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return ``stream * dp_size + rank`` for every pair of a stream and a rank that reads it."""
        # After ``starts.size`` steps, a step begins at the same stream again, so no new (stream, rank) pairs appear.
        starts = self._consumed + np.arange(self.streams // gcd(self.streams, self.global_batch)) * self.global_batch
        steps = [start + np.arange(self.global_batch) for start in starts]
        return np.unique([step % self.streams * self.dp_size + deal(step) for step in steps])

    def _new_streams(self) -> dict[int, Stream]:
        """Return new `Stream` objects of this rank's streams, at the step that will be handed over next."""
        parts = assign_parts(self.reading.sources, self.streams)
        return {v: Stream(v, parts[v], self.reading, *self._cursors[v]) for v in self._numbers}

    def check(self) -> None:
        """Check the first block of the streams that this rank reads first. Raises DataError."""
        self._open = self._new_streams()
        numbers = dict.fromkeys((self.positions(self._consumed) % self.streams).ravel().tolist())
        streams = [self._open[v] for v in numbers][:CHECKED_STREAMS]
        with ThreadPoolExecutor(OPENED_TOGETHER) as pool:
            for stream in streams:
                stream.open(pool)
        for stream in streams:
            stream.check()

    def _steps(self, consumed: int) -> Iterator[Step]:
        if consumed != self._consumed:
            raise ValueError(f"the streams are at sample {self._consumed}, not {consumed}")
        self._use_device()
        # Make new streams: streams of an earlier call may be ahead of the steps that were handed over.
        streams, self._open = self._open or self._new_streams(), {}
        pool = ThreadPoolExecutor(OPENED_TOGETHER, thread_name_prefix="smp-train-streams")
        try:
            for stream in streams.values():
                stream.open(pool)
            while True:
                batches = []
                for positions in self.positions(consumed).tolist():
                    samples = [streams[p % self.streams].skip_to(p // self.streams).take() for p in positions]
                    present = [sample for sample in samples if sample is not None]
                    batches.append(collate(present, self.seq_len, size=self.micro_batch, pin_memory=self.pin_memory))
                consumed += self.global_batch
                exhausted = False
                if self.reading.epochs is not None:
                    # Advance all streams to the end of the step: ranks that share a stream must agree on its cursor.
                    ended = [stream.skip_to(self._samples(v, consumed)).ended for v, stream in streams.items()]
                    exhausted = all(ended)
                yield batches, consumed, {v: (s.samples, s.cursor) for v, s in streams.items()}, exhausted
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _hand_over(self, step: Step) -> list[Batch]:
        self._before = self._consumed, self._cursors
        batches, self._consumed, cursors, self.exhausted = step
        self._cursors = self._cursors | cursors
        return batches

    def skip_to(self, consumed: int) -> None:
        """See `Loader.skip_to`; reads the records in between again, so that `state` knows the cursors there."""
        streams = {v: stream.skip_to(self._samples(v, consumed)) for v, stream in self._new_streams().items()}
        ended = [stream.ended for stream in streams.values()]
        self.exhausted = self.reading.epochs is not None and all(ended)
        self._consumed, self._open = consumed, {}
        self._cursors = self._cursors | {v: (stream.samples, stream.cursor) for v, stream in streams.items()}
        self._before = consumed, self._cursors

    def identity(self) -> dict[str, Any]:
        """See `Loader.identity`."""
        how = self.reading
        layout = f"streams, --short {how.short} --long {how.long} --max_context_width {self.seq_len}"
        shuffle = "global" if how.shuffled else "none"
        return {"seed": how.seed, "shuffle": shuffle, "layout": layout, "fingerprint": self.fingerprint}

    def state(self, consumed: int) -> dict[str, Any]:
        """See `Loader.state`; ``consumed`` is a position at which the step handed over last begins or ends."""
        known = dict([self._before, (self._consumed, self._cursors)])
        if consumed not in known:
            raise ValueError(f"the streams are at sample {self._consumed}, not {consumed}")
        rows: list[int] = []
        for v, (samples, cursor) in sorted(known[consumed].items()):
            # The rank that took a stream's last sample knows its cursor; other ranks contribute zeros.
            rows += [1, *cursor] if samples == self._samples(v, consumed) else [0] * (1 + len(cursor))
        merged = np.array(self._merge(rows), dtype=np.int64).reshape(self.streams, -1)
        if not merged[:, 0].all():
            raise RuntimeError(f"no rank knows the cursor of stream {int(merged[:, 0].argmin())}")
        return {**super().state(consumed), "cursors": merged[:, 1:].tolist()}

    def restore_state(self, state: dict[str, Any], *, allow_data_change: bool = False) -> int:
        """See `Loader.restore_state`; ``allow_data_change`` continues other files at the same cursors."""
        consumed = super().restore_state(state, allow_data_change=allow_data_change)
        self._begin(consumed, [Cursor(*cursor) for cursor in state["cursors"]])
        return consumed


def fingerprint(reading: Reading) -> str:
    """Return a digest of the recipes of streamed data, and of the names, sizes and remote versions of its files."""
    # A local file's version is its modification time, and a copy of the data has another modification time.
    files = (
        [(file.name, file.size, file.version if file.remote else "") for file in file_set.files]
        for file_set in reading.sources
    )
    return digest_of([maker.identity for maker in reading.makers], *files)


@dataclass
class _SamplesInMemory(Source):
    """Samples for validation, as rows of a source."""

    samples: list[Sample]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.samples)

    def row(self, index: int) -> Row:
        return self.samples[index].row

    def name(self, index: int) -> str:
        return self.samples[index].name


def first_samples(reading: Reading, most: int) -> Source:
    """Return the first ``most`` samples of the first source, in its stored order. Raises DataError."""
    (files,) = reading.sources
    stream = Stream(0, [FilePart(file, 0, 0, 1) for file in files.files], reading)
    samples = list(islice((sample for sample in iter(stream.take, None) if sample.row.has_target()), most))
    if not samples:
        raise DataError(f"{files.location}: holds no record to validate on")
    return _SamplesInMemory(samples, fingerprint(reading))
