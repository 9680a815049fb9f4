"""Token files: the rows of one or more shards as ``<base>.tok`` (tokens) and ``<base>.idx`` (where each row is)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Header:
    """Summary of one shard in the index of a token file."""

    source: str
    """Name of the shard: `DataFile.name`."""
    size: int
    version: str
    rows: int
    tokens: int
    counted: int
    """Tokens that carry loss."""
    longest: int
    longest_number: int
    """Line or row number, from 1, of the longest row."""
    labelled: bool
    skipped: int
    """Bad records left out (--bad_rows skip)."""
    first_bad: str
    """The first of them: ``NUMBER: reason; what to do``."""


class TokenFile:
    """A pair of token files, mapped when first used."""

    headers: list[Header]


def read_index(base: str) -> TokenFile | None:
    """Return the pair of token files at ``base``; None when there is no complete one."""
    raise NotImplementedError
