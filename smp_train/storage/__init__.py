"""Files and objects: a folder of a file system or a prefix of a bucket behind one interface, and paths to read from.

`Storage` (in `base`) is what can be done with either; `folder` and `s3` are its two kinds, `paths` names what is read.
boto3 is imported when a client is made, and torch nowhere.
"""

from smp_train.storage.base import Entry, Range, Storage, at, normal
from smp_train.storage.client import is_s3, split

__all__ = ["Entry", "Range", "Storage", "at", "is_s3", "normal", "split"]
