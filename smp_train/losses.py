"""Next-token cross entropy as a sum over counted tokens.

The sum, not the mean: the mean is taken once, over the counted tokens of the whole global batch, so that the
loss and its gradient do not depend on how that batch is split over ranks and micro-batches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Label of a token that is not counted, as everywhere in the field."""


def count_targets(labels: Tensor) -> Tensor:
    """Return how many tokens of ``labels`` are counted as targets.

    Args:
        labels: int64 ``[batch, seq]``, not shifted. The first token of a row has nothing before it that could
            predict it, so it is never a target.

    Returns:
        A scalar int64 tensor.
    """
    return (labels[:, 1:] != IGNORE_INDEX).sum()


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross entropy, in nats, of predicting token ``t + 1`` from position ``t``.

    Args:
        logits: ``[batch, seq, vocab]`` in any floating dtype; the soft-max is taken in float32.
        labels: int64 ``[batch, seq]``, not shifted, `IGNORE_INDEX` where a token is not counted.

    Returns:
        A scalar float32 tensor; zero, with a gradient of zero, when nothing is counted.
    """
    # Shift the labels rather than the logits: slicing the logits would copy the largest tensor of the step.
    targets = torch.full_like(labels, IGNORE_INDEX)
    targets[:, :-1] = labels[:, 1:]
    return F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
