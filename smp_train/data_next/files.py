"""The list of a data set's files: in a folder, in S3, or on the Hugging Face hub; made on rank 0 and broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from smp_train.data_next.kinds import Kind
from smp_train.distributed import Runtime


@dataclass(frozen=True)
class DataFile:
    """One file of records, or one shard of a data set on the hub, as it was when it was listed."""

    path: str
    """A local path, ``s3://bucket/key``, or the name of a data set on the hub."""
    name: str
    """Its name within the data set: the path relative to the location."""
    size: int
    """Bytes; 0 where unknown (hub)."""
    version: str
    """Differs between contents under the same path: modification time in ns, ETag, or the commit on the hub."""
    kind: str
    """Reader of the file: ``lines``, ``parquet``, ``arrow``, ``text`` (one document), ``hub``, or ``tokens`` (a
    ``.tok`` file with its ``.idx``)."""
    shard: int = 0
    """Number of the shard on the hub."""
    config: str | None = None
    """Configuration of the data set on the hub."""
    split: str | None = None
    """Split of the data set on the hub."""

    @property
    def shown(self) -> str:
        """Return the name of the file in messages."""
        return f"{self.path}/{self.name}" if self.kind == "hub" else self.path

    @property
    def remote(self) -> bool:
        """Return whether the file is in S3 or on the hub."""
        return self.kind == "hub" or self.path.startswith("s3://")

    def at(self, number: int) -> str:
        """Return the name of a record in messages, by its number from 1: ``PATH:LINE`` or ``PATH: row N``."""
        if self.kind == "text":
            return self.shown
        return f"{self.shown}:{number}" if self.kind == "lines" else f"{self.shown}: row {number}"


@dataclass(frozen=True)
class FileSet:
    """The files of one location, ordered by name, and the kind of their records."""

    location: str
    files: tuple[DataFile, ...]
    kind: Kind

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)


def list_files(
    location: str, *, column: str | None = None, config: str | None = None, split: str = "train",
    patterns: Sequence[str] = (), exclude: Sequence[str] = (), zipped: bool | None = None,
    flag: str = "--training_dir",
) -> FileSet:  # fmt: skip
    """Return the files of a file, a folder, an ``s3://`` prefix or a data set on the hub. Not collective.

    Folders are read with all folders below. A folder of splits (a DatasetDict, the output of prepare, or folders called
    train and test) is read for its ``split``.

    Args:
        column: --text_column.
        config: --dataset_config_name, for the hub.
        split: of a data set on the hub, or of a folder of splits.
        patterns: of file names to read, instead of the known suffixes.
        exclude: patterns of names of files and folders to leave out.
        zipped: --zipped_data: refuse files stored the other way.
        flag: named in messages.

    Raises DataError and ConfigError.
    """
    raise NotImplementedError


def list_held_out(location: str, *, column: str | None = None, config: str | None = None, flag: str) -> FileSet | None:
    """Return the files of the split ``validation`` or ``test`` of a location; None if it has neither. Not collective.

    Raises DataError also where the hub cannot be reached: that does not mean that there is no such split.
    """
    raise NotImplementedError


def list_sources(
    locations: Sequence[str], *, ranks: Runtime, column: str | None = None, config: str | None = None,
    split: str = "train", zipped: bool | None = None, flag: str = "--training_dir",
) -> list[FileSet]:  # fmt: skip
    """Return the files of each location, as rank 0 lists them; one rank of each node checks the local sizes. Collective.

    Raises DataError and ConfigError, on all ranks.
    """
    raise NotImplementedError


def list_held_out_source(
    location: str, *, ranks: Runtime, column: str | None = None, config: str | None = None, flag: str
) -> FileSet | None:
    """Return `list_held_out` of rank 0, checked on each node. Collective."""
    raise NotImplementedError
