"""Which positions of a run a data-parallel rank reads, and reading them ahead."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch

from smp_train.data.pipelines.batch import Batch
from smp_train.data.pipelines.prefetch import Prefetch
from smp_train.distributed import ALL_RANKS
from smp_train.errors import ConfigError, DataError

logger = logging.getLogger("smp_train.data")


class Loader:
    """Base of all training data: the assignment of positions to ranks, and prefetching in a thread.

    Optimizer step k of a run that has consumed c positions takes [c, c + global_batch), micro-batch j of
    data-parallel rank r takes c + j * micro_batch * dp_size + r * micro_batch + i. A subclass reads in `_steps` what is
    at a position.

    Args:
        seq_len: tokens per row of every batch.
        micro_batch: rows per batch of one rank.
        accumulation: batches per optimizer step of one rank.
        dp_rank: this rank among the data-parallel ones.
        dp_size: data-parallel ranks.
        prefetch: optimizer steps to read ahead, in a thread; 0 reads when asked.
        pin_memory: make batches in page-locked memory, for copies to a GPU that overlap with computing.
    """

    rows_in_epoch: int | None = None
    """Samples of an epoch; None when nobody knows."""
    end: int | None = None
    """Samples of the whole run; None when it has no end of its own."""

    def __init__(
        self, *, seq_len: int, micro_batch: int, accumulation: int, dp_rank: int, dp_size: int, prefetch: int = 4,
        pin_memory: bool = False,
    ) -> None:
        if seq_len < 2:
            raise ConfigError(f"--max_context_width {seq_len}: a row of one token has none to predict; use 2 or more")
        if not 0 <= dp_rank < dp_size:
            raise ConfigError(f"data-parallel rank {dp_rank} is not one of {dp_size}")
        if min(micro_batch, accumulation) < 1:
            raise ConfigError("--train_batch_size and --gradient_accumulation_steps must be at least 1")
        self.seq_len, self.micro_batch, self.accumulation = seq_len, micro_batch, accumulation
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.prefetch, self.pin_memory = prefetch, pin_memory
        self._device = torch.cuda.current_device() if pin_memory else None
        self.global_batch = micro_batch * accumulation * dp_size
        """Positions of one optimizer step, over all ranks."""
        self.rows_truncated = 0
        """Rows of this rank that lost their end so far."""

    def step_samples(self, consumed: int) -> int:
        """Return how many samples the step has that begins at ``consumed``: fewer than a global batch in the last."""
        return self.global_batch if self.end is None else min(self.global_batch, max(0, self.end - consumed))

    def sizes(self) -> dict[str, int]:
        """Return how many samples there are, under ``""``; nothing when nobody knows."""
        return {} if self.rows_in_epoch is None else {"": self.rows_in_epoch}

    def positions(self, consumed: int) -> np.ndarray:
        """Return this rank's positions of one step, int64 [accumulation, micro_batch]."""
        j = np.arange(self.accumulation, dtype=np.int64)[:, None] * (self.micro_batch * self.dp_size)
        i = np.arange(self.micro_batch, dtype=np.int64)
        return consumed + j + self.dp_rank * self.micro_batch + i

    def names(self, consumed: int) -> list[list[str]]:
        """Return the names of this rank's samples of the step at ``consumed``, by micro-batch; none where not known."""
        return []

    def _steps(self, consumed: int) -> Iterator[Any]:
        """Yield what this rank reads in one step after another, to `end`; called in the thread, if there is one."""
        raise NotImplementedError

    def _before_step(self, consumed: int) -> None:
        """Called when the trainer asks for the step at ``consumed``: every rank has read all steps before."""

    def _after_steps(self) -> None:
        """Called when no step is wanted any more; `_steps` must not wait for anything from now on."""

    def _hand_over(self, step: Any) -> list[Batch]:
        """Turn what `_steps` yields into the batches of a step; called when the trainer takes them."""
        return list(step)

    def _on_device(self) -> None:
        # A thread begins on GPU 0; page-locking memory there would open a context on it from every rank.
        if self._device is not None:
            torch.cuda.set_device(self._device)

    def batches(self, consumed: int = 0) -> Generator[list[Batch], None, None]:
        """Yield this rank's micro-batches of one optimizer step after another, to `end`.

        An error of the source is raised here, in the step it belongs to. Close the iterator, or drop it, to
        stop.
        """
        steps: Iterator[Any] = self._steps(consumed)
        ahead: Prefetch | None = None
        try:
            while self.end is None or consumed < self.end:
                self._before_step(consumed)
                if ahead is None and self.prefetch > 0:
                    ahead = Prefetch(steps, self.prefetch, self._after_steps)
                found = next(ahead or steps, None)
                if found is None:  # closed meanwhile, as when the process ends
                    return
                step = self._hand_over(found)
                self._count_truncated(step)
                yield step
                consumed += self.global_batch
        finally:
            if ahead is not None:
                ahead.close()
            else:
                self._after_steps()

    def _count_truncated(self, step: list[Batch]) -> None:
        truncated = sum(batch.truncated for batch in step)
        if truncated and not self.rows_truncated:
            text = "rows longer than %d tokens lose their end (--long truncate); --long error refuses them"
            logger.warning(text, self.seq_len)
        self.rows_truncated += truncated

    def state(self, consumed: int) -> dict[str, Any]:
        """Return what a checkpoint keeps, the same on every rank; collective for some data."""
        raise NotImplementedError

    def check_state(self, state: dict[str, Any], *, allow_data_change: bool = False) -> int:
        """Take a saved state up and return its ``consumed``; DataError when it is of other data. No collective."""
        raise NotImplementedError


def refuse_changed(flag: str, before: object, now: object) -> None:
    """Raise DataError where a setting of a saved state is another now, which no flag allows."""
    if before != now:
        raise DataError(
            f"{flag} changed: {before} in the checkpoint, {now} now; resume with the same, or start a new run"
        )


def change_data(changed: str, then: str, *, allowed: bool) -> None:
    """Warn that the data is not what it was, and what happens ``then``; raise DataError unless that is ``allowed``."""
    if not allowed:
        raise DataError(
            f"{changed}; give what the run began with, start a new run, or go on with other data by "
            "--allow_data_change 1"
        )
    logger.warning("%s (--allow_data_change 1): %s", changed, then, extra=ALL_RANKS)
