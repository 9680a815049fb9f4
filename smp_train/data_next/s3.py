"""Objects in S3, or in anything with its protocol: listed, opened, and fetched several at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from smp_train.storage.client import AT_ONCE

if TYPE_CHECKING:
    from smp_train.data_next.files import DataFile

PARTIAL = ".fetch-"
"""Beginning of the names of copies, complete or not; a later fetch of the same version continues them."""


def open_object(path: str, size: int, etag: str) -> io.BufferedReader:
    """Return an object as a file that requests only what is read. Reading raises DataError."""
    raise NotImplementedError


def fetch(
    files: Iterable[DataFile], folder: str, *, at_once: int = AT_ONCE, stop: Callable[[], bool] = lambda: False,
    tick: Callable[[int], None] = lambda done: None,
) -> AbstractContextManager[Iterator[tuple[DataFile, str]]]:  # fmt: skip
    """Return a context with an iterator of (file, path of its local copy), in order; several are fetched ahead.

    A copy begun by an earlier process is continued if the object is still of the same version. The caller deletes each
    copy it takes; untaken copies stay for the next fetch. ``tick`` is called with bytes fetched since its last call,
    from any thread; ``stop`` is asked often, and ends the fetch with InterruptedError. Raises DataError.
    """
    raise NotImplementedError
