"""Files that appear under their names complete and synced to disk, or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from smp_train.storage.folder import sync_folder

# Reading the umask means setting it for all threads: do it once, before there are any.
_UMASK = os.umask(0o077)
os.umask(_UMASK)


@contextlib.contextmanager
def atomic_file(path: str) -> Iterator[IO[bytes]]:
    """Write a file that appears under ``path`` when it is complete and synced; on an error nothing is left."""
    with temporary_file(path) as (file, scratch):
        yield file
        file.close()
        publish(scratch, path)


@contextlib.contextmanager
def temporary_file(path: str) -> Iterator[tuple[IO[bytes], str]]:
    """Yield a temporary file in the folder of ``path``, and its name; it is removed unless it has been renamed."""
    folder, name = os.path.split(path)
    handle, scratch = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder or ".")
    with os.fdopen(handle, "wb") as file:
        try:
            yield file, scratch
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch)


def publish(scratch: str, path: str, *, sync_name: bool = True) -> None:
    """Sync a temporary file and rename it to ``path``, readable and writable as the umask allows, but not by others."""
    file = os.open(scratch, os.O_RDONLY)
    try:
        os.fchmod(file, 0o664 & ~_UMASK)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(scratch, path)
    if sync_name:
        sync_folder(Path(path).parent)
