"""Documents to shards: read in this process, tokenised and written in several, resumed after an interruption.

The output does not depend on the number of processes, nor on how often the work was interrupted: this process packs the
documents in one order, and `PROGRESS` keeps its state behind a shard that is finished, as are all before it.
"""

from __future__ import annotations

import argparse
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from smp_train.data.atomic_file import atomic_file
from smp_train.data.bad_rows import LeftOut, leave_out
from smp_train.data.prepare.packing import Collector, Packer, Position, held_out, numbered
from smp_train.data.prepare.tokenizer import encode, load
from smp_train.data.prepare.writing import Block, write_block
from smp_train.data.text.conversations import Conversations
from smp_train.data.text.fields import Document, Fields, texts_of
from smp_train.data.text.read import TextFile
from smp_train.distributed.host import cores
from smp_train.errors import SmpTrainError
from smp_train.models.hugging_face import load_tokenizer, trust_code

PROGRESS = "_progress.npz"
SPLITS = ("train", "test")
BATCH_CHARACTERS = 1 << 19
"""Characters that are tokenised in one call."""
WORTH_BYTES = 32 << 20
"""Of input; with less, starting processes takes longer than it saves."""
SAVE_SECONDS = 5.0
"""Between two saves of the progress, at least."""

Encoder = Callable[[list[Any]], Sequence[Any]]
"""Returns, of each document, its tokens, uint32, or a row with labels, or why there is none."""

_encoder: list[Encoder] = []


def use_tokenizer(folder: str, fields: Fields, end: int) -> None:
    """Set the tokenizer of this process: that in the folder of a preparation."""
    if fields.answers:
        _encoder[:] = [Conversations(load_tokenizer(folder), fields, end)]
        return
    tokenizer = load(folder)
    # An end token that is spelled out in a document is text like any other.
    tokenizer.encode_special_tokens = True
    _encoder[:] = [partial(encode, tokenizer, end=end)]


