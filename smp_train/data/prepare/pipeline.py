"""Documents to shards: read in this process, tokenised and written in several, resumed after an interruption.

The output does not depend on the number of processes, nor on how often the work was interrupted: this process packs the
documents in one order, and a shard counts as done when all before it are done too (`PROGRESS`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from smp_train.data.atomic_file import atomic_file
from smp_train.data.bad_rows import LeftOut
from smp_train.data.prepare.documents import Place, held_out, numbered
from smp_train.data.prepare.shards import Done, Packer
from smp_train.data.prepare.tokenizer import encode, load
from smp_train.data.prepare.writing import write_block
from smp_train.data.text.files import TextFile
from smp_train.errors import DataError, SmpTrainError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROGRESS = "_progress.json"
SPLITS = ("train", "test")
BATCH_CHARACTERS = 1 << 19
WORTH_BYTES = 32 << 20
"""Of input; with less, starting processes takes longer than it saves."""
SAVE_SECONDS = 5.0
"""Between two saves of the progress, at least."""


@dataclass(frozen=True)
class Job:
    """What is to be written, and how."""

    output: Path
    kind: str
    seq_len: int
    rows_per_shard: int
    max_rows: dict[str, int | None]
    vocab_size: int
    zipped: bool
    end: int
    validation_fraction: float
    column: str
    left_out: LeftOut | None = None
    """Counts malformed documents, which are left out; None: they stop the preparation."""


class _Here(Executor):
    """Runs each call at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


_tokenizer: list[Tokenizer] = []


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """Set the tokenizer of this process."""
    # An end token that is spelled out in a document is text like any other.
    tokenizer.encode_special_tokens = True
    _tokenizer[:] = [tokenizer]


