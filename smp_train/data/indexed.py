"""Indexed data: samples with random access, in one global order for the whole run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from smp_train.data.batch import Batch, collate
from smp_train.data.blend import BlendOrder, Joined
from smp_train.data.loader import Loader
from smp_train.data.order import Order
from smp_train.data.samples import Sample, Samples

FILLER = -1
"""Index that stands for no sample, at positions after the last epoch."""


class TrainingData(Loader):
    """Indexed samples for data-parallel ranks, in one order for the whole run.

    An epoch may end within a batch: no sample is dropped at the end of an epoch. After the last of ``epochs``, the last
    batch is filled up with rows that do not count. ``with_names`` sets `Batch.samples`; making the names takes a
    quarter of the time of a batch.
    """

    kind = "indexed"

    def __init__(
        self, samples: Samples | Joined, order: Order | BlendOrder, *, with_names: bool = True,
        epochs: int | None = None, **share: Any,
    ) -> None:  # fmt: skip
        super().__init__(**share)
        self.samples, self.order, self.with_names = samples, order, with_names
        self.rows_in_epoch = len(samples)
        self.end = None if epochs is None else epochs * len(samples)

    def sizes(self) -> dict[str, int]:
        """See `Loader.sizes`."""
        return self.order.sizes()

    def names(self, consumed: int) -> list[list[str]]:
        """See `Loader.names`."""
        epochs, indices = (table.tolist() for table in self._order(self.positions(consumed)))
        batches = zip(epochs, indices, strict=True)
        return [[sample.name for sample in self._samples(*batch, with_names=True)] for batch in batches]

    def _order(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epochs, indices of samples) at some positions; the index is `FILLER` after the last epoch."""
        epochs, indices = self.order.rows(positions)
        return epochs, indices if self.end is None else np.where(positions < self.end, indices, FILLER)

    def _samples(self, epochs: list[int], indices: list[int], with_names: bool) -> list[Sample]:
        sample, seed = self.samples.sample, self.order.seed
        return [
            sample(index, (seed, epoch, index), with_name=with_names)
            for epoch, index in zip(epochs, indices, strict=True)
            if index != FILLER
        ]

    def _batch(self, epochs: list[int], indices: list[int]) -> Batch:
        samples = self._samples(epochs, indices, self.with_names)
        return collate(samples, self.seq_len, size=self.micro_batch, pin_memory=self.pin_memory)

    def _steps(self, consumed: int) -> Iterator[list[Batch]]:
        # The order is computed for many steps at once: NumPy costs more per call than per element. The first calls are
        # for few steps, so that the first batch does not wait.
        rows_of_step = self.micro_batch * self.accumulation
        steps, most = max(1, 256 // rows_of_step), max(1, 16384 // rows_of_step)
        self._use_device()
        while self.end is None or consumed < self.end:
            if self.end is not None:
                steps = min(steps, -(-(self.end - consumed) // self.global_batch))
            offsets = np.arange(steps, dtype=np.int64)[:, None, None] * self.global_batch
            epochs, indices = (table.tolist() for table in self._order(self.positions(consumed) + offsets))
            for epochs_of_step, indices_of_step in zip(epochs, indices, strict=True):
                yield list(map(self._batch, epochs_of_step, indices_of_step))
            consumed += steps * self.global_batch
            steps = min(4 * steps, most)

    def identity(self) -> dict[str, Any]:
        """See `Loader.identity`."""
        identity = {"layout": self.samples.layout, "fingerprint": self.samples.fingerprint}
        return {**self.order.identity(), **identity}


class ValidationData:
    """Gives the same samples, in stored order, at every validation, and the same number of batches on every rank.

    The last batches are filled up with rows without labels, so that a token-weighted mean over all ranks counts each
    sample once. Reads the samples from number ``first`` on, in at most ``max_batches`` batches per rank.
    """

    def __init__(self, samples: Samples, first: int = 0, *, max_batches: int | None = None, **share: Any) -> None:
        order = Order(len(samples), shuffle="none")
        self._data = TrainingData(samples, order, epochs=1, accumulation=1, prefetch=0, **share)
        self.first = first
        batches = -(-(len(samples) - first) // self._data.global_batch)
        self._batches = batches if max_batches is None else min(batches, max_batches)

    def __len__(self) -> int:
        """Return the number of batches, the same on every rank."""
        return self._batches

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's batches."""
        for (batch,) in islice(self._data.batches(self.first), self._batches):
            yield batch
