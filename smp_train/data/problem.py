"""The reason why a record is no row."""

from __future__ import annotations


class Problem(str):
    """The reason why a record is no row, and the remedy: ``reason; what to do``."""
