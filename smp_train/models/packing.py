"""How a model is told that several documents share a row, none of which may attend to another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Their attention takes a mask, but does not derive one from positions as that of all others does (transformers 5).
WITHOUT_DERIVED_MASK = frozenset({"falcon"})


def packed_inputs(model: nn.Module, position_ids: Tensor) -> dict[str, Tensor]:
    """Return the arguments of ``forward`` for rows of several documents.

    transformers makes the block-diagonal mask itself, in whatever form the attention kernel wants it, where positions
    start again and no mask is given. For the few models that do not, it is made here.

    Args:
        model: a causal language model of transformers.
        position_ids: int64 ``[batch, seq]``, 0 where a document begins.
    """
    config: Any = model.config
    inputs = {"position_ids": position_ids}
    if config.model_type in WITHOUT_DERIVED_MASK:
        document = (position_ids == 0).cumsum(dim=1)
        seq = position_ids.shape[1]
        causal = torch.ones(seq, seq, dtype=torch.bool, device=position_ids.device).tril()
        allowed = ((document[:, :, None] == document[:, None, :]) & causal).unsqueeze(1)
        if config._attn_implementation != "sdpa":
            # Added to the scores, where SDPA selects by it.
            allowed = torch.zeros_like(allowed, dtype=torch.float32).masked_fill_(~allowed, torch.finfo().min)
        inputs["attention_mask"] = allowed
    return inputs