def _start(path: str) -> None:
    """Set a worker process up: it uses one core, and ends when its parent does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from smp_train.data.conversion import follow_parent

    follow_parent()
    use_tokenizer(load(path))


def _tokenise(texts: list[str], end: int) -> list[np.ndarray]:
    return encode(_tokenizer[0], texts, end)


def processes_for(asked: int | None, files: Sequence[TextFile]) -> int:
    """Return the number of processes: as asked, or one for each core when there is enough input."""
    if asked is not None:
        return asked
    known = sum(file.size for file in files)
    enough = known >= WORTH_BYTES or any(file.size == 0 for file in files)
    return len(os.sched_getaffinity(0)) if enough else 1


def run(job: Job, files: Sequence[TextFile], processes: int, advance: Callable[[int], None]) -> dict[str, Packer]:
    """Write all shards; return the packers, with their totals, and the shards under ``packer.begin.shards``.

    Continues after the shards of an interrupted run that `PROGRESS` lists. Raises DataError.
    """
    work = _Work(job, advance)
    if processes == 1:
        work.fill(_Here(), files, window=1)
    else:
        # Spawned: the tokenizer's threads do not survive a fork.
        with ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), _start, (str(job.output / "tokenizer.json"),)
        ) as pool:
            try:
                work.fill(pool, files, window=2 * processes)
            except BrokenProcessPool:
                raise SmpTrainError(
                    "prepare: a process ended, for want of memory perhaps; start again with fewer --processes, "
                    "and it goes on"
                ) from None
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return work.packers


class _Work:
    def __init__(self, job: Job, advance: Callable[[int], None]) -> None:
        self.job = job
        self.advance = advance
        self.done = read_progress(job.output)
        self.written: deque[tuple[str, Done, Future[dict[str, Any]]]] = deque()
        self.saved = time.monotonic()
        self.pool: Executor = _Here()
        self.window = 1
        self.count = {split: len(self.done[split].shards) for split in SPLITS}
        self.packers = {}
        for split in SPLITS:
            (job.output / split).mkdir(parents=True, exist_ok=True)
            self.packers[split] = Packer(
                lambda block, done, split=split: self._emit(split, block, done),  # type: ignore[misc]
                seq_len=job.seq_len, rows_per_shard=job.rows_per_shard, max_rows=job.max_rows[split],
                vocab_size=job.vocab_size, done=self.done[split],
            )  # fmt: skip
        advance(self.done["train"].rows)

    def _emit(self, split: str, block: np.ndarray, done: Done) -> None:
        name = f"{split}-{self.count[split]:05d}"
        self.count[split] += 1
        job = self.job
        folder = str(job.output / split)
        future = self.pool.submit(write_block, job.kind, folder, name, block, job.vocab_size, job.zipped)
        self.written.append((split, done, future))
        self._settle(self.window)

    def _settle(self, most: int) -> None:
        """Record finished shards, in order; wait until at most ``most`` are unfinished."""
        while self.written and (len(self.written) > most or self.written[0][2].done()):
            split, done, future = self.written.popleft()
            done.shards = [*self.done[split].shards, future.result()]
            self.done[split] = done
            if split == "train":
                self.advance(done.shards[-1]["rows"])
            if time.monotonic() >= self.saved + SAVE_SECONDS:
                write_progress(self.job.output, self.done)
                self.saved = time.monotonic()

    def fill(self, pool: Executor, files: Sequence[TextFile], window: int) -> None:
        self.pool, self.window = pool, window
        job, train, test = self.job, self.packers["train"], self.packers["test"]
        waiting: deque[tuple[list[Place], Future[list[np.ndarray]]]] = deque()
        for places, texts in self._batches(files):
            waiting.append((places, pool.submit(_tokenise, texts, job.end)))
            if len(waiting) >= window:
                self._pack(*waiting.popleft())
            if train.full and (test.full or job.max_rows["test"] is None or not job.validation_fraction):
                break
        while waiting:
            self._pack(*waiting.popleft())
        train.finish()
        test.finish()
        self._settle(0)
        for split in SPLITS:
            self.packers[split].begin = self.done[split]

    def _batches(self, files: Sequence[TextFile]) -> Iterator[tuple[list[Place], list[str]]]:
        """Yield the documents that are in no shard yet, in lots that are tokenised in one call."""
        begin = {split: self.done[split].place for split in SPLITS}
        places: list[Place] = []
        texts: list[str] = []
        size = 0
        for place, text in numbered(files, self.job.column, min(begin.values()), self.job.left_out):
            split = "test" if held_out(place.number, self.job.validation_fraction) else "train"
            if place.number < begin[split].number:
                continue
            places.append(place)
            texts.append(text)
            size += len(text)
            if size >= BATCH_CHARACTERS:
                yield places, texts
                places, texts, size = [], [], 0
        yield places, texts

    def _pack(self, places: list[Place], tokens: Future[list[np.ndarray]]) -> None:
        for place, ids in zip(places, tokens.result(), strict=True):
            self._add(place, ids)

    def _add(self, place: Place, ids: np.ndarray) -> None:
        train, test = self.packers["train"], self.packers["test"]
        packer = train
        if held_out(place.number, self.job.validation_fraction):
            # A document goes to one split whole. Once validation is full, the rest is for training.
            packer = test if _was_taken(test, place) or not test.full else train
        if place.number >= packer.begin.place.number and (_was_taken(packer, place) or not packer.full):
            packer.add(place, ids)


def _was_taken(packer: Packer, place: Place) -> bool:
    """True when an interrupted run gave a document to this split: it is done, or partly done."""
    begin = packer.begin
    return place.number < begin.place.number or (place == begin.place and begin.offset > 0)


def read_progress(output: Path) -> dict[str, Done]:
    """Return what is done of each split; nothing where a shard is not as it was written."""
    found = {split: Done() for split in SPLITS}
    try:
        for split, entry in json.loads((output / PROGRESS).read_text()).items():
            done = Done(**{**entry, "place": Place(*entry["place"])})
            for shard in done.shards:
                if (output / split / shard["name"]).stat().st_size != shard["bytes"]:
                    return {split: Done() for split in SPLITS}
            found[split] = done
    except (OSError, ValueError, TypeError, KeyError):
        return {split: Done() for split in SPLITS}
    return found


def write_progress(output: Path, done: dict[str, Done]) -> None:
    """Save what is done, for the run after an interruption."""
    try:
        with atomic_file(str(output / PROGRESS)) as file:
            file.write(json.dumps({split: asdict(one) for split, one in done.items()}).encode())
    except OSError as error:
        raise DataError(f"{output}: cannot be written ({error.strerror}); free some space and start again") from None
