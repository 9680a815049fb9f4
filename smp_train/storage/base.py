"""The interface of a storage, and the form of its location."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import BinaryIO, NamedTuple, Protocol

from smp_train.errors import ConfigError, SmpTrainError

SCHEME = "s3://"
VISIBLE_WITHIN_SECONDS = 5.0


class Entry(NamedTuple):
    """Size of a file in bytes, its last change by the storage's clock, and in S3 the version of the content."""

    size: int
    modified: float
    etag: str = ""


class Range(NamedTuple):
    """A range of a file's bytes, from the version ``etag`` of the file if that is set."""

    name: str
    start: int
    length: int
    etag: str = ""


class Storage(Protocol):
    """A folder, or a prefix of a bucket. ``name`` is the path of a file below it, with slashes.

    A folder raises OSError. S3 raises the error class that it was opened with, with the object and a remedy.
    """

    location: str

    def files(self, folder: str = "") -> dict[str, Entry]:
        """Return all files below ``folder`` by their path in it, without links; empty without the folder."""

    def level(self, folder: str = "") -> tuple[dict[str, Entry], list[str]]:
        """Return the files directly in ``folder`` by name, and the sorted names of its subfolders."""

    def entry(self, name: str) -> Entry | None:
        """Return a file's entry, or None if the file does not exist."""

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        return self.entry(name) is not None

    def read(self, name: str) -> bytes:
        """Return a small file's content."""

    def read_if_there(self, name: str) -> bytes | None:
        """Return a small file's content, or None if the file does not exist."""

    def ranges(self, spans: Iterable[Range]) -> Iterator[bytes]:
        """Yield the bytes of each range, in order. S3 fetches ahead, and raises an error if a range is short."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, replacing an older one atomically; durable on return."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Write a small file unless it exists, and return whether it was written.

        Without hard links, readers may see the file empty for a moment. An S3 server without If-None-Match may let
        two simultaneous writers both succeed; one that ignores it always writes.
        """

    def writer(self, name: str, size: int = 0) -> AbstractContextManager[BinaryIO]:
        """Return a stream into a file of about ``size`` bytes, which appears when the context ends without an error."""

    def move(self, name: str, to: str) -> None:
        """Rename a file, replacing an existing one. S3 copies the object and deletes the original."""

    def delete(self, name: str) -> None:
        """Delete a file if it exists, then its folder if that is empty."""

    def delete_folder(self, folder: str, but: Collection[str] = ()) -> None:
        """Delete a folder with all its files; keep the files ``but``, which are directly in it."""

    def discard_unfinished(self, ours: Callable[[str], bool], killed_before: float) -> list[str]:
        """Delete unfinished files whose writers were killed before ``killed_before``; return the files' names.

        Only files for whose name ``ours`` returns True are deleted.
        """

    def now(self) -> float:
        """Return the time by the clock of `Entry.modified`, which may differ from this machine's."""


def is_s3(location: str) -> bool:
    """Return whether a location is in S3."""
    return location.startswith(SCHEME)


def split(location: str, error: type[SmpTrainError] = ConfigError) -> tuple[str, str]:
    """Return bucket and key of ``s3://bucket/key``. Raises ``error`` if there is no bucket."""
    bucket, _, key = location[len(SCHEME) :].partition("/")
    if not bucket:
        raise error(f"{location}: names no bucket; write s3://bucket/prefix")
    return bucket, key


def normal(location: str | os.PathLike[str]) -> str:
    """Return an absolute path, or ``s3://bucket/prefix`` without a slash at the end: one form for each location.

    Raises `ConfigError` for an unsupported kind of URL.
    """
    text = os.fspath(location)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme is None:
        return os.path.abspath(os.path.expanduser(text))
    if not is_s3(text):
        raise ConfigError(f"{text}: {scheme[1]}:// is not supported; give a folder that all nodes share, or s3://")
    bucket, key = split(text)
    return posixpath.join(SCHEME + bucket, posixpath.normpath("/" + key.lstrip("/"))[1:]).rstrip("/")


def parent_of(path: str) -> tuple[str, str]:
    """Return folder and name of a path in normal form. The name of a bucket, or of the root folder, is empty."""
    if is_s3(path) and path.count("/") == 2:
        return path, ""
    return os.path.split(path)


def wait_for(condition: Callable[[], bool]) -> bool:
    """Return whether a condition becomes true within `VISIBLE_WITHIN_SECONDS`.

    A network file system may show another node's file a little late.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
