"""SMP's flash attention modules, computed by torch here."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: str, **options: Any) -> Tensor:
    if layout == "b s h d":
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, **options)
    return out.transpose(1, 2) if layout == "b s h d" else out


class FlashSelfAttention(nn.Module):
    """Attention of one packed tensor of queries, keys and values."""

    def __init__(
        self, attention_dropout_prob: float = 0.0, scale: Any = None, triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout, self.scale = attention_dropout_prob, scale

    def forward(
        self, qkv: Tensor, attn_mask: Any = None, causal: bool = False, cast_dtype: Any = None, layout: str = "b h s d"
    ) -> Tensor:
        """Take ``[batch, seq, 3, heads, head_dim]`` or, by the layout, ``[batch, 3, heads, seq, head_dim]``."""
        query, key, value = qkv.unbind(2 if layout == "b s h d" else 1)
        return _attend(query, key, value, layout, attn_mask=attn_mask, is_causal=causal, scale=self.scale)


class FlashGroupedQueryAttention(nn.Module):
    """Attention of queries to fewer heads of keys and values."""

    def __init__(self, attention_dropout_prob: float = 0.0, scale: Any = None) -> None:
        super().__init__()
        self.dropout, self.scale = attention_dropout_prob, scale

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool = False, cast_dtype: Any = None, layout: str = "b s h d"
    ) -> Tensor:
        """Take queries, and keys and values packed along their third dimension, or second by the layout."""
        key, value = kv.unbind(2 if layout == "b s h d" else 1)
        return _attend(q, key, value, layout, is_causal=causal, scale=self.scale)