def _start(folder: str, fields: Fields, end: int, trusted: bool) -> None:
    """Set a worker process up: it uses one core, and ends when its parent does."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from smp_train.data.conversion import follow_parent

    follow_parent()
    trust_code(trusted)
    use_tokenizer(folder, fields, end)


def _tokenise(documents: list[Any]) -> Sequence[Any]:
    return _encoder[0](documents)


def processes_for(asked: int | None, files: Sequence[TextFile]) -> int:
    """Return the number of processes: as asked, or one for each core when there is enough input."""
    if asked is not None:
        return asked
    known = sum(file.size for file in files)
    enough = known >= WORTH_BYTES or any(file.size == 0 for file in files)
    return cores() if enough else 1


@dataclass
class _Written:
    """A shard that is being written, and the state of the work behind it."""

    split: str
    entry: Future[dict[str, Any]]
    position: Position
    packers: dict[str, Any]


class Preparation:
    """The shards of both splits; continues what an interrupted preparation left in ``output``.

    Args:
        args: flags of the verb.
        output: folder for the shards.
        fields: what the documents are; `use_tokenizer` was called for them.
        vocab_size: of the tokenizer.
        end: the token behind each document.
        left_out: counts malformed documents, which are left out; None: they stop the preparation.
        advance: is called with the numbers of training rows that were written.
    """

    def __init__(
        self, args: argparse.Namespace, output: Path, fields: Fields, vocab_size: int, end: int,
        left_out: LeftOut | None, advance: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.args, self.output, self.left_out, self.advance = args, output, left_out, advance
        self.fields, self.vocab_size, self.end = fields, vocab_size, end
        saved = saved_progress(output)
        self.position = Position(*saved["position"])
        """Of the next document."""
        test_rows = None if args.validation_shards is None else args.validation_shards * args.rows_per_shard
        self.packers: dict[str, Packer | Collector] = {}
        self.shards: dict[str, list[dict[str, Any]]] = {}
        """The finished ones."""
        for split, max_rows in zip(SPLITS, (args.max_rows, test_rows), strict=True):
            (output / split).mkdir(parents=True, exist_ok=True)
            self.shards[split] = saved[split]["shards"]
            most, counts = sys.maxsize if max_rows is None else max_rows, np.zeros(vocab_size, dtype=np.int64)
            self.packers[split] = (
                Collector(args.rows_per_shard, most, counts) if fields.answers
                else Packer(args.seq_len, args.rows_per_shard, most, counts)
            )  # fmt: skip
            if "counts" in saved[split]:
                self.packers[split].restore(saved[split])
        self._numbers = {split: len(shards) for split, shards in self.shards.items()}
        """Of the next shards."""
        self._written: deque[_Written] = deque()
        self._saved = time.monotonic()
        advance(self.packers["train"].rows)

    def run(self, files: Sequence[TextFile], processes: int) -> None:
        """Write all shards. Raises DataError and OSError."""
        # Spawned: the tokenizer's threads do not survive a fork.
        pool: Executor = ThreadPoolExecutor(1) if processes == 1 else ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), _start,
            (str(self.output), self.fields, self.end, bool(self.args.trust_remote_code)),
        )  # fmt: skip
        window = 2 * processes
        train, test = (self.packers[split] for split in SPLITS)
        try:
            for position, at, row in self._tokenised(files, pool, window):
                if self._enough():
                    break
                self.position = position._replace(before=position.before + 1, number=position.number + 1)
                if isinstance(row, str):
                    leave_out(f"{files[position.file].at(at)}: {row}", self.left_out)
                    continue
                # A document goes to one split whole. Once validation is full, the rest is for training.
                to_test = held_out(position.number, self.args.validation_fraction) and not test.full
                if to_test or not train.full:
                    split = "test" if to_test else "train"
                    for block in self.packers[split].add(row):
                        self._write(split, block, pool, window)
            for split in SPLITS:
                for block in self.packers[split].blocks():
                    self._write(split, block, pool, window)
            self._settle(0)
        except BrokenProcessPool:
            raise SmpTrainError(
                "prepare: a process ended, for want of memory perhaps; start again with fewer --processes, "
                "and it goes on"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)

    def _enough(self) -> bool:
        """True when training has its rows, and validation too, or one at least where it has no limit."""
        train, test = (self.packers[split] for split in SPLITS)
        no_limit = self.args.validation_shards is None
        return train.full and (
            not self.args.validation_fraction or test.full or (no_limit and test.available > 0)
        )

    def _tokenised(
        self, files: Sequence[TextFile], pool: Executor, window: int
    ) -> Iterator[tuple[Position, int, Any]]:
        """Yield (position, number in the file, what the tokenizer made of it) of documents from `position` on.

        ``window`` batches are tokenised ahead.
        """
        waiting: deque[tuple[list[tuple[Position, int]], Future[Sequence[Any]]]] = deque()
        places: list[tuple[Position, int]] = []
        found: list[Document] = []
        size = 0
        for position, at, document in numbered(files, self.fields, self.position, self.left_out):
            places.append((position, at))
            found.append(document)
            size += sum(map(len, texts_of(document)))
            if size >= BATCH_CHARACTERS:
                waiting.append((places, pool.submit(_tokenise, found)))
                places, found, size = [], [], 0
                if len(waiting) >= window:
                    yield from _zipped(*waiting.popleft())
        waiting.append((places, pool.submit(_tokenise, found)))
        for done, rows in waiting:
            yield from _zipped(done, rows)

    def _write(self, split: str, block: Block, pool: Executor, window: int) -> None:
        name = f"{split}-{self._numbers[split]:05d}"
        self._numbers[split] += 1
        args, folder = self.args, str(self.output / split)
        entry = pool.submit(write_block, args.output_type, folder, name, block, self.vocab_size, bool(args.zip))
        packers = {split: packer.copy() for split, packer in self.packers.items()}
        self._written.append(_Written(split, entry, self.position, packers))
        self._settle(window)

    def _settle(self, most: int) -> None:
        """Record finished shards, in order; wait until at most ``most`` are unfinished."""
        while self._written and (len(self._written) > most or self._written[0].entry.done()):
            written = self._written.popleft()
            self.shards[written.split].append(written.entry.result())
            if written.split == "train":
                self.advance(self.shards["train"][-1]["rows"])
            if time.monotonic() >= self._saved + SAVE_SECONDS:
                self._save(written)
                self._saved = time.monotonic()

    def _save(self, behind: _Written) -> None:
        """Save the state behind a finished shard, for the run after an interruption."""
        meta: dict[str, Any] = {"position": behind.position}
        arrays: dict[str, Any] = {}
        for split, packer in behind.packers.items():
            numbers, of_split = packer.saved()
            meta[split] = {**numbers, "shards": self.shards[split]}
            arrays |= {f"{split}_{name}": values for name, values in of_split.items()}
        with atomic_file(str(self.output / PROGRESS)) as file:
            np.savez(file, meta=np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8), **arrays)


def _zipped(
    places: list[tuple[Position, int]], rows: Future[Sequence[Any]]
) -> Iterator[tuple[Position, int, Any]]:
    for (position, at), row in zip(places, rows.result(), strict=True):
        yield position, at, row


def saved_progress(output: Path) -> dict[str, Any]:
    """Return what an interrupted run saved; the beginning where that is nothing, or its shards are damaged."""
    try:
        with np.load(output / PROGRESS) as file:
            saved: dict[str, Any] = json.loads(file["meta"].tobytes())
            for name in file.files:
                split, _, of_split = name.partition("_")
                if of_split:
                    saved[split][of_split] = file[name]
        if all(is_whole(output / split, saved[split]["shards"]) for split in SPLITS):
            return saved
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass
    return {"position": Position(), **{split: {"shards": []} for split in SPLITS}}


def is_whole(folder: Path, shards: list[dict[str, Any]]) -> bool:
    """True when all shards are there, as large as they were written."""
    paths = [folder / one["name"] for one in shards]
    return all(path.is_file() and path.stat().st_size == one["bytes"] for path, one in zip(paths, shards, strict=True))
