"""Read-only paths on a file system or in S3, with pathlib's methods; and temporary folders."""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smp_train.errors import CheckpointError, ConfigError, SmpTrainError
from smp_train.storage.base import Entry, is_s3, normal, split
from smp_train.storage.s3 import S3Storage

READ_AHEAD = 1 << 18
"""Least bytes of one request for an object that is read as a file."""
SMALL_BYTES = 1 << 26
"""Largest file that can belong to a tokenizer; weight files are larger."""


class S3Path:
    """``s3://bucket/key``: an object, or a folder of objects. S3's errors are raised as `CheckpointError`."""

    def __init__(self, location: str) -> None:
        split(location, CheckpointError)
        self.storage = S3Storage(normal(location))
        """The storage of the objects below this path; the empty name is the object itself."""

    def __str__(self) -> str:
        return self.storage.location

    __fspath__ = __str__

    def __truediv__(self, name: str) -> S3Path:
        return S3Path(f"{self}/{name}")

    @property
    def name(self) -> str:
        """The last component of the key; empty for a bucket."""
        return posixpath.basename(self.storage.prefix)

    @property
    def parent(self) -> S3Path:
        """The folder that contains the object."""
        return S3Path(posixpath.dirname(str(self))) if self.name else self

    def is_file(self) -> bool:
        """Return whether an object has this key."""
        return bool(self.name) and self.storage.exists("")

    def is_dir(self) -> bool:
        """Return whether any object is below this path."""
        return not self.storage.is_empty()

    def exists(self) -> bool:
        """Return whether the path is an object or a folder."""
        return self.is_file() or self.is_dir()

    def read_bytes(self) -> bytes:
        """Return a small object's content."""
        return self.storage.read("")

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return a small object's content as text."""
        return self.read_bytes().decode(encoding)

    def entry(self) -> Entry:
        """Return the object's size and version. Raises `CheckpointError` if the object does not exist."""
        entry = self.storage.entry("", missing=())
        assert entry is not None
        return entry

    def open_ranges(self, entry: Entry) -> io.BufferedReader:
        """Return the object's version ``entry`` as a file that fetches only the bytes that are read."""
        return self.storage.open_ranges("", entry, READ_AHEAD)


Place = Path | S3Path


def place(location: str | os.PathLike[str]) -> Place:
    """Return a location as a path."""
    text = os.fspath(location)
    return S3Path(text) if is_s3(text) else Path(text).expanduser()


def names_in(folder: Place) -> list[str]:
    """Return the sorted names of the files directly in a folder; empty without the folder."""
    if isinstance(folder, S3Path):
        return sorted(folder.storage.level()[0])
    return sorted(path.name for path in folder.glob("*") if path.is_file())


@contextmanager
def temporary(name: str) -> Iterator[str]:
    """Yield a temporary folder; error messages from the body show ``name`` instead of the folder's path."""
    with tempfile.TemporaryDirectory(prefix="smp-train-copy-") as folder:
        try:
            yield folder
        except SmpTrainError as failure:
            failure.args = (str(failure).replace(folder, name),)
            raise


@contextmanager
def on_this_machine(location: str) -> Iterator[str]:
    """Yield a local path to a file or folder: for S3, a temporary copy of the file or of the folder's small files."""
    if not is_s3(location):
        yield location
        return
    source = S3Path(location)
    is_file = source.is_file()
    folder = source.parent if is_file else source
    names = [source.name] if is_file else [
        name for name, entry in folder.storage.level()[0].items() if entry.size <= SMALL_BYTES
    ]  # fmt: skip
    with temporary(str(folder)) as copy:
        for name in names:
            Path(copy, name).write_bytes(folder.storage.read(name))
        yield os.path.join(copy, source.name) if is_file else copy


def private_folder(name: str, parent: str | None = None) -> str:
    """Return a folder, in ``parent`` or the temporary directory, that only this user can access; make it if missing.

    Anybody may have taken the name: raises `ConfigError` for a link, another user's folder, or one with open access.
    """
    path = os.path.join(parent or tempfile.gettempdir(), f"{name}-{os.getuid()}")
    try:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        status = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made ({error.strerror}); set TMPDIR to another folder") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"{path} is a link, another user's, or open to others, and what is read from there could be anybody's; "
            "remove it, or set TMPDIR, or for data --data_cache_dir"
        )
    return path
