"""Micro-batches, and how samples become one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from smp_train.data_next.samples import Sample


@dataclass
class Batch:
    """One micro-batch of one rank."""

    input_ids: Tensor
    """int64 [micro_batch, seq_len]; 0 where a short sample is padded."""
    labels: Tensor
    """int64 [micro_batch, seq_len], not shifted; IGNORED where a token carries no loss."""
    samples: list[str] = field(default_factory=list)
    """Name of each sample; empty for a filler."""
    truncated: int = 0
    """Rows that lost their end."""
    truncated_targets: int = 0
    """Tokens with loss that these rows lost."""
    position_ids: Tensor | None = None
    documents: tuple[Tensor, int] | None = None

    def counted_tokens(self) -> int:
        """Return the number of labels that the loss counts."""
        raise NotImplementedError

    @classmethod
    def blank(cls, micro_batch: int, seq_len: int) -> Batch:
        """Return a batch without a counted token: a rank without data takes part in a step with it."""
        raise NotImplementedError


def collate(samples: Sequence[Sample], seq_len: int, *, size: int | None = None, pin_memory: bool = False) -> Batch:
    """Return samples as a batch [size, seq_len], padded on the right; rows after the last sample are fillers."""
    raise NotImplementedError
