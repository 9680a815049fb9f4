"""A data set of the Hugging Face hub, streamed through `datasets` shard by shard."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from smp_train.data.text.fields import Fields
from smp_train.data.text.read import TextFile, refuse_columns
from smp_train.errors import ConfigError, DataError, install
from smp_train.models.hugging_face import HubUnreachable, asking_hub

ROWS_AT_ONCE = 1000


@dataclass(frozen=True)
class Split:
    """One split of a data set, opened for streaming."""

    name: str
    split: str
    identity: str
    """Differs between versions of the data set."""
    stream: Any = field(compare=False, repr=False)

    def files(self) -> list[TextFile]:
        """Return its shards as files."""
        return [
            TextFile(self.name, f"{self.split}-{number}", 0, self.identity, self, number)
            for number in range(self.stream.num_shards)
        ]

    def tables(self, shard: int, fields: Fields, start: int) -> Iterator[tuple[int, list[Any]]]:
        """Yield (rows before, columns of the fields) of one shard, from row ``start`` (from 0) on. Raises DataError."""
        here, before = f"{self.name}/{self.split}-{shard}", start
        try:
            rows = self.stream.shard(num_shards=self.stream.num_shards, index=shard).with_format("arrow").skip(start)
            for table in rows.iter(batch_size=ROWS_AT_ONCE):
                refuse_columns(here, fields, table.column_names)
                yield before, [table.column(name) for name in fields.columns(table.column_names)]
                before += table.num_rows
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"{here}: cannot be read on after row {before} ({_line(error)})") from None

    def schema(self) -> Any:
        """Return the Arrow schema of its first rows; None without any. Raises DataError."""
        try:
            return next((table.schema for table in self.stream.with_format("arrow").iter(batch_size=1)), None)
        except Exception as error:
            raise DataError(f"{self.name}/{self.split}: cannot be read ({_line(error)})") from None


def open_split(name: str, config: str | None, split: str, flag: str) -> Split:
    """Open a data set by the name it has on the hub. Raises ConfigError and DataError, in one line."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{flag} {name}: is no file here, and data sets of the hub need: {install('text')}"
        ) from None
    datasets.disable_progress_bars()
    try:
        # From datasets 4 on no code of a data set is run, and the option is refused.
        runs_code = "trust_remote_code" in inspect.signature(datasets.load_dataset_builder).parameters
        with asking_hub():
            builder = datasets.load_dataset_builder(name, config, **({"trust_remote_code": False} if runs_code else {}))
            splits = builder.as_streaming_dataset()
    except HubUnreachable as failure:
        raise DataError(f"{flag} {name}: {failure}; check the path, or download the data set") from None
    except Exception as error:
        raise DataError(
            f"{flag} {name}: is no file or folder here, and cannot be opened as a data set of the hub ({_line(error)})"
        ) from None
    if split not in splits:
        raise DataError(f"{flag} {name}: has no split {split}; it has {', '.join(splits)}")
    files = (builder.config.data_files or {}).get(split) or [builder.hash or ""]
    # On the hub the names of the files hold the commit.
    identity = hashlib.blake2b(repr((name, config, split, list(files))).encode(), digest_size=16).hexdigest()
    return Split(name, split, identity, splits[split])


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
