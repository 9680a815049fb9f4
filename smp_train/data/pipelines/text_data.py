"""Training and validation data of text that is tokenised on the fly.

Position p of the run is the (p // V)-th sample of virtual stream p % V: the same on any number of ranks. The state is
the positions consumed and a cursor of five numbers for each stream, which the ranks merge when they save.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from smp_train.data.pipelines.batch import Batch, collate
from smp_train.data.pipelines.loader import Loader, change_data, refuse_changed
from smp_train.data.source import Row, Source
from smp_train.data.text.read import TextFile, documents
from smp_train.data.text.stream import Cursor, Reading, Sample, Stream, assign_pieces, span, stream_count
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

STATE_VERSION = 1
OPENED_TOGETHER = 8
"""Streams that are opened at a time: after a resume each reads part of a file again."""
TOGETHER_IN_ORDER = 32
"""Validation documents that are tokenised in one call."""


class _Step(NamedTuple):
    batches: list[Batch]
    consumed: int
    cursors: dict[int, tuple[int, Cursor]]
    """Of the streams that this rank read from: samples taken, and their position after this step."""


class TextData(Loader):
    """The samples of V virtual streams of text, distributed over data-parallel ranks.

    Args:
        files: the data.
        reading: how it is tokenised.
        identity: what else decides which tokens are read: digest of the tokenizer.
        merge: returns the largest of each number over all ranks; collective. Default: this rank is alone.
        streams: V, by default a function of the files alone. A resumed run keeps those of its checkpoint.
        share: as in `Loader`.
    """

    def __init__(
        self, files: Sequence[TextFile], reading: Reading, *, identity: str,
        merge: Callable[[Sequence[int]], list[int]] = list, streams: int | None = None, **share: Any,
    ) -> None:
        super().__init__(**share)
        self.files, self.reading, self._merge = list(files), reading, merge
        self.fingerprint = fingerprint(files, reading, identity)
        self._begin(0, [Cursor()] * (streams or stream_count(files)))

    def _begin(self, consumed: int, cursors: list[Cursor]) -> None:
        self.streams, self._at = len(cursors), consumed
        self._cursors = {v: (self._taken(v, consumed), cursor) for v, cursor in enumerate(cursors)}
        self._before = consumed, self._cursors
        """State before the last step that was handed over: saved when another rank has no data for that step."""

    def _taken(self, stream: int, consumed: int) -> int:
        """Return how many of the first ``consumed`` positions are of a stream."""
        return (consumed - stream + self.streams - 1) // self.streams

    def touched(self) -> list[int]:
        """Return the streams that this rank reads from: all of them where global micro-batches do not divide V."""
        step = np.arange(self.streams)[:, None, None] * self.global_batch
        return [int(v) for v in np.unique((self.positions(self._at) + step) % self.streams)]

    def _steps(self, consumed: int) -> Iterator[_Step]:
        if consumed != self._at:
            raise ValueError(f"the streams are at sample {self._at}, not {consumed}")
        self._on_device()
        pieces = assign_pieces(self.files, self.streams)
        mine = {}
        for v in self.touched():
            taken, cursor = self._cursors[v]
            mine[v] = Stream(v, pieces[v], self.reading, cursor, taken)
        pool = ThreadPoolExecutor(OPENED_TOGETHER, thread_name_prefix="smp-train-text")
        try:
            opening: dict[int, Future[None]] = {v: pool.submit(stream.open) for v, stream in mine.items()}
            if consumed == 0:
                # A stream without a document stops the run before its first step, not in the middle of the run.
                for v in mine:
                    opening.pop(v).result()
            while True:
                batches, read = [], {}
                for micro in self.positions(consumed).tolist():
                    found = []
                    for position in micro:
                        stream = read[position % self.streams] = mine[position % self.streams]
                        if stream.number in opening:
                            opening.pop(stream.number).result()
                        stream.skip_to(position // self.streams)
                        found.append(stream.take())
                    rows, names = [sample.row for sample in found], [sample.name for sample in found]
                    batch = collate(rows, names, self.seq_len, pin_memory=self.pin_memory)
                    batch.truncated = sum(sample.truncated for sample in found)
                    batches.append(batch)
                consumed += self.global_batch
                yield _Step(batches, consumed, {v: (stream.taken, stream.cursor) for v, stream in read.items()})
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _hand_over(self, step: _Step) -> list[Batch]:
        self._before = self._at, self._cursors
        self._at, self._cursors = step.consumed, self._cursors | step.cursors
        return step.batches

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.reading.seed,
            "shuffle": "global" if self.reading.shuffled else "none",
            "layout": self._layout(),
            "fingerprint": self.fingerprint,
        }

    def _layout(self) -> str:
        how = self.reading
        if how.conversations is None:
            return f"text tokenised on the fly, --max_context_width {self.seq_len}"
        short = "pack" if how.packed else "pad"
        return f"{how.fields.kind} on the fly, --short {short} --long {how.long} --max_context_width {self.seq_len}"

    def state(self, consumed: int) -> dict[str, Any]:
        """Return what a checkpoint keeps; collective.

        ``consumed`` is a position at which the last step that was handed over begins or ends.
        """
        known = dict([self._before, (self._at, self._cursors)])
        if consumed not in known:
            raise ValueError(f"the streams are at sample {self._at}, not {consumed}")
        rows = []
        for v in range(self.streams):
            taken, cursor = known[consumed][v]
            # The rank that took a stream's last sample knows its cursor; the others contribute zeros.
            knows = taken == self._taken(v, consumed)
            rows += [1, *cursor] if knows else [0] * (1 + len(cursor))
        merged = np.array(self._merge(rows), dtype=np.int64).reshape(self.streams, -1)
        if not merged[:, 0].all():
            raise RuntimeError(f"no rank knows the cursor of stream {int(merged[:, 0].argmin())}")
        cursors = merged[:, 1:].tolist()
        return {"version": STATE_VERSION, "consumed": consumed, **self._identity(), "cursors": cursors}

    def check_state(self, state: dict[str, Any], *, allow_data_change: bool = False) -> int:
        """Take over a saved state and its streams; DataError names what would make it mean other samples.

        ``allow_data_change`` resumes at the same positions of other files, with a warning.
        """
        cursors = state.get("cursors")
        if state.get("version") != STATE_VERSION or cursors is None:
            raise DataError(
                "the training data changed: the checkpoint is of shards, not of streamed text; give what the run "
                "began with, or start a new run from its weights (--finetune 1)"
            )
        now = self._identity()
        for key, flag in (("seed", "--seed"), ("shuffle", "--shuffle"), ("layout", "the training data")):
            refuse_changed(flag, state[key], now[key])
        if state["fingerprint"] != self.fingerprint:
            changed = (
                f"the training data changed: files or tokenizer {state['fingerprint']} in the checkpoint, "
                f"{self.fingerprint} now"
            )
            then = "going on at the same places; documents may come twice or not at all"
            change_data(changed, then, allowed=allow_data_change)
        self._begin(int(state["consumed"]), [Cursor(*cursor) for cursor in cursors])
        return self._at


def fingerprint(files: Sequence[TextFile], reading: Reading, identity: str) -> str:
    """Return the identity of streamed data: names and sizes of files (of S3 and the hub, versions), and tokenizer."""
    digest = hashlib.blake2b(f"{identity} {reading.end} {','.join(reading.fields.names)}\n".encode(), digest_size=16)
    for file in files:
        digest.update(f"{file.name} {file.size} {file.version if file.remote else ''}\n".encode())
    return digest.hexdigest()


class TextRows(Source):
    """The first samples of some text, in stored order, in memory: what streamed runs validate on.

    Args:
        files: the data.
        reading: how it is tokenised; never shuffled.
        most: samples at most.
    """

    def __init__(self, files: Sequence[TextFile], reading: Reading, most: int) -> None:
        self.fingerprint = fingerprint(files, reading, "validation")
        # A last sample of one token has none to predict.
        samples = (sample for sample in _in_order(files, reading) if sample.row.input_ids.size > 1)
        self._samples = list(islice(samples, most))

    def __len__(self) -> int:
        return len(self._samples)

    def row(self, index: int) -> Row:
        """Return one sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self._samples[index].row

    def name(self, index: int) -> str:
        """Return the documents it is of."""
        return self._samples[index].name


