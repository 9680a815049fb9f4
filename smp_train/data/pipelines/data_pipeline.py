"""What the training loop reads: micro-batches dealt out of one global order, and the state that resumes it.

A user's own data set is a `Source`: subclass it (docs/data.md shows one in 20 lines), and everything here
holds for it, exactly-once and resume included.

The invariant, from which all guarantees follow: the run is one sequence of positions 0, 1, 2, ...; position
p is the row `Order` says; optimizer step k of a run that has consumed c positions takes [c, c +
global_batch), micro-batch j of data-parallel rank r takes c + j * micro_batch * dp_size + r * micro_batch +
i. Ranks, micro-batch, accumulation and prefetching say only who reads what, so the whole state is c.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from smp_train.data.blend import BlendOrder
from smp_train.data.layout import LONG, lay_out
from smp_train.data.order import Order, read_shuffle
from smp_train.data.pipelines.batch import Batch, collate, collate_filled, crop
from smp_train.data.pipelines.loader import Loader, change_data, refuse_changed
from smp_train.data.source import Row, Source, nothing, shards
from smp_train.errors import ConfigError, DataError

__all__ = ["Batch", "Loader", "Order", "Row", "Source", "TrainingData", "ValidationData", "collate", "lay_out"]

logger = logging.getLogger("smp_train.data")

STATE_VERSION = 1
ONE_ROW = "a sample is a row"
FILLER = -1
"""In place of the number of a row: none, the run has no sample left."""
DATA_KEYS = {
    "layout": "samples are made by", "blend": "blend", "size": "samples", "fingerprint": "fingerprint",
    "long": "--long", "seq_len": "--max_context_width",
}  # fmt: skip
"""What in a state says which sample is at a position, apart from seed and shuffle; with what messages call it."""


class TrainingData(Loader):
    """Deals the rows of a source out to data-parallel ranks, in one order for the whole run.

    Tensor- and context-parallel peers pass the same ``dp_rank`` and read the same rows. Epochs straddle
    batches: nothing is dropped at the end of one. The last batch of the last epoch is filled up with rows that do not
    count.

    Args:
        source: the data set.
        order: which row comes at which position; made for this source's length.
        seq_len: tokens per row of every batch.
        micro_batch: rows per batch of one rank.
        accumulation: batches per optimizer step of one rank.
        dp_rank: this rank among the data-parallel ones.
        dp_size: data-parallel ranks.
        prefetch: optimizer steps to read ahead, in a thread; 0 reads when asked.
        long: of rows longer than seq_len the beginning is taken (``truncate``), a window drawn anew in every
            epoch (``crop``), or they are refused (``error``); ``split`` is for a source of shorter rows (`lay_out`).
        pin_memory: make batches in page-locked memory, for copies to a GPU that overlap with computing.
        named: fill in `Batch.samples`; a quarter of the time of a batch goes into that.
        epochs: samples of so many epochs are dealt out; None: without end.
    """

    def __init__(
        self,
        source: Source,
        order: Order | BlendOrder,
        *,
        seq_len: int,
        micro_batch: int,
        accumulation: int,
        dp_rank: int,
        dp_size: int,
        prefetch: int = 4,
        long: str = "truncate",
        pin_memory: bool = False,
        named: bool = True,
        epochs: int | None = None,
    ) -> None:
        if order.size != len(source):
            raise ConfigError(f"the order is of {order.size} rows, but the data set has {len(source)}")
        super().__init__(
            seq_len=seq_len, micro_batch=micro_batch, accumulation=accumulation, dp_rank=dp_rank, dp_size=dp_size,
            prefetch=prefetch, pin_memory=pin_memory,
        )  # fmt: skip
        self.source = source
        self.order = order
        self.rows_in_epoch = len(source)
        self.end = None if epochs is None else epochs * len(source)
        self.long = _checked_long(long, source, seq_len)
        self.named = named
        self._fill = getattr(source, "fill", None)
        self._want = getattr(source, "want", nothing) if read_shuffle(order.shuffle) > 0 else nothing

    def sizes(self) -> dict[str, int]:
        """Return how many samples there are: of each place of a blend, or, under ``""``, of all."""
        return self.order.sizes() if isinstance(self.order, BlendOrder) else super().sizes()

    def _before_step(self, consumed: int) -> None:
        if self._want is not nothing:
            self._want(*self.order.ahead(consumed, consumed + self.step_samples(consumed) - 1))

    def _after_steps(self) -> None:
        if self._want is not nothing:
            getattr(self.source, "rest", nothing)()

    def step(self, consumed: int) -> list[Batch]:
        """Read this rank's micro-batches of the step that starts at ``consumed``."""
        epochs, rows = self._rows(self.positions(consumed))
        return [self._batch(*found) for found in zip(epochs.tolist(), rows.tolist(), strict=True)]

    def _rows(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, rows) at some positions; rows are `FILLER` behind the last epoch."""
        epochs, rows = self.order.rows(positions)
        return epochs, rows if self.end is None else np.where(positions < self.end, rows, FILLER)

    def _batch(self, epochs: list[int], indices: list[int]) -> Batch:
        if indices[-1] == FILLER:
            indices = indices[: indices.index(FILLER)]
            epochs = epochs[: len(indices)]
        elif self._fill is not None:
            tensor = torch.empty(len(indices), self.seq_len, dtype=torch.int64, pin_memory=self.pin_memory)
            if self._fill(indices, tensor.numpy()):
                names = [self.source.name(index) for index in indices] if self.named else [""] * len(indices)
                return Batch(tensor, tensor, None, names)
            # Rows of other lengths, or with masks: there will be more.
            self._fill = None
        rows = [self.source.row(index) for index in indices]
        if not self.named and self.long != "crop":
            try:
                return self._collate(rows, [""] * len(rows))
            except DataError:
                # Again, with names: the message needs one.
                pass
        names = [self.source.name(index) for index in indices]
        if self.long == "crop":
            for place, (epoch, index) in enumerate(zip(epochs, indices, strict=True)):
                key = f"{self.order.seed} {epoch} {index}"
                rows[place], names[place] = crop(rows[place], names[place], self.seq_len, key)
        return self._collate(rows, names)

    def _collate(self, rows: list[Row], names: list[str]) -> Batch:
        return collate_filled(
            rows, names, self.micro_batch, self.seq_len, long=self.long, pin_memory=self.pin_memory
        )

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
            epochs, rows = self._rows(self.positions(consumed) + later)
            for step in zip(epochs.tolist(), rows.tolist(), strict=True):
                yield [self._batch(*found) for found in zip(*step, strict=True)]
            consumed += many * self.global_batch
            many = min(4 * many, most)

    def state(self, consumed: int) -> dict[str, Any]:
        """Return what a checkpoint keeps: the positions consumed, and what they are positions of.

        The same on every rank. ``consumed`` is advanced by the trainer, after the optimizer step.
        """
        return {
            "version": STATE_VERSION,
            "consumed": consumed,
            **self.order.identity(),
            "fingerprint": self.source.fingerprint,
            "layout": getattr(self.source, "layout", ONE_ROW),
            "seq_len": self.seq_len,
            "long": self.long,
        }

    def _cuts(self, *seq_lens: Any) -> bool:
        """Tell whether a row may be longer than one of ``seq_lens``: not where those are refused, or known."""
        report = getattr(self.source, "report", None)
        return self.long in ("truncate", "crop") and (report is None or report()["longest"] > min(seq_lens))

    def check_state(self, state: dict[str, Any], *, allow_data_change: bool = False) -> int:
        """Return ``consumed`` of a saved state; DataError names what would make it mean other samples.

        Batch sizes and ranks may change: they do not decide which sample is at a position. So may seq_len where it
        cuts no row, neither now nor before. ``allow_data_change`` goes on at the same position of other data, and
        says so.
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
            if before == after or (key == "seq_len" and not self._cuts(before, after)):
                continue
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
        seq_len: tokens per row of every batch.
        micro_batch: rows per batch of one rank.
        dp_rank: this rank among the data-parallel ones.
        dp_size: data-parallel ranks.
        max_batches: at most so many batches per rank; None for all.
        fast: the last shard that has samples only (--fast_validation).
        long: as in `TrainingData`; a crop is the same at every evaluation.
        pin_memory: as in `TrainingData`.
    """

    def __init__(
        self,
        source: Source,
        *,
        seq_len: int,
        micro_batch: int,
        dp_rank: int,
        dp_size: int,
        max_batches: int | None = None,
        fast: bool = False,
        long: str = "truncate",
        pin_memory: bool = False,
    ) -> None:
        if len(source) < 1:
            raise DataError(
                "the validation data has no row; give --test_dir a folder with at least one shard"
            )
        self.source = source
        self.seq_len = seq_len
        self.micro_batch = micro_batch
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.long = _checked_long(long, source, seq_len)
        self.pin_memory = pin_memory
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
            indices = self.rows[first : first + self.micro_batch]
            rows = [self.source.row(index) for index in indices]
            names = [self.source.name(index) for index in indices]
            if self.long == "crop":
                cropped = [
                    crop(row, name, self.seq_len, f"validation {index}")
                    for row, name, index in zip(rows, names, indices, strict=True)
                ]
                rows, names = [row for row, _ in cropped], [name for _, name in cropped]
            yield collate_filled(
                rows, names, self.micro_batch, self.seq_len, long=self.long, pin_memory=self.pin_memory
            )


def _checked_long(long: str, source: Source, seq_len: int) -> str:
    """Refuse at the start, not in mid-run, rows that are too long, where the source knows its longest."""
    if long not in LONG:
        raise ConfigError(f"--long {long} is not known; use one of {', '.join(LONG)}")
    report = getattr(source, "report", None)
    if long == "error" and report is not None:
        totals = report()
        if totals["longest"] > seq_len:
            raise DataError(
                f"{totals['longest_at']}: row of {totals['longest']} tokens is longer than the {seq_len} of "
                "--max_context_width; use --long split or truncate, or prepare shorter rows"
            )
    return long
