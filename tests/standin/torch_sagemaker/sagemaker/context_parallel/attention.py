"""Attention of one rank's pieces of a sequence to the whole of it, by gathering keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..state_handler import state
from ..tensor_parallel.collectives import Gather


def positions(length: int) -> Tensor:
    """Return the positions in the whole sequence of this rank's ``length`` tokens: pieces r and 2 * degree - 1 - r."""
    return _of_rank(length, state.cp_rank)


def _of_rank(length: int, rank: int) -> Tensor:
    pieces = torch.arange(length * state.cp_size).chunk(2 * state.cp_size)
    return torch.cat([pieces[rank], pieces[-1 - rank]])


@contextmanager
def over_context() -> Iterator[None]:
    """Let `F.scaled_dot_product_attention` reach the other ranks' keys and values, causally."""
    stock = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        length = query.shape[2]
        key, value = Gather.apply(key, "context", 2), Gather.apply(value, "context", 2)
        keys = torch.cat([_of_rank(length, rank) for rank in range(state.cp_size)])
        mask = positions(length)[:, None] >= keys[None, :]
        kept = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
        return stock(query, key, value, attn_mask=mask, **kept)

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = stock
