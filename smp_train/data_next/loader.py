"""Which positions of a run a data-parallel rank reads, and reading them ahead."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import numpy as np

from smp_train.data_next.batch import Batch


class Loader:
    """Base of all training data: the assignment of positions to ranks, and prefetching in a thread."""

    rows_in_epoch: int | None = None
    """Samples of an epoch; None when unknown."""
    end: int | None = None
    """Samples of the whole run; None when it is unknown or has no end."""
    exhausted: bool = False
    """Whether the step handed over last has no sample of this rank, because all its streams have ended. Batches are
    blank from then on; the run ends when every rank is exhausted."""

    def __init__(
        self, *, seq_len: int, micro_batch: int, accumulation: int, dp_rank: int, dp_size: int, prefetch: int = 4,
        pin_memory: bool = False,
    ) -> None: ...

    def step_samples(self, consumed: int) -> int:
        """Return the number of samples of the step that starts at ``consumed``."""
        raise NotImplementedError

    def sizes(self) -> dict[str, int]:
        """Return the number of samples under ``""``, or of each source of a blend; empty when unknown."""
        raise NotImplementedError

    def positions(self, consumed: int) -> np.ndarray:
        """Return this rank's positions of one step, int64 [accumulation, micro_batch]."""
        raise NotImplementedError

    def names(self, consumed: int) -> list[list[str]]:
        """Return the names of this rank's samples of the step at ``consumed``, by micro-batch; empty when unknown."""
        return []

    def batches(self, consumed: int = 0) -> Generator[list[Batch], None, None]:
        """Yield this rank's micro-batches of one optimizer step after another, to `end`."""
        raise NotImplementedError

    # For subclasses:

    def _steps(self, consumed: int) -> Iterator[Any]:
        """Yield what this rank reads in one step after another; runs in the prefetching thread."""
        raise NotImplementedError

    def _hand_over(self, step: Any) -> list[Batch]:
        """Turn what `_steps` yields into the batches of a step; called when the trainer takes them."""
        return list(step)

    def state(self, consumed: int) -> dict[str, Any]:
        """Return what a checkpoint keeps, the same on every rank; collective for streams."""
        raise NotImplementedError

    def check_state(self, state: dict[str, Any], *, allow_data_change: bool = False) -> int:
        """Take up a saved state and return its ``consumed``; DataError when it is of other data. Not collective."""
        raise NotImplementedError


def refuse_changed(flag: str, before: object, now: object) -> None:
    """Raise DataError where a setting of a saved state differs now, and no flag allows that."""


def change_data(changed: str, then: str, *, allowed: bool) -> None:
    """Warn that the data is not what it was, and what happens ``then``; raise DataError unless that is ``allowed``."""
