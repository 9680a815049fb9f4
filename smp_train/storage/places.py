"""Files and folders that are read, on a file system or in S3, in the words of `pathlib`."""

from __future__ import annotations

import fnmatch
import io
import os
import posixpath
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from smp_train.errors import CheckpointError, ConfigError
from smp_train.storage import s3_folder
from smp_train.storage.ranges import Ranges
from smp_train.storage.s3 import SCHEME, is_s3, split
from smp_train.storage.s3_folder import S3Folder

READ_AHEAD = 1 << 18
"""Bytes of one request of an object that is read as a file."""
SMALL_BYTES = 1 << 26
"""Of the files beside a model, which its tokenizer may be of; weights are larger."""


class S3Path:
    """``s3://bucket/key``: an object, or a folder of them. What S3 refuses is a `CheckpointError`."""

    def __init__(self, location: str) -> None:
        bucket, key = split(location, CheckpointError)
        self._key = posixpath.normpath("/" + key)[1:]
        self._text = f"{SCHEME}{bucket}/{self._key}".rstrip("/")

    def __str__(self) -> str:
        return self._text

    def __fspath__(self) -> str:
        return self._text

    def __truediv__(self, name: str) -> S3Path:
        made = S3Path(f"{self._text}/{name}")
        if "/" not in name:
            made.parent = self  # so that what this one knows of its objects holds for reading them
        return made

    @property
    def name(self) -> str:
        """What comes after the last slash; empty for a bucket."""
        return posixpath.basename(self._key)

    @cached_property
    def parent(self) -> S3Path:
        """The folder it is in."""
        return S3Path(self._text.rpartition("/")[0]) if self._key else self

    @cached_property
    def folder(self) -> S3Folder:
        """What is below it."""
        return S3Folder(self._text)

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        return bool(self._key) and self.parent.folder.has("", self.name)

    def is_dir(self) -> bool:
        """Return whether there is anything below it."""
        prefix = f"{self._key}/" if self._key else ""
        return bool(self.folder.ask("list_objects_v2", Prefix=prefix, MaxKeys=1).get("KeyCount"))

    def exists(self) -> bool:
        """Return whether there is such an object, or anything below it."""
        return self.is_file() or self.is_dir()

    def read_bytes(self) -> bytes:
        """Return a small object's contents."""
        return self.parent.folder.read("", self.name)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return a small object's contents as text."""
        return self.read_bytes().decode(encoding)

    def open_ranges(self) -> io.BufferedReader:
        """Return the object as a file of which only what is read is fetched."""
        folder, key = self.parent.folder, self.parent.folder.key(self.name)
        size = folder.pin(self.name)

        def fill(start: int, view: memoryview) -> None:
            view[:] = folder.body(key, (start, len(view)))

        def rest(start: int) -> bytes:
            part = s3_folder.PART_BYTES
            spans = (("", self.name, at, min(part, size - at)) for at in range(start, size, part))
            return b"".join(folder.ranges(spans))

        return io.BufferedReader(Ranges(size, fill, rest), READ_AHEAD)


Place = Path | S3Path


def place(location: str | os.PathLike[str]) -> Place:
    """Return a location as something to look at and to read."""
    text = os.fspath(location)
    return S3Path(text) if is_s3(text) else Path(text).expanduser()


def names_in(folder: Place, pattern: str = "*") -> list[str]:
    """Return the names of the files directly in a folder that fit a pattern, in order; none where it is not there."""
    if isinstance(folder, S3Path):
        return sorted(fnmatch.filter(folder.folder.files(), pattern))
    return sorted(path.name for path in folder.glob(pattern) if path.is_file())


@contextmanager
def on_this_machine(location: str) -> Iterator[str]:
    """Yield a location, or for as long as it is used a copy of the file, or of a folder's small files, that S3 has."""
    if not is_s3(location):
        yield location
        return
    there = S3Path(location)
    with tempfile.TemporaryDirectory() as copy:
        if there.is_file():
            (Path(copy) / there.name).write_bytes(there.read_bytes())
            yield os.path.join(copy, there.name)
            return
        for name, size in there.folder.files().items():
            if size <= SMALL_BYTES:
                (Path(copy) / name).write_bytes((there / name).read_bytes())
        yield copy


def private_folder(name: str) -> str:
    """Return a folder of the temporary directory that is this user's alone; it is made where it is missing.

    Everybody may write to the temporary directory, so that the name may be taken: raises `ConfigError` where it is a
    link, another user's, or open to others.
    """
    path = os.path.join(tempfile.gettempdir(), f"{name}-{os.getuid()}")
    try:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be made ({error.strerror}); set TMPDIR to another folder") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} is a link, another user's, or open to others, and what is read from there could be anybody's; "
            "remove it, or set TMPDIR, or for data --data_cache_dir"
        )
    return path
