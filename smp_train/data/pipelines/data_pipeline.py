"""What the training loop reads: micro-batches of one global order, and the state that resumes it.

A user's own data set is a `Source`: subclass it (docs/data.md shows one in 20 lines), and everything here
holds for it, exactly-once and resume included.

The invariant, from which all guarantees follow: the run is one sequence of positions 0, 1, 2, ...; position p is the
row that `Order` computes, and `Loader` decides which positions a rank reads in a step. Ranks, micro-batch, accumulation
and prefetching decide only who reads what, so the whole state is the number of positions consumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from smp_train.data.blend import BlendOrder
from smp_train.data.layout import LONG
from smp_train.data.order import Order, read_shuffle
from smp_train.data.pipelines.batch import Batch, collate, collate_filled, crop
from smp_train.data.pipelines.loader import Loader, change_data, refuse_changed
from smp_train.data.source import ONE_ROW, Row, Source, shards
from smp_train.errors import ConfigError, DataError

__all__ = ["Batch", "Loader", "Order", "Row", "Source", "TrainingData", "ValidationData", "collate"]

STATE_VERSION = 1
FILLER = -1
"""The row of a position behind the last epoch."""
DATA_KEYS = {
    "layout": "samples are made by", "blend": "blend", "size": "samples", "fingerprint": "fingerprint",
    "long": "--long", "seq_len": "--max_context_width",
}
"""Fields of a state, besides seed and shuffle, that decide which sample is at a position; their names in messages."""


class TrainingData(Loader):
    """The rows of a source for data-parallel ranks, in one order for the whole run.

    Tensor- and context-parallel peers pass the same ``dp_rank`` and read the same rows. Epochs straddle
    batches: nothing is dropped at the end of one. The last batch of the last epoch is filled up with rows that do not
    count.

    Args:
        source: the data set.
        order: which row comes at which position; made for this source's length.
        long: of rows longer than seq_len the beginning is taken (``truncate``), a window drawn anew in every
            epoch (``crop``), or they are refused (``error``); ``split`` is for a source of shorter rows (`lay_out`).
        named: fill in `Batch.samples`; a quarter of the time of a batch goes into that.
        epochs: the run ends after so many; None: without end.
        share: as in `Loader`.
    """

    def __init__(
        self, source: Source, order: Order | BlendOrder, *, long: str = "truncate", named: bool = True,
        epochs: int | None = None, **share: Any,
    ) -> None:
        if order.size != len(source):
            raise ConfigError(f"the order is of {order.size} rows, but the data set has {len(source)}")
        super().__init__(**share)
        self.source, self.order, self.named = source, order, named
        self.rows_in_epoch = len(source)
        self.end = None if epochs is None else epochs * len(source)
        self.long = _checked_long(long, source, self.seq_len)
        self._fills = True
        self._windowed = read_shuffle(order.shuffle) > 0

    def sizes(self) -> dict[str, int]:
        """Return how many samples there are: of each source of a blend, or, under ``""``, of all."""
        return self.order.sizes() if isinstance(self.order, BlendOrder) else super().sizes()

    def _before_step(self, consumed: int) -> None:
        if self._windowed:
            self.source.want(*self.order.ahead(consumed, consumed + self.step_samples(consumed) - 1))

    def _after_steps(self) -> None:
        if self._windowed:
            self.source.rest()

    def step(self, consumed: int) -> list[Batch]:
        """Read this rank's micro-batches of the step that starts at ``consumed``."""
        return self._read(*self._rows(self.positions(consumed)))

    def names(self, consumed: int) -> list[list[str]]:
        """See `Loader.names`; without the window of --long crop."""
        rows = self._rows(self.positions(consumed))[1].tolist()
        return [[self.source.name(row) for row in batch if row != FILLER] for batch in rows]

    def _rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, rows) at some positions; rows are `FILLER` behind the last epoch."""
        epochs, rows = self.order.rows(positions)
        return epochs, rows if self.end is None else np.where(positions < self.end, rows, FILLER)

    def _read(self, epochs: np.ndarray, rows: np.ndarray) -> list[Batch]:
        return [self._batch(*found) for found in zip(epochs.tolist(), rows.tolist(), strict=True)]

    def _batch(self, epochs: list[int], indices: list[int]) -> Batch:
        if indices[-1] == FILLER:
            indices = indices[: indices.index(FILLER)]
        elif self._fills:
            tensor = torch.empty(len(indices), self.seq_len, dtype=torch.int64, pin_memory=self.pin_memory)
            # Where one batch has rows of other lengths, or with masks, others will too.
            self._fills = self.source.fill(indices, tensor.numpy())
            if self._fills:
                names = [self.source.name(index) if self.named else "" for index in indices]
                return Batch(tensor, tensor, None, names)
        rows = [self.source.row(index) for index in indices]
        if not self.named and self.long != "crop":
            try:
                return self._collate(rows, [""] * len(rows))
            except DataError:
                pass  # again, with names: the message needs one
        keys = (f"{self.order.seed} {epoch} {index}" for epoch, index in zip(epochs, indices, strict=False))
        return self._collate(*_cropped(self.source, rows, indices, keys, self))

    def _collate(self, rows: list[Row], names: list[str]) -> Batch:
        return collate_filled(rows, names, self.micro_batch, self.seq_len, long=self.long, pin_memory=self.pin_memory)

    def _steps(self, consumed: int) -> Iterator[list[Batch]]:
        # The order is worked out for many steps at once: NumPy costs more by the call than by the row. Few at first,
        # so that the first batch does not wait.
        rows_of_step = self.micro_batch * self.accumulation
        many, most = max(1, 256 // rows_of_step), max(1, 4096 // rows_of_step)
        self._on_device()
        while self.end is None or consumed < self.end:
            if self.end is not None:
                many = min(many, -(-(self.end - consumed) // self.global_batch))
            later = np.arange(many, dtype=np.int64)[:, None, None] * self.global_batch
            for step in zip(*self._rows(self.positions(consumed) + later), strict=True):
                yield self._read(*step)
            consumed += many * self.global_batch
            many = min(4 * many, most)

    def state(self, consumed: int) -> dict[str, Any]:
        """Return what a checkpoint keeps: the positions consumed, and what they are positions of.

        The same on every rank. ``consumed`` is advanced by the trainer, after the optimizer step.
        """
        return {
            "version": STATE_VERSION, "consumed": consumed, **self.order.identity(), "layout": self.source.layout,
            "fingerprint": self.source.fingerprint, "seq_len": self.seq_len, "long": self.long,
        }

    def _cuts(self, *seq_lens: Any) -> bool:
        """Return whether a row may be longer than one of ``seq_lens``: not where those are refused, or known."""
        report = self.source.report()
        return self.long in ("truncate", "crop") and (report is None or report["longest"] > min(seq_lens))

    def check_state(self, state: dict[str, Any], *, allow_data_change: bool = False) -> int:
        """Return ``consumed`` of a saved state; DataError names what would make it mean other samples.

        Batch sizes and ranks may change: they do not decide which sample is at a position. So may seq_len where it
        truncates no row, neither now nor before. ``allow_data_change`` resumes at the same position of other data, with
        a warning.
        """
        if state.get("version") != STATE_VERSION:
            raise DataError(
                f"the checkpoint's data state has version {state.get('version')}, this program reads "
                f"{STATE_VERSION}; resume with the version that wrote it"
            )
        now = self.state(0)
        for key in ("seed", "shuffle"):
            refuse_changed(f"--{key}", state[key], now[key])
        for key, what in DATA_KEYS.items():
            before, after = state.get(key, ONE_ROW if key == "layout" else None), now.get(key)
            if before != after and (key != "seq_len" or self._cuts(before, after)):
                changed = f"the training data changed: {what} {before} in the checkpoint, {after} now"
                then = (
                    f"going on at sample {state['consumed']} of the new order; in this epoch, rows may come twice or "
                    "not at all"
                )
                change_data(changed, then, allowed=allow_data_change)
                break
        return int(state["consumed"])


class ValidationData:
    """The same rows in stored order at every evaluation, and as many batches on one rank as on another.

    The last batches are filled up with rows of which no label is counted, so a token-weighted mean over all
    ranks is over each row once.

    Args:
        source: the data set.
        seq_len, micro_batch, dp_rank, dp_size, pin_memory: as in `Loader`.
        max_batches: at most so many batches per rank; None for all.
        fast: the last shard that has samples only (--fast_validation).
        long: as in `TrainingData`; a crop is the same at every evaluation.
    """

    def __init__(
        self, source: Source, *, seq_len: int, micro_batch: int, dp_rank: int, dp_size: int,
        max_batches: int | None = None, fast: bool = False, long: str = "truncate", pin_memory: bool = False,
    ) -> None:
        if len(source) < 1:
            raise DataError("the validation data has no row; give --test_dir a folder with at least one shard")
        self.source, self.seq_len, self.micro_batch = source, seq_len, micro_batch
        self.dp_rank, self.dp_size, self.pin_memory = dp_rank, dp_size, pin_memory
        self.long = _checked_long(long, source, seq_len)
        # A shard may have no sample of its own, when its rows went into one that began in the shard before.
        self.rows = [rows for rows in shards(source) if rows][-1] if fast else range(len(source))
        batches = -(-len(self.rows) // (micro_batch * dp_size))
        self._batches = batches if max_batches is None else min(batches, max_batches)

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return self._batches

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's batches: batch b is of rows (b * dp_size + dp_rank) * micro_batch + i."""
        for number in range(self._batches):
            first = (number * self.dp_size + self.dp_rank) * self.micro_batch
            indices = list(self.rows[first : first + self.micro_batch])
            rows = [self.source.row(index) for index in indices]
            found = _cropped(self.source, rows, indices, (f"validation {index}" for index in indices), self)
            yield collate_filled(*found, self.micro_batch, self.seq_len, long=self.long, pin_memory=self.pin_memory)


def _cropped(
    source: Source, rows: list[Row], indices: list[int], keys: Iterable[str], data: TrainingData | ValidationData
) -> tuple[list[Row], list[str]]:
    """Return the rows and their names; of --long crop windows of them, each drawn by its key."""
    names = [source.name(index) for index in indices]
    if data.long != "crop" or not rows:
        return rows, names
    rows, names = zip(*map(crop, rows, names, [data.seq_len] * len(rows), keys), strict=True)
    return list(rows), list(names)


def _checked_long(long: str, source: Source, seq_len: int) -> str:
    """Refuse at the start, not in mid-run, rows that are too long, where the source knows its longest."""
    if long not in LONG:
        raise ConfigError(f"--long {long} is not known; use one of {', '.join(LONG)}")
    report = source.report()
    if long == "error" and report is not None and report["longest"] > seq_len:
        raise DataError(
            f"{report['longest_at']}: row of {report['longest']} tokens is longer than the {seq_len} of "
            "--max_context_width; use --long split or truncate, or prepare shorter rows"
        )
    return long
