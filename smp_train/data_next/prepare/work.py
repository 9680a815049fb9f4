"""Records to shards: read in this process, tokenized and written in several, resumed after an interruption.

The shards depend neither on the number of processes nor on interruptions: this process collects the rows in the order
of the records, and `PROGRESS` keeps the state after the shards that are finished.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data_next.atomic_file import atomic_file
from smp_train.data_next.bad_records import BadRecords
from smp_train.data_next.convert import end_with_parent
from smp_train.data_next.files import DataFile
from smp_train.data_next.prepare.splits import Position, Split, is_held_out
from smp_train.data_next.prepare.writing import write_shard
from smp_train.data_next.problem import Problem
from smp_train.data_next.readers import Record, records
from smp_train.data_next.rows import Recipe, RowMaker, size_of
from smp_train.data_next.source import Row
from smp_train.distributed.host import cores
from smp_train.errors import SmpTrainError

PROGRESS = "_progress.npz"
SPLITS = ("train", "test")
BATCH_BYTES = 1 << 19
"""Size of the records that are tokenized in one call."""
WORTH_BYTES = 32 << 20
"""With less input, starting processes takes longer than it saves."""
SAVE_SECONDS = 5.0
"""Least time between two saves of the progress."""

Made = Row | Problem | None
_maker: list[RowMaker] = []
"""The row maker of this process."""


def _start(recipe: Recipe) -> None:
    """Prepare a worker process: it uses one core, and ends with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    end_with_parent()
    _maker[:] = [recipe.open()]


def _make_rows(batch: list[Record]) -> list[Made]:
    return _maker[0].rows(batch)


def processes_for(asked: int | None, files: Sequence[DataFile]) -> int:
    """Return the number of processes: as asked, or one per core when there is enough input."""
    if asked is not None:
        return asked
    enough = sum(file.size for file in files) >= WORTH_BYTES or any(not file.size for file in files)
    return cores() if enough else 1


@dataclass
class _Unfinished:
    """A shard that is being written, and the state of all splits after it."""

    split: str
    entry: Future[dict[str, Any]]
    states: dict[str, dict[str, Any]]


