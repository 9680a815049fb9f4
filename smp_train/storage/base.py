"""What a place to store files in can do, whichever kind it is of."""

from __future__ import annotations

import os
import posixpath
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import BinaryIO, NamedTuple, Protocol

from smp_train.errors import ConfigError
from smp_train.storage.client import SCHEME, is_s3, split

VISIBLE_WITHIN_SECONDS = 5.0


class Entry(NamedTuple):
    """A file: its bytes, the time of its last change by the storage's clock, and in S3 the version of its content."""

    size: int
    modified: float
    etag: str = ""


class Range(NamedTuple):
    """Bytes of a file, of the version ``etag`` where that is given."""

    name: str
    start: int
    length: int
    etag: str = ""


class Storage(Protocol):
    """A folder, or a prefix of a bucket. ``name`` is the path of a file below it, with slashes.

    A folder raises OSError, S3 the error that it was opened with, which names the object and what to do.
    """

    location: str

    def files(self, folder: str = "") -> dict[str, Entry]:
        """Return all files below ``folder`` by their path there; links are left out. Empty where it does not exist."""

    def level(self, folder: str = "") -> tuple[dict[str, Entry], list[str]]:
        """Return the files directly in ``folder`` by name, and the names of the folders in it, in order."""

    def entry(self, name: str) -> Entry | None:
        """Return what is known of a file; None where it is not there."""

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""

    def read(self, name: str) -> bytes:
        """Return a small file's content."""

    def read_if_there(self, name: str) -> bytes | None:
        """Return a small file's content, None if there is no such file."""

    def ranges(self, wanted: Iterable[Range]) -> Iterator[bytes]:
        """Yield each range in order. In S3 the next ones are fetched meanwhile, and less than asked for is an error."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, which replaces an older one at once; durable on return."""

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Do the same unless there is such a file; return whether it was done.

        Of two writers in the same moment one may overwrite the other on servers that ignore If-None-Match.
        """

    def writer(self, name: str, size: int = 0) -> AbstractContextManager[BinaryIO]:
        """Return a stream into a file of about ``size`` bytes; it is there when the context ends without an error."""

    def move(self, name: str, to: str) -> None:
        """Rename a file, in place of an older one. In S3 this is a copy and a deletion."""

    def delete(self, name: str) -> None:
        """Remove a file, if it is there, and the folders that it was in if they are empty."""

    def delete_folder(self, folder: str, but: Collection[str] = ()) -> None:
        """Remove all files below ``folder``, and the folder; or all but the files ``but`` directly in it."""

    def discard_unfinished(self, ours: Callable[[str], bool], before: float) -> list[str]:
        """Remove what writers killed before that time have left of files that are ``ours``; return their names.

        In a folder these are also empty folders, whose names end with a slash.
        """

    def now(self) -> float:
        """Return the time by the clock that `Entry.modified` is of; the machine's own may differ."""


def normal(location: str | os.PathLike[str]) -> str:
    """Return a location in its one normal form: an absolute path, or ``s3://bucket/prefix`` without a slash at the end.

    Raises `ConfigError` for another kind of URL.
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
    """Return (folder, name) of a path in normal form; of a bucket or the root folder that itself and no name."""
    if is_s3(path) and path.count("/") == 2:
        return path, ""
    return os.path.split(path)


def wait_for(seen: Callable[[], bool]) -> bool:
    """Ask ``seen`` until it says yes or `VISIBLE_WITHIN_SECONDS` have passed; return what it said last.

    A network file system may show what another node has written a little late.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not seen():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
