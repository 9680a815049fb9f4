"""Files and objects: a folder of a file system or a prefix of a bucket behind one interface, and paths to read from.

`Storage` (in `base`) is what can be done with either; `folder` and `s3` are its two kinds, `paths` names what is read.
boto3 is imported when a client is made, and torch nowhere.
"""

from __future__ import annotations

import os

from smp_train.errors import CheckpointError, SmpTrainError
from smp_train.storage.base import Entry, Range, Storage, normal, parent_of, wait_for
from smp_train.storage.client import is_s3, split
from smp_train.storage.folder import FolderStorage
from smp_train.storage.s3 import S3Storage

__all__ = ["Entry", "Range", "Storage", "at", "is_s3", "normal", "parent_of", "split", "wait_for"]


def at(location: str | os.PathLike[str], error: type[SmpTrainError] = CheckpointError) -> Storage:
    """Return the storage at a location. Raises `ConfigError` for a kind of URL that is not supported."""
    place = normal(location)
    return S3Storage(place, error) if is_s3(place) else FolderStorage(place)
