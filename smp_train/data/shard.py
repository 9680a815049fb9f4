"""One file of rows, local or in S3."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """One file of rows, as it was when the folder was listed."""

    path: str
    """Where it is: a path, or ``s3://bucket/key``."""
    name: str
    """Its name within the data set."""
    size: int
    mtime_ns: int
    etag: str = ""
    """What S3 calls this version of its content."""
