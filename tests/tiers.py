"""Which parameters of a test run in `make test`; `make test-all` runs all of them.

Tests marked `slow` run in `make test-all` only, except those also marked `core`: at least one of each path through the
system.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def core(values: Iterable[Any], chosen: Callable[[Any], Any]) -> list[Any]:
    """Return parameters for a `slow` test, those that are ``chosen`` marked `core`; a tuple has several parameters."""
    return [_marked(value, pytest.mark.core) if chosen(value) else value for value in values]


def slow(values: Iterable[Any], chosen: Callable[[Any], Any]) -> list[Any]:
    """Return parameters for a fast test, those that are ``chosen`` marked `slow`; a tuple has several parameters."""
    return [_marked(value, pytest.mark.slow) if chosen(value) else value for value in values]


def _marked(value: Any, mark: pytest.MarkDecorator) -> Any:
    return pytest.param(*value, marks=mark) if isinstance(value, tuple) else pytest.param(value, marks=mark)
