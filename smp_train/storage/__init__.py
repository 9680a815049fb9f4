"""Files in a folder of a file system, or objects below a prefix in S3, through one interface.

`Storage` (in `base`) is the interface, `folder` and `s3` implement it, and `paths` has read-only paths like pathlib's.
boto3 is imported when the first client is made; torch is never imported.
"""

from __future__ import annotations

import os

from smp_train.storage.base import Entry, Range, Storage, is_s3, normal, parent_of, split, wait_for
from smp_train.storage.folder import FolderStorage
from smp_train.storage.s3 import S3Storage

__all__ = ["Entry", "Range", "Storage", "is_s3", "normal", "open_storage", "parent_of", "split", "wait_for"]


def open_storage(location: str | os.PathLike[str]) -> Storage:
    """Return the storage at a location. Raises `ConfigError` for an unsupported kind of URL."""
    path = normal(location)
    return S3Storage(path) if is_s3(path) else FolderStorage(path)
