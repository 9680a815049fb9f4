"""Locks that the kernel releases when their process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref

UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class FolderLock:
    """A lock on ``<path>.lock``, held for as long as this object is there; made by `take`."""

    def __init__(self, file: int) -> None:
        self.release = weakref.finalize(self, os.close, file)


def take(path: str, *, shared: bool = False) -> FolderLock | None:
    """Lock a path: for this process alone, or ``shared`` with others that do so; None when another holds it.

    Raises NotImplementedError where the file system has no locks, and OSError.
    """
    try:
        file = os.open(path + ".lock", os.O_CREAT | os.O_RDWR, 0o666)
    except PermissionError:
        if os.path.exists(path + ".lock"):
            return None  # another user's
        raise
    try:
        # Who has it exclusively is about to remove the folder: worth waiting for.
        fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        if isinstance(error, BlockingIOError):
            return None
        if error.errno in UNSUPPORTED:
            raise NotImplementedError(f"{path}: files cannot be locked there") from None
        raise
    return FolderLock(file)
