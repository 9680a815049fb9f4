"""Which kind of data set a place holds, by the names in it."""

from __future__ import annotations

import os

from smp_train.data import hf_dataset, s3
from smp_train.data.utils import is_shard_name
from smp_train.errors import ConfigError, DataError

SHARDS, PREPARED, ARROW = "JSON-lines shards", "prepared tokens", "Hugging Face data set"


def kind_of(location: str, dataset_type: str = "gpt_jsonl") -> str:
    """Return `SHARDS`, `PREPARED` (.tok and .idx) or `ARROW`. Raises DataError for a mix, or another than asked for."""
    names = _names(location)
    kinds = {SHARDS: any(is_shard_name(name) and name not in (hf_dataset.STATE, hf_dataset.INFO) for name in names)}
    kinds[PREPARED] = any(name.endswith(".idx") and name[0] not in "._" for name in names)
    kinds[ARROW] = hf_dataset.is_hf_dataset(names)
    found = [kind for kind, there in kinds.items() if there]
    if not s3.is_s3(location):
        hf_dataset.refuse_dict(location, names)
    if len(found) > 1:
        raise DataError(f"{location}: holds {' and '.join(found)}; keep one kind in a folder")
    if dataset_type == "hf" and found != [ARROW]:
        raise DataError(f"{location}: --dataset_type hf, but save_to_disk did not write this; leave the flag out")
    return found[0] if found else SHARDS


def _names(location: str) -> set[str]:
    if s3.is_s3(location):
        return {shard.name for shard in s3.list_folder(location)[0]}
    return set(os.listdir(location)) if os.path.isdir(location) else {os.path.basename(location)}


def refuse_zipped(location: str, kind: str, zipped: bool | None) -> None:
    """Raise ConfigError for a check of how shards are stored where there are none."""
    if kind != SHARDS and zipped is not None:
        raise ConfigError(f"--zipped_data {int(zipped)} is for JSON-lines shards, {location} holds none: leave it out")
