"""Base class of training data: decides which positions of a run a data-parallel rank reads, and reads them ahead.

A run is one sequence of positions 0, 1, 2, ...; indexed and streamed data decide which sample is at a position. Ranks,
micro-batches and prefetching decide only who reads a sample: every rank resumes at the number of positions consumed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from smp_train.data.batch import Batch
from smp_train.distributed import ALL_RANKS
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

STATE_VERSION = 2
IDENTITY = {
    "seed": "--seed", "shuffle": "--shuffle", "layout": "samples made by", "blend": "blend", "size": "samples",
    "fingerprint": "fingerprint",
}  # fmt: skip
"""Fields of `Loader.identity`, with their names in messages."""


class Loader:
    """Assigns positions to ranks, and reads ahead in a thread.

    After c consumed positions, an optimizer step takes positions [c, c + global_batch). Row i of micro-batch j of
    data-parallel rank r takes c + j * micro_batch * dp_size + r * micro_batch + i. A subclass reads the samples in
    `_steps`.

    Args:
        seq_len: tokens per row of every batch.
        micro_batch: rows per batch of one rank.
        accumulation: batches per optimizer step of one rank.
        dp_rank: this rank among the ``dp_size`` data-parallel ranks; its tensor and context peers read the same data.
        prefetch: optimizer steps to read ahead, in a thread; 0 reads on demand.
        pin_memory: make batches in pinned memory, so that their copies to a GPU overlap with computation.
    """

    kind = ""  # ``indexed`` or ``streamed``
    rows_in_epoch: int | None = None  # samples of an epoch; None when unknown
    end: int | None = None  # samples of the whole run; None when unknown, or when the data repeats without end
    exhausted = False
    """Whether this rank has no sample after the step handed over last: its streams have ended, and all its further
    batches hold only fillers. The run ends when all ranks are exhausted."""

    def __init__(
        self, *, seq_len: int, micro_batch: int, accumulation: int, dp_rank: int, dp_size: int, prefetch: int = 4,
        pin_memory: bool = False,
    ) -> None:  # fmt: skip
        self.seq_len, self.micro_batch, self.accumulation = seq_len, micro_batch, accumulation
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.prefetch, self.pin_memory = prefetch, pin_memory
        self._device = torch.cuda.current_device() if pin_memory else None
        self.global_batch = micro_batch * accumulation * dp_size  # positions of one optimizer step, over all ranks

    def step_samples(self, consumed: int) -> int:
        """Return the number of samples of the step that begins at ``consumed``; the last step may have fewer."""
        return self.global_batch if self.end is None else min(self.global_batch, max(0, self.end - consumed))

    def sizes(self) -> dict[str, int]:
        """Return the number of samples by source of a blend, or under ``""`` without a blend; empty when unknown."""
        return {}

    def positions(self, consumed: int) -> np.ndarray:
        """Return this rank's positions of one step, int64 [accumulation, micro_batch]."""
        step = np.arange(self.global_batch).reshape(self.accumulation, self.dp_size, self.micro_batch)
        return consumed + step[:, self.dp_rank]

    def names(self, consumed: int) -> list[list[str]]:
        """Return the names of this rank's samples of the step at ``consumed``, by micro-batch; empty when unknown."""
        return []

    def _steps(self, consumed: int) -> Iterator[Any]:
        """Yield this rank's data of one step after another, up to `end`; runs in the prefetching thread."""
        raise NotImplementedError

    def _hand_over(self, step: Any) -> list[Batch]:
        """Return the batches of a step that `_steps` yielded; called when the trainer takes them."""
        return list(step)

    def _use_device(self) -> None:
        """Select this rank's GPU in the prefetching thread, which begins on GPU 0."""
        # Without this, the thread of every rank would open a CUDA context on GPU 0 as it pins memory.
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def batches(self, consumed: int = 0) -> Generator[list[Batch], None, None]:
        """Yield this rank's micro-batches of one optimizer step after another, to `end`.

        An error in the data is raised here, at the step that needs the data. Close the generator to stop reading ahead.
        """
        steps = self._steps(consumed)
        for step in _read_ahead(steps, self.prefetch) if self.prefetch > 0 else steps:
            yield self._hand_over(step)

    def skip_to(self, consumed: int) -> None:
        """Let `batches` begin at ``consumed``, after the position of a restored state."""

    def identity(self) -> dict[str, Any]:
        """Return everything that decides which sample is at a position: the data, its layout and its order."""
        raise NotImplementedError

    def state(self, consumed: int) -> dict[str, Any]:
        """Return the state that a checkpoint keeps, equal on all ranks; collective for streams."""
        return {"kind": self.kind, "version": STATE_VERSION, "consumed": consumed, **self.identity()}

    def restore_state(self, state: dict[str, Any], *, allow_data_change: bool = False) -> int:
        """Restore a saved state and return its ``consumed``. Raises DataError for other data. Not collective."""
        kind, version, now = state.get("kind"), state.get("version"), self.identity()
        if (kind, version) != (self.kind, STATE_VERSION):
            raise DataError(
                f"the checkpoint's data is {kind} (version {version}), the run's is {self.kind} (version "
                f"{STATE_VERSION}); give --streaming {int(kind == 'streamed')}, or start a new run from the "
                "checkpoint's weights (--finetune 1)"
            )
        for key, label in IDENTITY.items():
            saved_value, value = state.get(key), now.get(key)
            if saved_value == value:
                continue
            if label.startswith("--"):
                changed = f"{label} changed: {saved_value} in the checkpoint, {value} now"
                raise DataError(f"{changed}; resume with the same, or start a new run")
            changed = f"the training data changed: {label} {saved_value} in the checkpoint, {value} now"
            if not allow_data_change:
                raise DataError(
                    f"{changed}; give what the run began with, start a new run, or go on with other data by "
                    "--allow_data_change 1"
                )
            then = f"going on at sample {state['consumed']}; in this epoch, rows may come twice or not at all"
            logger.warning("%s (--allow_data_change 1): %s", changed, then, extra=ALL_RANKS)
            break
        return int(state["consumed"])


def _read_ahead(steps: Iterator[Any], depth: int) -> Iterator[Any]:
    """Yield from an iterator that runs ``depth`` items ahead in a thread; an error is raised when its item is due.

    It uses a thread and not processes: reading and decompressing release the GIL, and sending batches between processes
    costs more than making them.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix="smp-train-data")
    ready = deque(pool.submit(next, steps, None) for _ in range(depth))
    try:
        while ready and (step := ready.popleft().result()) is not None:
            with suppress(RuntimeError):  # raised when the interpreter shuts down
                ready.append(pool.submit(next, steps, None))
            yield step
    finally:
        for future in ready:
            future.cancel()
        pool.shutdown()
