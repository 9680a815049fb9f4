"""Data sets on the Hugging Face hub, streamed shard by shard through ``datasets``."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from smp_train.data.source import digest_of
from smp_train.errors import ConfigError, DataError, install, one_line
from smp_train.models.hugging_face import HubUnreachable, asking_hub

if TYPE_CHECKING:
    from smp_train.data.files import DataFile

ROWS_AT_ONCE = 1000
SHOWN = 300
"""Length at which another library's message is cut."""


@lru_cache(maxsize=16)
def open_splits(name: str, config: str | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Return, by split, the streams of a hub data set and the digests of its files. Raises an `SmpTrainError`."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{name}: is no file or folder here, and data sets on the hub need: {install('text')}"
        ) from None
    datasets.disable_progress_bars()
    try:
        # datasets 4 and later never run a data set's code, and refuse the option.
        runs_code = "trust_remote_code" in inspect.signature(datasets.load_dataset_builder).parameters
        with asking_hub():
            builder = datasets.load_dataset_builder(name, config, **({"trust_remote_code": False} if runs_code else {}))
            streams = dict(builder.as_streaming_dataset())
    except HubUnreachable as failure:
        raise DataError(f"{name}: {failure}; check the path, or download the data set") from None
    except Exception as error:  # datasets and huggingface_hub raise many classes
        raise DataError(
            f"{name}: is no file or folder here, and cannot be opened as a data set on the hub ({_shown(error)})"
        ) from None
    files = builder.config.data_files or {}
    # The names of files on the hub contain the commit.
    names = {split: list(files.get(split) or [builder.hash or ""]) for split in streams}
    return streams, {split: digest_of(name, config, split, names[split]) for split in streams}


def batches(file: DataFile, first: int) -> Iterator[tuple[int, Any]]:
    """Yield (index of the batch's first row, record batch) for a shard, from row ``first`` on. Raises DataError."""
    streams, identities = open_splits(file.path, file.config)
    assert file.split is not None
    if identities.get(file.split) != file.version:
        raise DataError(f"{file.shown}: has changed on the hub since it was listed; start again")
    stream, row = streams[file.split], first
    try:
        shard = stream.shard(num_shards=stream.num_shards, index=file.shard).with_format("arrow").skip(first)
        for table in shard.iter(batch_size=ROWS_AT_ONCE):
            for batch in table.to_batches():
                yield row, batch
                row += batch.num_rows
    except DataError:
        raise
    except Exception as error:  # errors of the network, the hub, or the file's format
        raise DataError(f"{file.shown}: cannot be read further after row {row} ({_shown(error)})") from None


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error)[:SHOWN]}"