class Preparation:
    """The shards of both splits; continues what an interrupted preparation left in ``output``.

    Args:
        output: folder of the shards, one below it for each split.
        files: the input, in order.
        recipe: how records become rows.
        splits: the empty splits, by name.
        fraction: share of the records that is held out for ``test``.
        output_type: ``shards`` or ``cache``.
        zipped: gzip the shards.
        bad: malformed records, which stop the preparation or are left out.
        advance: called with the number of training rows written.
    """

    def __init__(
        self, output: Path, files: Sequence[DataFile], recipe: Recipe, splits: dict[str, Split], *, fraction: float,
        output_type: str, zipped: bool, bad: BadRecords, advance: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.output, self.files, self.recipe, self.splits = output, files, recipe, splits
        self.fraction, self.output_type, self.zipped = fraction, output_type, zipped
        self.bad, self.advance = bad, advance
        self.train, self.test = (splits[name] for name in SPLITS)
        for name, state in saved_progress(output).items():
            splits[name].restore(state)
        for name in SPLITS:
            (output / name).mkdir(parents=True, exist_ok=True)
        self._numbers = {name: len(split.shards) for name, split in splits.items()}
        """Numbers of the next shards."""
        self._unfinished: deque[_Unfinished] = deque()
        self._saved = time.monotonic()
        advance(self.train.rows)

    def run(self, processes: int) -> None:
        """Write all shards. Raises DataError and OSError."""
        window = 2 * processes
        with self._pool(processes) as pool:
            try:
                for position, file, number, row in self._rows(pool, window):
                    if self._enough():
                        break
                    if isinstance(row, Problem):
                        self.bad.add(file, number, row)
                    elif row is not None:
                        self._add(position, file, row, pool, window)
                for name, split in self.splits.items():
                    for block in split.blocks():
                        self._write(name, block, pool, window)
                self._settle(0)
            except BrokenProcessPool:
                raise SmpTrainError(
                    "prepare: a process ended, perhaps for lack of memory; start again with fewer --processes, and it "
                    "continues"
                ) from None
            finally:
                pool.shutdown(cancel_futures=True)

    def _pool(self, processes: int) -> Executor:
        if processes == 1:
            _maker[:] = [self.recipe.open()]
            return ThreadPoolExecutor(1)
        # Spawned: the tokenizer's threads do not survive a fork.
        context = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(processes, context, _start, (self.recipe,))

    def _add(self, position: Position, file: DataFile, row: Row, pool: Executor, window: int) -> None:
        """Add a row to its split. Once validation is full, held-out records go to training."""
        held_out = is_held_out(file.name, position.record, self.fraction) and self.test.accepts(position)
        name = "test" if held_out else "train"
        for block in self.splits[name].add(position, row):
            self._write(name, block, pool, window)

    def _enough(self) -> bool:
        """Return whether training has its rows, and validation too: all, or one if it has no limit."""
        unlimited = self.test.max_rows == sys.maxsize
        tested = not self.fraction or self.test.full or (unlimited and self.test.available > 0)
        return self.train.full and tested

    def _rows(self, pool: Executor, window: int) -> Iterator[tuple[Position, DataFile, int, Made]]:
        """Yield (position, file, number, row) of all records that are not in shards, in order.

        ``window`` batches are tokenized ahead.
        """
        waiting: deque[tuple[list[tuple[Position, DataFile, int]], Future[list[Made]]]] = deque()
        positions: list[tuple[Position, DataFile, int]] = []
        batch: list[Record] = []
        size = 0
        for position, number, record in self._records():
            positions.append((position, self.files[position.file], number))
            batch.append(record)
            size += size_of(record)
            if size >= BATCH_BYTES:
                waiting.append((positions, pool.submit(_make_rows, batch)))
                positions, batch, size = [], [], 0
                if len(waiting) >= window:
                    yield from _zipped(*waiting.popleft())
        waiting.append((positions, pool.submit(_make_rows, batch)))
        while waiting:
            yield from _zipped(*waiting.popleft())

    def _records(self) -> Iterator[tuple[Position, int, Record]]:
        """Yield (position, number, record) from the first record on that is not in shards."""
        begin = min((split.begin for split in self.splits.values() if split.rows < split.max_rows), default=Position())
        for file in range(begin.file, len(self.files)):
            first = begin.record if file == begin.file else 0
            for index, number, record in records(self.files[file], self.recipe.kind.fields, first=first):
                yield Position(file, index), number, record

    def _write(self, name: str, block: list[Row], pool: Executor, window: int) -> None:
        shard = f"{name}-{self._numbers[name]:05d}"
        self._numbers[name] += 1
        folder, vocab_size = str(self.output / name), self.train.counts.size
        entry = pool.submit(write_shard, self.output_type, folder, shard, block, vocab_size, self.zipped)
        states = {split: self.splits[split].state() for split in SPLITS}
        self._unfinished.append(_Unfinished(name, entry, states))
        self._settle(window)

    def _settle(self, most: int) -> None:
        """Record finished shards, in order; wait until at most ``most`` are unfinished."""
        while self._unfinished and (len(self._unfinished) > most or self._unfinished[0].entry.done()):
            shard = self._unfinished.popleft()
            self.splits[shard.split].shards.append(shard.entry.result())
            if shard.split == "train":
                self.advance(self.train.shards[-1]["rows"])
            if time.monotonic() >= self._saved + SAVE_SECONDS:
                self._save(shard.states)
                self._saved = time.monotonic()

    def _save(self, states: dict[str, dict[str, Any]]) -> None:
        meta = {name: {**state, "counts": None, "shards": self.splits[name].shards} for name, state in states.items()}
        counts = {name: state["counts"] for name, state in states.items()}
        with atomic_file(str(self.output / PROGRESS)) as file:
            np.savez(file, meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), **counts)


def _zipped(
    positions: list[tuple[Position, DataFile, int]], rows: Future[list[Made]]
) -> Iterator[tuple[Position, DataFile, int, Made]]:
    for (position, file, number), row in zip(positions, rows.result(), strict=True):
        yield position, file, number, row


def saved_progress(output: Path) -> dict[str, dict[str, Any]]:
    """Return the state that an interrupted preparation saved, by split; empty where a shard is damaged."""
    try:
        with np.load(output / PROGRESS) as file:
            states: dict[str, dict[str, Any]] = json.loads(file["meta"].tobytes())
            for name in SPLITS:
                states[name]["counts"] = file[name]
        if all(is_whole(output / name, states[name]["shards"]) for name in SPLITS):
            return states
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass
    return {}


def is_whole(folder: Path, shards: list[dict[str, Any]]) -> bool:
    """Return whether all shards are there, as large as they were written."""
    paths = [folder / shard["name"] for shard in shards]
    return all(
        path.is_file() and path.stat().st_size == shard["bytes"] for path, shard in zip(paths, shards, strict=True)
    )