def _in_order(files: Sequence[TextFile], reading: Reading) -> Iterator[Sample]:
    """Yield samples of ``seq_len`` tokens, and a last one of fewer; of conversations, each as one."""
    parts: list[np.ndarray] = []
    names: list[str] = []
    room = reading.seq_len
    for name, row in rows_in_order(files, reading):
        ids, begin = row.input_ids, 0
        if reading.conversations is not None:
            size = min(ids.size, room)
            yield Sample(row.cut(0, size), span(name, 0, size))
            continue
        while begin < ids.size:
            parts.append(ids[begin : begin + room])
            end = begin + parts[-1].size
            names.append(span(name, begin, end))
            begin, room = end, room - parts[-1].size
            if not room:
                yield Sample(Row(np.concatenate(parts)), "+".join(names))
                parts, names, room = [], [], reading.seq_len
    if parts:
        yield Sample(Row(np.concatenate(parts)), "+".join(names))


def rows_in_order(files: Sequence[TextFile], reading: Reading) -> Iterator[tuple[str, Row]]:
    """Yield (name, row) of documents, in stored order; a text has its end token behind it. Raises DataError."""
    for file in sorted(files, key=lambda file: (file.name, file.shard)):
        coming = documents(file, reading.fields, left_out=reading.left_out)
        while group := list(islice(coming, TOGETHER_IN_ORDER)):
            rows = reading.rows([(file, number, document) for number, document in group])
            for (number, _), row in zip(group, rows, strict=True):
                if row is not None:
                    yield f"{file.name}:{number}", row
