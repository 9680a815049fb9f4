"""Paths to read from, on a file system or in S3, with the methods of `pathlib`."""

from __future__ import annotations

import fnmatch
import io
import os
import posixpath
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from smp_train.errors import CheckpointError, ConfigError, SmpTrainError
from smp_train.storage import s3
from smp_train.storage.base import Entry, Range, normal
from smp_train.storage.client import is_s3, split
from smp_train.storage.ranges import RangeFile

READ_AHEAD = 1 << 18
"""Bytes of one request of an object that is read as a file."""
SMALL_BYTES = 1 << 26
"""Largest file that is taken for part of a tokenizer; weights are larger."""
TEMPORARY = "smp-train-copy-"
"""Beginning of the names of temporary folders."""


class S3Path:
    """``s3://bucket/key``: an object, or a folder of them. What S3 refuses is a `CheckpointError`."""

    def __init__(self, location: str) -> None:
        split(location, CheckpointError)
        self._text = normal(location)
        self.storage = s3.S3Storage(self._text)
        """What is below it."""

    def __str__(self) -> str:
        return self._text

    def __fspath__(self) -> str:
        return self._text

    def __truediv__(self, name: str) -> S3Path:
        return S3Path(f"{self._text}/{name}")

    @property
    def name(self) -> str:
        """What comes after the last slash; empty for a bucket."""
        return posixpath.basename(self.storage.prefix)

    @property
    def parent(self) -> S3Path:
        """The folder it is in."""
        return S3Path(self._text.rpartition("/")[0]) if self.name else self

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        return bool(self.name) and self.storage.exists("")

    def is_dir(self) -> bool:
        """Return whether there is anything below it."""
        return not self.storage.is_empty()

    def exists(self) -> bool:
        """Return whether there is such an object, or anything below it."""
        return self.is_file() or self.is_dir()

    def read_bytes(self) -> bytes:
        """Return a small object's content."""
        return self.storage.read("")

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return a small object's content as text."""
        return self.read_bytes().decode(encoding)

    def entry(self) -> Entry:
        """Return the object's size and version."""
        found = self.storage.entry("", missing=())
        assert found is not None
        return found

    def open_ranges(self, entry: Entry, read_ahead: int = READ_AHEAD) -> io.BufferedReader:
        """Return the object, of the version of ``entry``, as a file of which only what is read is fetched."""

        def rest(start: int) -> bytes:
            starts = range(start, entry.size, s3.PART_BYTES)
            wanted = (Range("", at, min(s3.PART_BYTES, entry.size - at), entry.etag) for at in starts)
            return b"".join(self.storage.ranges(wanted))

        def read(start: int, length: int) -> bytes:
            return self.storage.read_range("", start, length, entry.etag)

        return io.BufferedReader(RangeFile(entry.size, read, rest), read_ahead)


Place = Path | S3Path


def place(location: str | os.PathLike[str]) -> Place:
    """Return a location as something to look at and to read."""
    text = os.fspath(location)
    return S3Path(text) if is_s3(text) else Path(text).expanduser()


def names_in(folder: Place, pattern: str = "*") -> list[str]:
    """Return the names of the files directly in a folder that fit a pattern, in order; none where it is not there."""
    if isinstance(folder, S3Path):
        return sorted(fnmatch.filter(folder.storage.level()[0], pattern))
    return sorted(path.name for path in folder.glob(pattern) if path.is_file())


@contextmanager
def temporary(name: str, called: str = "") -> Iterator[str]:
    """Yield a temporary folder; failures in the body, of any rank, name ``name`` in its place.

    ``called`` is a regular expression of what is replaced with it.
    """
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        try:
            yield folder
        except SmpTrainError as failure:
            failure.args = (re.sub(rf"{called}[^\s']*/{TEMPORARY}\w+", lambda _: name, str(failure)),)
            raise


@contextmanager
def on_this_machine(location: str) -> Iterator[str]:
    """Yield a location, or for as long as it is used a copy of the file, or of a folder's small files, that S3 has."""
    if not is_s3(location):
        yield location
        return
    there = S3Path(location)
    is_file = there.is_file()
    with temporary(str(there.parent if is_file else there)) as copy:
        if is_file:
            (Path(copy) / there.name).write_bytes(there.read_bytes())
            yield os.path.join(copy, there.name)
            return
        for name, entry in there.storage.level()[0].items():
            if entry.size <= SMALL_BYTES:
                (Path(copy) / name).write_bytes(there.storage.read(name))
        yield copy


def private_folder(name: str, parent: str | None = None) -> str:
    """Return a folder of the temporary directory, or of ``parent``, that is this user's alone; it is made if missing.

    Everybody may write there, so that the name may be taken: raises `ConfigError` where it is a
    link, another user's, or open to others.
    """
    path = os.path.join(parent or tempfile.gettempdir(), f"{name}-{os.getuid()}")
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
