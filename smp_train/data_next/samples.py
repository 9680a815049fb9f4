"""Rows as samples of at most `seq_len` tokens: cut, joined end to end, or packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smp_train.data_next.source import Row


class Piece(NamedTuple):
    """Tokens ``begin`` to ``end`` of a row, as a part of a sample."""

    row: Row
    """The whole row."""
    name: str
    """The row's name; empty where nobody asks for names."""
    begin: int
    end: int
    truncated: bool = False
    """The row's tokens from ``end`` on are in no sample (--long truncate)."""


class Sample(NamedTuple):
    """What one position of a run trains on."""

    row: Row
    name: str
    """Names of the rows it is made of, such as ``a.json:3[0:512]+b.json:1``."""
    truncated: int = 0
    """Rows that lost their end."""
    truncated_targets: int = 0
    """Tokens with loss that they lost."""


def join(pieces: Sequence[Piece], *, packed: bool = False) -> Sample:
    """Join pieces of rows to a sample; ``packed`` keeps them apart as documents that do not attend to each other."""
    raise NotImplementedError
