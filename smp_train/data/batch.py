"""Micro-batches, and the function that makes a micro-batch from samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smp_train.data.samples import Sample
from smp_train.data.source import IGNORED


@dataclass
class Batch:
    """One micro-batch of one rank."""

    input_ids: Tensor
    """int64 [micro_batch, seq_len]; 0 where a short sample is padded on the right."""
    labels: Tensor
    """int64 [micro_batch, seq_len], not shifted: a sample's labels, or its ids if it has none; `IGNORED` in padding and
    at the first token of a packed document. Padding is on the right, so causal attention needs no mask. If all labels
    equal the ids, this is the same tensor as `input_ids`: do not write into it."""
    samples: list[str] = field(default_factory=list)  # name of each sample; an empty string for a filler row
    truncated: int = 0  # number of truncated rows (--long truncate)
    truncated_targets: int = 0  # number of tokens with loss that were cut off these rows
    position_ids: Tensor | None = None
    """int64 [micro_batch, seq_len], counted from 0 in each packed document and in padding; None when every sample is
    one document. A token attends only to tokens of its own document."""
    documents: tuple[Tensor, int] | None = None
    """(bounds, length of the longest document); set with `position_ids`. The bounds, int32 [documents + 1], are the
    start of each document and the end of the last one, with all rows end to end. Padding counts as a document."""

    def counted_tokens(self) -> int:
        """Return the number of labels that the loss counts: labels that are not ignored and follow another token."""
        return int((self.labels[:, 1:] != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on a device. The host does not wait for copies of pinned tensors."""
        move = partial(Tensor.to, device=device, non_blocking=True)
        ids = move(self.input_ids)
        batch = replace(self, input_ids=ids, labels=ids if self.labels is self.input_ids else move(self.labels))
        if self.position_ids is not None and self.documents is not None:
            bounds, longest = self.documents
            batch = replace(batch, position_ids=move(self.position_ids), documents=(move(bounds), longest))
        return batch


def collate(samples: Sequence[Sample], seq_len: int, *, size: int | None = None, pin_memory: bool = False) -> Batch:
    """Return samples of at most ``seq_len`` tokens as a batch [size, seq_len], padded on the right.

    Rows after the last sample are fillers: zeros that attention includes, without labels and with an empty name. A rank
    without data takes part in a step with a batch of fillers.
    """
    size = size or len(samples)
    shape = size, seq_len
    ids = np.empty(shape, dtype=np.int64)
    plain = len(samples) == size
    lost, lost_targets = sum(each.truncated for each in samples), sum(each.truncated_targets for each in samples)
    for slot, sample in enumerate(samples):
        row = sample.row
        length = row.input_ids.size
        ids[slot, :length] = row.input_ids
        if length < seq_len or row.labels is not None or row.documents is not None:
            ids[slot, length:] = 0
            plain = False
    names = [sample.name for sample in samples]
    if plain:
        input_ids = _tensor(ids, pin_memory)
        return Batch(input_ids, input_ids, names, lost, lost_targets)
    ids[len(samples) :] = 0
    names += [""] * (size - len(samples))
    targets = np.full(shape, IGNORED, dtype=np.int64)
    for slot, sample in enumerate(samples):
        values = sample.row.targets()
        targets[slot, : values.size] = values
    packed: dict[str, Any] = {}
    if any(sample.row.documents is not None for sample in samples):
        positions = _positions(samples, shape)
        targets[positions == 0] = IGNORED
        bounds = np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)
        documents = _tensor(bounds, pin_memory), int(np.diff(bounds).max())
        packed = {"position_ids": _tensor(positions, pin_memory), "documents": documents}
    return Batch(_tensor(ids, pin_memory), _tensor(targets, pin_memory), names, lost, lost_targets, **packed)


def _tensor(values: np.ndarray, pin_memory: bool) -> Tensor:
    # NumPy allocates a small batch in less time than torch.empty.
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if pin_memory else tensor


def _positions(samples: Sequence[Sample], shape: tuple[int, int]) -> np.ndarray:
    """Return the position of each token in its document, int64 [size, seq_len]."""
    size, seq_len = shape
    positions = np.tile(np.arange(seq_len, dtype=np.int64), (size, 1))
    for slot, sample in enumerate(samples):
        row = sample.row
        documents = [row.input_ids.size] if row.documents is None else row.documents
        starts = np.concatenate([[0], np.cumsum(documents)])
        starts = starts[starts < seq_len]
        positions[slot] -= np.repeat(starts, np.diff(np.append(starts, seq_len)))
    return positions
