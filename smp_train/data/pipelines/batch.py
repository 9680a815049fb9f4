"""What a batch is, and how rows become one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smp_train.data.source import IGNORED, Row, refuse_uncounted, trimmed
from smp_train.errors import DataError


@dataclass
class Batch:
    """One micro-batch of one rank."""

    input_ids: Tensor
    """int64 [micro_batch, seq_len]; 0 where a short row is padded."""
    labels: Tensor
    """int64 [micro_batch, seq_len], not shifted: the row's labels, or its ids; -100 where attention_mask is 0 and where
    a document begins that is packed behind another. `input_ids` itself when no row differs: do not write into it."""
    attention_mask: Tensor | None
    """int64 [micro_batch, seq_len], or None when it is 1 everywhere but in padding on the right, which no earlier token
    attends to: there the labels alone leave it out."""
    samples: list[str] = field(default_factory=list)
    """What each row is called in the data set, ``shard-file:line``; a filler row has an empty name."""
    truncated: int = 0
    """Rows that were longer than seq_len and lost their end."""
    position_ids: Tensor | None = None
    """int64 [micro_batch, seq_len], starting again from 0 at each packed document, and at padding behind them; None
    when every row is one document. A token attends to its own document only. `attention_mask` is None beside it."""
    documents: tuple[Tensor, int] | None = None
    """Beside `position_ids`, with all rows joined end to end: where documents begin and the last one ends, int32
    [documents + 1], padding being a document too; and the tokens of the longest."""

    def counted_tokens(self) -> int:
        """Return how many labels the loss counts: those with a token before them that are not -100."""
        return int((self.labels[:, 1:] != IGNORED).sum())

    @classmethod
    def blank(cls, micro_batch: int, seq_len: int) -> Batch:
        """Return a batch of which nothing is counted: what a rank without data takes part with."""
        shape = (micro_batch, seq_len)
        return cls(torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED), None)


def crop(row: Row, name: str, seq_len: int, key: str) -> tuple[Row, str]:
    """Return ``seq_len`` tokens of a longer row, drawn by ``key`` alone among the windows that have a target, each as
    likely. Raises DataError when none has.
    """
    row = trimmed(row)
    spare = row.input_ids.size - seq_len
    if spare <= 0:
        return row, name
    draw = int.from_bytes(hashlib.blake2b(f"smp-train crop {key}".encode(), digest_size=8).digest(), "little")
    start, targets = draw % (spare + 1), row.targets()
    if targets is not None:
        before = np.concatenate([[0], np.cumsum(targets)])
        # The first token of a window has none before it.
        starts = np.flatnonzero(before[seq_len:] > before[1 : spare + 2])
        if not starts.size:
            raise DataError(f"{name}: no token of this row is counted: nothing to learn; remove the row")
        start = int(starts[draw % starts.size])
    return row.cut(start, start + seq_len), f"{name}[{start}:{start + seq_len}]"


def _cut(row: Row, name: str, seq_len: int, long: str) -> Row:
    """Return the beginning of a row above ``seq_len`` tokens, or refuse it."""
    if long == "error":
        raise DataError(
            f"{name}: row of {row.input_ids.size} tokens is longer than the {seq_len} of --max_context_width; "
            "use --long split or truncate, or prepare shorter rows"
        )
    beginning = trimmed(row).cut(0, seq_len)
    refuse_uncounted(beginning, f"{name}: none of its first {seq_len} tokens", "raise --max_context_width")
    return beginning


def collate(
    rows: list[Row], names: list[str], seq_len: int, *, long: str = "truncate", pin_memory: bool = False
) -> Batch:
    """Stack rows into [len(rows), seq_len]: the end of long rows cut off, short rows padded on the right.

    Raises DataError when a row is longer than ``seq_len`` and ``long`` is ``error``, and when what a cut leaves of a
    row has nothing counted.
    """
    shape = len(rows), seq_len

    def to_tensor(values: np.ndarray) -> Tensor:
        kind = torch.int32 if values.dtype == np.int32 else torch.int64
        return torch.empty(values.shape, dtype=kind, pin_memory=pin_memory).copy_(torch.from_numpy(values))

    tensor = torch.empty(shape, dtype=torch.int64, pin_memory=pin_memory)
    ids = tensor.numpy()
    if all(row.input_ids.size == seq_len and row.counted is row.documents is row.labels is None for row in rows):
        for place, row in enumerate(rows):
            ids[place] = row.input_ids
        return Batch(tensor, tensor, None, names)
    mask = np.ones(shape, dtype=bool)
    truncated = 0
    for place, (row, name) in enumerate(zip(rows, names, strict=True)):
        if row.input_ids.size > seq_len:
            truncated += trimmed(row).input_ids.size > seq_len
            rows[place] = row = _cut(row, name, seq_len, long)
        n = row.input_ids.size
        ids[place, :n] = row.input_ids
        ids[place, n:] = 0
        mask[place, n:] = False
        if row.counted is not None:
            mask[place, :n] = row.counted
    targets = ids.copy()
    for place, row in enumerate(rows):
        if row.labels is not None:
            targets[place, : row.labels.size] = row.labels
    targets[~mask] = IGNORED
    if any(row.documents is not None for row in rows):
        positions = _positions(rows, names, seq_len)
        targets[positions == 0] = IGNORED
        bounds = np.append(np.flatnonzero(positions == 0), positions.size).astype(np.int32)
        documents = to_tensor(bounds), int(np.diff(bounds).max())
        return Batch(tensor, to_tensor(targets), None, names, truncated, to_tensor(positions), documents)
    whole = bool(mask.all()) and all(row.labels is None for row in rows)
    holes = bool((mask[:, 1:] & ~mask[:, :-1]).any())
    return Batch(tensor, tensor if whole else to_tensor(targets), to_tensor(mask) if holes else None, names, truncated)


def collate_filled(rows: list[Row], names: list[str], size: int, seq_len: int, **options: Any) -> Batch:
    """Return a batch of ``size`` rows as `collate` makes it, of which only the first ``len(rows)`` count.

    Fillers stay unmasked (no softmax over nothing), carry no label, and have an empty name.
    """
    missing = size - len(rows)
    fillers = [Row(np.zeros(seq_len, dtype=np.int64))] * missing
    batch = collate([*rows, *fillers], [*names, *[""] * missing], seq_len, **options)
    if missing:
        batch.labels = batch.labels.clone()
        batch.labels[size - missing :] = IGNORED
    return batch


def _positions(rows: list[Row], names: list[str], seq_len: int) -> np.ndarray:
    positions = np.empty((len(rows), seq_len), dtype=np.int64)
    for place, row in enumerate(rows):
        n = row.input_ids.size
        if row.counted is not None:
            raise DataError(
                f"{names[place]}: attention_mask leaves out tokens inside the row, which cannot be packed with "
                "others; use --short pad"
            )
        ends = np.cumsum([n] if row.documents is None else row.documents)
        starts = np.concatenate([[0], ends])
        starts = starts[starts < seq_len]
        positions[place] = np.arange(seq_len) - np.repeat(starts, np.diff(np.append(starts, seq_len)))
    return positions
