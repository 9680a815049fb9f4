"""Training on streams of records: nothing on disk, the first step at once, exactly once per epoch, exact resume.

Position p of the run is sample p // V of virtual stream p % V, on any number of ranks. A checkpoint keeps the positions
consumed and the cursor of each stream, which the ranks put together when they save.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from smp_train import distributed
from smp_train.data.bad_records import BadRecords
from smp_train.data.batch import Batch, collate
from smp_train.data.files import FileSet
from smp_train.data.loader import Loader, change_data, refuse_changed
from smp_train.data.rows import Recipe
from smp_train.data.samples import Sample
from smp_train.data.source import Row, Source
from smp_train.data.stream import BadShare, Cursor, FilePart, Reading, Stream, assign_parts, stream_count
from smp_train.data.tokenizer import spread_tokenizing
from smp_train.errors import ConfigError, DataError

if TYPE_CHECKING:
    from smp_train.arguments import Arguments

logger = logging.getLogger("smp_train.data")

STATE_VERSION = 2
OPENED_TOGETHER = 8
"""Streams that are opened at the same time: each reads the beginning of a file."""
CHECKED_STREAMS = 4
"""Streams per rank whose first block is checked before the model is built."""
COSTLY_READING = 1.5
"""Ranks that read each record, on average, above which a warning names the cost."""

Dealing = Callable[[np.ndarray], np.ndarray]
"""Maps the positions of one step to the data-parallel ranks that train on them."""


class _Step(NamedTuple):
    batches: list[Batch]
    consumed: int
    cursors: dict[int, tuple[int, Cursor]]
    """(samples taken, cursor) after this step, by stream; of the streams that this rank reads."""
    exhausted: bool


class StreamedData(Loader):
    """The samples of V virtual streams, for data-parallel ranks.

    Args:
        reading: how records become samples.
        merge: returns the largest of each number over all ranks; collective. Default: this rank is alone.
        streams: V; by default a function of the files. A resumed run keeps the V of its checkpoint.
        share: as in `Loader`.
    """

    def __init__(
        self, reading: Reading, *, merge: Callable[[Sequence[int]], list[int]] = list, streams: int | None = None,
        **share: Any,
    ) -> None:  # fmt: skip
        super().__init__(**share)
        self.reading, self._merge = reading, merge
        self.fingerprint = fingerprint(reading)
        files = [file for file_set in reading.sources for file in file_set.files]
        self._begin(0, [Cursor()] * (streams or stream_count(files)))

    def _begin(self, consumed: int, cursors: list[Cursor]) -> None:
        self.streams, self._consumed = len(cursors), consumed
        self._cursors = {v: (self._samples_taken(v, consumed), cursor) for v, cursor in enumerate(cursors)}
        self._before = consumed, self._cursors
        """State before the step handed over last: saved when another rank has no data for that step."""
        self._opened: set[int] = set()
        self._choose_dealing()
        parts = assign_parts(self.reading.sources, self.streams)
        self._open = {v: Stream(v, parts[v], self.reading, *self._cursors[v][::-1]) for v in self.streams_read()}
        epochs = self.reading.epochs
        self.exhausted = epochs is not None and all(cursor.epoch >= epochs for cursor in cursors)

    def _samples_taken(self, stream: int, consumed: int) -> int:
        """Return how many of the first ``consumed`` positions belong to a stream."""
        return (consumed - stream + self.streams - 1) // self.streams

    # Which rank reads which position

    def positions(self, consumed: int) -> np.ndarray:
        """Return this rank's positions of one step, int64 [accumulation, micro_batch]."""
        step = consumed + np.arange(self.global_batch)
        return step[self._dealing(step) == self.dp_rank].reshape(self.accumulation, self.micro_batch)

    def _choose_dealing(self) -> None:
        """Choose the dealing with which the fewest (stream, rank) pairs read.

        Each rank that reads a stream makes the rows of all its records, also of those that other ranks train on.
        """
        dealings = self._by_micro_batch, self._by_turn, self._by_stream
        self._dealing = min(dealings, key=lambda dealing: len(self._reading_pairs(dealing)))
        self._pairs = self._reading_pairs(self._dealing)

    def _by_micro_batch(self, positions: np.ndarray) -> np.ndarray:
        return (positions - positions[0]) // self.micro_batch % self.dp_size

    def _by_turn(self, positions: np.ndarray) -> np.ndarray:
        return positions % self.dp_size

    def _by_stream(self, positions: np.ndarray) -> np.ndarray:
        ranks = np.empty_like(positions)
        ranks[np.argsort(positions % self.streams, kind="stable")] = np.arange(positions.size)
        return ranks // (positions.size // self.dp_size)

    def _reading_pairs(self, dealing: Dealing) -> np.ndarray:
        """Return stream * dp_size + rank for each stream and each rank that reads it in the course of the run."""
        pairs = []
        # After so many steps a step begins at the same stream again.
        for step in range(self.streams // gcd(self.streams, self.global_batch)):
            positions = self._consumed + step * self.global_batch + np.arange(self.global_batch)
            pairs.append(positions % self.streams * self.dp_size + dealing(positions))
        return np.unique(np.concatenate(pairs))

    def streams_read(self) -> list[int]:
        """Return the streams that this rank reads."""
        streams, ranks = np.divmod(self._pairs, self.dp_size)
        return [int(v) for v in streams[ranks == self.dp_rank]]

    @property
    def readers(self) -> float:
        """Return how many ranks read each record, on average over the streams."""
        return self._pairs.size / self.streams

    # Reading

    def check(self) -> None:
        """Read the first block of the streams that this rank reads first. Raises DataError."""
        first = list(dict.fromkeys((self.positions(self._consumed) % self.streams).ravel().tolist()))[:CHECKED_STREAMS]
        with ThreadPoolExecutor(OPENED_TOGETHER, thread_name_prefix="smp-train-streams") as pool:
            list(pool.map(lambda v: self._open[v].open(), first))
        for v in first:
            self._open[v].check()
        self._opened = set(first)

    def _steps(self, consumed: int) -> Iterator[_Step]:
        if consumed != self._consumed:
            raise ValueError(f"the streams are at sample {self._consumed}, not {consumed}")
        self._use_device()
        streams = self._open
        pool = ThreadPoolExecutor(OPENED_TOGETHER, thread_name_prefix="smp-train-streams")
        try:
            opening = {v: pool.submit(streams[v].open) for v in streams if v not in self._opened}
            while True:
                batches = []
                for micro_batch in self.positions(consumed).tolist():
                    samples = [s for p in micro_batch if (s := self._take(p, opening)) is not None]
                    batches.append(collate(samples, self.seq_len, size=self.micro_batch, pin_memory=self.pin_memory))
                consumed += self.global_batch
                exhausted = self._exhausted(consumed, opening)
                yield _Step(batches, consumed, {v: (streams[v].samples, streams[v].cursor) for v in streams}, exhausted)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _take(self, position: int, opening: dict[int, Future[None]]) -> Sample | None:
        """Return the sample at a position; None if its stream has ended."""
        return self._move(position % self.streams, position // self.streams, opening).take()

    def _move(self, v: int, sample: int, opening: dict[int, Future[None]]) -> Stream:
        """Move one of this rank's streams to a sample, and return the stream."""
        if v in opening:
            opening.pop(v).result()
        self._open[v].skip_to(sample)
        return self._open[v]

    def _exhausted(self, consumed: int, opening: dict[int, Future[None]]) -> bool:
        """Return whether no stream of this rank has a sample after position ``consumed``."""
        if self.reading.epochs is None:
            return False
        return all(self._move(v, self._samples_taken(v, consumed), opening).ended for v in self._open)

    def _hand_over(self, step: _Step) -> list[Batch]:
        self._before = self._consumed, self._cursors
        self._consumed, self._cursors = step.consumed, self._cursors | step.cursors
        self.exhausted = step.exhausted
        return step.batches

    # State

    def _identity(self) -> dict[str, Any]:
        how = self.reading
        return {
            "seed": how.seed,
            "shuffle": "global" if how.shuffled else "none",
            "layout": f"streams, --short {how.short} --long {how.long} --max_context_width {self.seq_len}",
            "fingerprint": self.fingerprint,
        }

    def state(self, consumed: int) -> dict[str, Any]:
        """Return the positions consumed, the cursors and the identity of the data; collective.

        ``consumed`` is a position at which the step handed over last begins or ends.
        """
        known = dict([self._before, (self._consumed, self._cursors)])
        if consumed not in known:
            raise ValueError(f"the streams are at sample {self._consumed}, not {consumed}")
        rows: list[int] = []
        for v in range(self.streams):
            samples, cursor = known[consumed][v]
            # The rank that took a stream's last sample knows its cursor; other ranks contribute zeros.
            rows += [1, *cursor] if samples == self._samples_taken(v, consumed) else [0] * (1 + len(cursor))
        merged = np.array(self._merge(rows), dtype=np.int64).reshape(self.streams, -1)
        if not merged[:, 0].all():
            raise RuntimeError(f"no rank knows the cursor of stream {int(merged[:, 0].argmin())}")
        cursors = merged[:, 1:].tolist()
        return {"version": STATE_VERSION, "consumed": consumed, **self._identity(), "cursors": cursors}

    def check_state(self, state: dict[str, Any], *, allow_data_change: bool = False) -> int:
        """Take up a saved state and its streams, and return its ``consumed``. Not collective.

        Raises DataError where the state would mean other samples; ``allow_data_change`` continues at the same cursors
        of other files, with a warning.
        """
        cursors = state.get("cursors")
        if state.get("version") != STATE_VERSION or cursors is None:
            raise DataError(
                "the training data changed: the checkpoint is of indexed data, not of streams; use the data and "
                "--streaming of the run so far, or start a new run from its weights (--finetune 1)"
            )
        now = self._identity()
        for key, flag in (("seed", "--seed"), ("shuffle", "--shuffle"), ("layout", "the layout of samples")):
            refuse_changed(flag, state[key], now[key])
        if state["fingerprint"] != self.fingerprint:
            changed = (
                f"the training data changed: files or tokenizer {state['fingerprint']} in the checkpoint, "
                f"{self.fingerprint} now"
            )
            then = "continuing at the same cursors; records may come twice or not at all"
            change_data(changed, then, allowed=allow_data_change)
        self._begin(int(state["consumed"]), [Cursor(*cursor) for cursor in cursors])
        return self._consumed


def fingerprint(reading: Reading) -> str:
    """Return the identity of streamed data: recipes, and names, sizes and remote versions of the files."""
    digest = hashlib.blake2b(digest_size=16)
    for file_set, maker in zip(reading.sources, reading.makers, strict=True):
        digest.update(f"{maker.identity}\n".encode())
        for file in file_set.files:
            # A local file's version is its modification time, which a copy of the data does not share.
            digest.update(f"{file.name}\0{file.size}\0{file.version if file.remote else ''}\n".encode())
    return digest.hexdigest()


def open_streams(
    args: Arguments, sources: Sequence[tuple[FileSet, Recipe]], *, short: str, long: str, seq_len: int, dp_rank: int,
    dp_size: int, local_ranks: int, pin_memory: bool = False,
) -> StreamedData:  # fmt: skip
    """Return the streams of a run, after a check of their first records. Collective.

    Args:
        args: the flags of the run.
        sources: the files of each source, and how their records become rows.
        short: --short, or its default for these sources.
        long: --long, or its default.
        seq_len: tokens of a sample.
        dp_rank: this rank among the data-parallel ranks.
        dp_size: data-parallel ranks.
        local_ranks: ranks on this node, which share its cores.
        pin_memory: make batches in page-locked memory.
    """
    spread_tokenizing(local_ranks)
    with distributed.together("opening the streams"):
        reading = _reading(args, sources, short, long, seq_len, epochs=args.epochs, with_names=args.data_audit)
        training = StreamedData(
            reading, merge=distributed.largest, seq_len=seq_len, dp_rank=dp_rank, dp_size=dp_size,
            micro_batch=args.train_batch_size, accumulation=args.gradient_accumulation_steps, pin_memory=pin_memory,
        )  # fmt: skip
        training.check()
    logger.info(
        "Streaming %d files in %d streams; each record is read by %.2f ranks on average",
        sum(len(file_set.files) for file_set, _ in sources), training.streams, training.readers,
    )  # fmt: skip
    if training.readers > COSTLY_READING:
        logger.warning(
            "%d data-parallel ranks do not divide %d streams: ranks make the rows of each record %.1f times; use a "
            "number of ranks that divides %d, or --streaming 0", dp_size, training.streams, training.readers,
            training.streams,
        )  # fmt: skip
    return training


def _reading(
    args: Arguments, sources: Sequence[tuple[FileSet, Recipe]], short: str, long: str, seq_len: int, **how: Any
) -> Reading:
    for file_set, _ in sources:
        if any(file.kind == "tokens" for file in file_set.files):
            raise ConfigError(f"{file_set.location}: holds prepared tokens, which are not streamed; use --streaming 0")
    skip = args.bad_rows == "skip"
    return Reading(
        [file_set for file_set, _ in sources], [recipe.open() for _, recipe in sources], seq_len, seed=args.seed,
        short=short, long=long, bad_share=BadShare(BadRecords(skip), args.max_bad if skip else None),
        **{"shuffled": args.shuffle != "none", **how},
    )  # fmt: skip


class FirstSamples(Source):
    """The first samples of some records in stored order, in memory: for validation."""

    def __init__(self, reading: Reading, most: int) -> None:
        parts = [
            FilePart(file, source, 0, 1) for source, file_set in enumerate(reading.sources) for file in file_set.files
        ]
        stream = Stream(0, parts, reading)
        self.samples: list[Sample] = []
        while len(self.samples) < most and (sample := stream.take()) is not None:
            if sample.row.has_target():
                self.samples.append(sample)
        self.fingerprint = fingerprint(reading)

    def __len__(self) -> int:
        return len(self.samples)

    def row(self, index: int) -> Row:
        """Return the row of a sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.samples[index].row

    def name(self, index: int) -> str:
        """Return the name of a sample."""
        return self.samples[index].name


def first_samples(
    args: Arguments, sources: Sequence[tuple[FileSet, Recipe]], *, short: str, long: str, seq_len: int, most: int
) -> FirstSamples:  # fmt: skip
    """Return the first ``most`` samples in stored order, never packed. Not collective. Raises DataError."""
    short = "pad" if short == "pack" else short
    samples = FirstSamples(_reading(args, sources, short, long, seq_len, shuffled=False, epochs=1), most)
    if not len(samples):
        raise DataError(f"{sources[0][0].location}: holds no record to validate on")
    return samples
