"""Tokenizers: loaded from a folder, a file, S3 or the hub; their end token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load(name: str) -> Tokenizer:
    """Return a fast tokenizer: of a ``tokenizer.json``, a folder, or a name on the hub. Raises ConfigError."""
    raise NotImplementedError


def end_token(tokenizer: Tokenizer, name: str | None, folder: str | None = None) -> tuple[str, int]:
    """Return the token that ends a document and its id: ``name``, the folder's own, or a well-known one."""
    raise NotImplementedError
