"""The sources of a run's data: locations and weights, from the flags."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from smp_train.errors import ConfigError, first_few

if TYPE_CHECKING:
    from smp_train.arguments.groups import Arguments

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
FILE_SUFFIXES = (
    ".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".txt", ".md", ".rst", ".py", ".tok", ".idx", ".csv", ".tsv",
    ".html", ".htm", ".xml", ".pdf", ".docx", ".zip", ".tar", ".gz", ".zst", ".bz2", ".xz",
)  # fmt: skip
"""Suffixes of files, which are not on the hub even if they do not exist here."""
HELD_OUT = ("validation", "valid", "val", "dev", "test")
"""Names of splits to validate on, in order of preference."""


def is_hub_name(location: str) -> bool:
    """Return whether a location names a data set on the hub: it is no file or folder, and not in S3."""
    if location.startswith("s3://") or os.path.exists(location) or not HUB_NAME.fullmatch(location):
        return False
    return not location.lower().endswith(FILE_SUFFIXES)


def may_be_held_out(location: str) -> bool:
    """Return whether a location may have a validation split; in a local folder, a split is a sub-folder."""
    remote = location.startswith("s3://") or is_hub_name(location)
    return remote or any(os.path.isdir(os.path.join(location, split)) for split in HELD_OUT)


def read_weights(sources: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Split ``a:0.7 b:0.3`` into locations and weights; the weights are None if no source has a weight."""
    locations, weights = [], []
    for source in sources:
        location, colon, number = source.rpartition(":")
        try:
            weight = float(number) if colon and not os.path.exists(source) else None
        except ValueError:
            weight = None
        locations.append(source if weight is None else location)
        weights.append(weight)
    numbers = [weight for weight in weights if weight is not None]
    if not numbers:
        return locations, None
    if len(numbers) < len(weights):
        bare = locations[weights.index(None)]
        raise ConfigError(f"{bare}: has no weight; give all sources a weight, as {bare}:0.5, or leave out all weights")
    if not all(0 < weight < float("inf") for weight in numbers):
        raise ConfigError(f"{' '.join(sources)}: weights must be above 0")
    return locations, numbers


def training_sources(args: Arguments) -> tuple[list[str], list[float] | None]:
    """Return the locations of --training_dir and --dataset in one list, and their weights."""
    return read_weights([*(args.training_dir or []), *(args.dataset or [])])


def is_streamed(args: Arguments, locations: Sequence[str]) -> bool:
    """Return --streaming, or its default for these locations: names on the hub are streamed, files are not.

    Raises `ConfigError` if the default differs between the locations.
    """
    if args.streaming is not None:
        return args.streaming
    on_hub = [location for location in locations if is_hub_name(location)]
    if on_hub and len(on_hub) < len(locations):
        raise ConfigError(
            f"{first_few(on_hub)} is on the hub, which is streamed by default, and other sources are files, which are "
            "not; choose with --streaming 1 or --streaming 0"
        )
    return bool(on_hub)
