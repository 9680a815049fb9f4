"""Attention as a module of Transformer Engine's."""

from __future__ import annotations

from typing import Any

from torch import nn


class MultiheadAttention(nn.Module):
    """Another attention module under this one's name."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)
