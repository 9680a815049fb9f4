"""One file of documents: a path, an object in S3, or a shard of a data set of the hub."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from smp_train.data import s3
from smp_train.data.lines import open_file

if TYPE_CHECKING:
    from smp_train.data.text.hub import Split

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".txt.gz")
LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".ndjson", ".ndjson.gz")
LOOKED_INTO = ".json"
"""A file of this suffix is taken when its first line is an object with the field of the text."""
PARQUET_SUFFIX = ".parquet"
TABLE_SUFFIXES = (PARQUET_SUFFIX, ".arrow")


@dataclass(frozen=True)
class TextFile:
    """One file of documents, as it was when it was listed."""

    path: str
    """A path, ``s3://bucket/key``, or the name of a data set of the hub."""
    name: str
    """Its name within its data set."""
    size: int
    """Bytes; 0 where they are not known."""
    version: str = ""
    """Differs between contents of the same name: the modification time, or S3's ETag."""
    split: Split | None = None
    """The data set of the hub that this is a shard of."""
    shard: int = 0

    @property
    def kind(self) -> str:
        """Which of `smp_train.data.text.read`'s readers it is for: ``hub``, ``table``, ``lines``, or ``whole``."""
        name = self.name.lower()
        if self.split is not None:
            return "hub"
        if name.endswith(TABLE_SUFFIXES):
            return "table"
        return "lines" if name.endswith((*LINES_SUFFIXES, LOOKED_INTO)) else "whole"

    @property
    def remote(self) -> bool:
        """True of objects in S3 and shards of the hub, whose size of 0 means that it is not known."""
        return self.split is not None or s3.is_s3(self.path)

    @property
    def shown(self) -> str:
        """What messages call it."""
        return self.path if self.split is None else f"{self.path}/{self.name}"

    def open(self) -> IO[bytes]:
        """Open a local file or an object in S3, seekable. Raises DataError."""
        return s3.open_ranges(self.path, self.size, self.version) if s3.is_s3(self.path) else open_file(self.path)
