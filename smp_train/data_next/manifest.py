"""The manifest that ``smp-train prepare`` writes of a split, and the comparison of a folder with it."""

from __future__ import annotations

from collections.abc import Mapping

MANIFEST = "_manifest.json"


def check(location: str, sizes: Mapping[str, int]) -> None:
    """Raise DataError where the manifest in or above a folder lists other files than ``sizes``, by name, has.

    Does nothing without a manifest. Raises DataError also for a preparation that is not finished.
    """
    raise NotImplementedError


def prepared_splits(location: str) -> list[str]:
    """Return the names of the splits in a folder that prepare wrote, such as train and test; empty for others."""
    raise NotImplementedError
