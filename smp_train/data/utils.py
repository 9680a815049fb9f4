"""Where shards live, how they are listed, and how their lines are read."""

from __future__ import annotations

import gzip
import io
import os
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from smp_train.errors import DataError

GZIP_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
GzipFile: Any = gzip.GzipFile
try:  # Intel's decoder: 2.8 times as fast as zlib, and on damaged input it stops wherever zlib does.
    from isal import igzip, isal_zlib

    # Annotated by the library as an instance, which it is not.
    GZIP_ERRORS += (cast(type[Exception], isal_zlib.error),)
    GzipFile = igzip.IGzipFile
except ImportError:
    pass

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
GZIP_MAGIC = b"\x1f\x8b"
LINE_BYTES = 64 << 20
"""No row and no document on a line is longer: a few kB of gzip may be any number of bytes without an end of line."""
LINE_SECONDS = 30.0
"""Between lines about progress where there is no terminal."""


@dataclass(frozen=True)
class Shard:
    """One file of rows, as it was when the folder was listed."""

    path: str
    """Where it is: a path, or ``s3://bucket/key``."""
    name: str
    """Its name within the data set."""
    size: int
    mtime_ns: int
    etag: str = ""
    """What S3 calls this version of its content."""


def stem(name: str) -> str:
    """Return a shard's name without the suffixes that say how it is stored."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def _shard(path: Path) -> tuple[Shard, tuple[int, int]]:
    """Return the shard, and what tells its file from all others."""
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); remove it or mend the link") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path}: is not a regular file; move it out of the data folder")
    if status.st_size == 0:
        raise DataError(f"{path}: empty shard (0 bytes); write it again or remove it")
    return Shard(str(path), path.name, status.st_size, status.st_mtime_ns), (status.st_dev, status.st_ino)


def _refuse_duplicates(found: list[tuple[Shard, tuple[int, int]]]) -> None:
    by_stem: dict[str, Shard] = {}
    by_file: dict[tuple[int, int], Shard] = {}
    for shard, file in found:
        twin = by_stem.setdefault(stem(shard.name), shard)
        how = f"{twin.name} is beside it"
        if twin is shard:
            twin = by_file.setdefault(file, shard)
            how = f"is the same file as {twin.name}"
        if twin is not shard:
            raise DataError(f"{shard.path}: {how}, so its rows would count twice; remove one of the two")


def list_shards(location: str, zipped: bool | None = None) -> list[Shard]:
    """List the shards of a folder (or the one file given), by name.

    Hidden files and names that start with ``_`` are no shards. ``zipped`` only checks: True or False raises
    when a shard is stored the other way; None asks nothing. Raises DataError when there is no shard or one
    is unusable.
    """
    found, within = _s3_folder(location) if location.startswith("s3://") else _folder(location)
    if not found:
        hint = f"; its subfolders are {', '.join(within[:5])}: give one of those" if within else ""
        raise DataError(f"{location}: no shard in this folder ({', '.join('*' + s for s in SUFFIXES)}){hint}")
    _refuse_duplicates(found)
    shards = [shard for shard, _ in found]
    if zipped is not None:
        for shard in shards:
            # Of an object in S3 the name is all that can be looked at before it is fetched.
            is_zipped = shard.name.endswith(".gz") if shard.etag else is_gzip(shard.path)
            if is_zipped != zipped:
                kind = "plain" if zipped else "gzipped"
                raise DataError(
                    f"{shard.path}: is {kind}, but --zipped_data is {int(zipped)}; leave the flag out"
                )
    return shards


def is_shard_name(name: str) -> bool:
    """Tell whether a file of this name is taken for a shard."""
    return name.endswith(SUFFIXES) and name[0] not in "._"


def _folder(location: str) -> tuple[list[tuple[Shard, tuple[int, int]]], list[str]]:
    """Return the shards of a folder, or the one file given, and the names of folders in it."""
    folder = Path(location)
    if folder.is_file():
        return [_shard(folder)], []
    if not folder.is_dir():
        raise DataError(f"{location}: no such data folder; check --training_dir and --test_dir")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(f"{location}: cannot be listed ({error.strerror})") from None
    within = [name for name in names if name[0] not in "._" and (folder / name).is_dir()]
    found = [_shard(folder / name) for name in names if is_shard_name(name) and name not in within]
    return found, within


def _s3_folder(location: str) -> tuple[list[tuple[Shard, tuple[int, int]]], list[str]]:
    from smp_train.data.s3 import list_folder

    objects, within = list_folder(location)
    found = [shard for shard in objects if is_shard_name(shard.name)]
    for shard in found:
        if shard.size == 0:
            raise DataError(f"{shard.path}: empty shard (0 bytes); write it again or remove it")
    return [(shard, (-1, number)) for number, shard in enumerate(found)], within


def is_gzip(path: str) -> bool:
    """Tell by content, not by name, whether a file is gzipped."""
    with open_file(path) as file:
        return file.read(2) == GZIP_MAGIC


def open_file(path: str) -> IO[bytes]:
    """Open for reading; DataError instead of OSError."""
    try:
        return open(path, "rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


def open_gzip_writer(raw: IO[bytes], level: int = 2) -> IO[bytes]:
    """Compress into ``raw`` with no name or time in the header: the same rows give the same bytes."""
    opened: IO[bytes] = GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=level)
    return opened


def read_lines(
    path: str, tick: Callable[[int], None] = lambda done: None, *, shown: str | None = None
) -> Iterator[tuple[int, bytes]]:
    r"""Yield (line number from 1, line), blank lines left out but counted.

    Lines end at ``\n`` alone. ``tick`` is told of every few bytes of the file that have been read. Raises
    DataError with the line when the gzip stream is damaged or cut short; messages call the file ``shown``.
    """
    with open_file(path) as raw:
        yield from lines_of(raw, shown or path, tick)


def lines_of(
    raw: IO[bytes], shown: str, tick: Callable[[int], None] = lambda done: None
) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of an open file as `read_lines` does; ``raw`` can seek."""
    number = done = 0
    zipped = raw.read(2) == GZIP_MAGIC
    raw.seek(0)
    lines: IO[bytes] = io.BufferedReader(GzipFile(fileobj=raw, mode="rb"), 1 << 20) if zipped else raw
    try:
        for number, line in enumerate(iter(partial(lines.readline, LINE_BYTES + 1), b""), 1):
            if len(line) > LINE_BYTES:
                raise DataError(
                    f"{shown}:{number}: the line has more than {LINE_BYTES >> 20} MiB; "
                    "write each row, or each document, on a line of its own"
                )
            if line.isspace():
                continue
            if number == 1:
                refuse_byte_order_mark(shown, line)
            yield number, line
            if number % 64 == 0:
                tick(raw.tell() - done)
                done = raw.tell()
        tick(raw.tell() - done)
    except InterruptedError:
        # That is an OSError too, but ``tick``'s: nothing is wrong with the file.
        raise
    except GZIP_ERRORS as error:
        what = "gzip stream is damaged or cut short" if zipped else "cannot be read on"
        raise DataError(f"{shown}:{number + 1}: {what} ({error}); copy the shard again") from None


def refuse_byte_order_mark(path: str, line: bytes) -> None:
    """Raise DataError when a file starts as UTF-16 or with UTF-8's mark, neither of which is JSON."""
    if line.startswith(b"\xef\xbb\xbf"):
        raise DataError(f"{path}:1: starts with a byte order mark; save it as UTF-8 without one")
    if line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}:1: is UTF-16; save it as UTF-8")


class Progress:
    """A tqdm bar on a terminal; elsewhere a line every half minute. ``units`` is what is counted: bytes, rows."""

    def __init__(self, what: str, total: int | None, unit: str, shown: bool = True) -> None:
        self._bar: Any = None
        self._what, self._total, self._unit, self._shown = what, total, unit.strip(), shown
        self._pending = self._done = 0
        self._due = 0.0
        if shown and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(
                total=total, desc=what, unit=unit, unit_scale=True, dynamic_ncols=True, leave=False
            )
        else:
            self._due = time.monotonic() + LINE_SECONDS

    def update(self, done: int) -> None:
        """Count ``done`` more units."""
        self._pending += done
        self._done += done
        if not self._shown or time.monotonic() < self._due:
            return
        if self._bar is not None:
            self._bar.update(self._pending)
            self._pending = 0
            self._due = time.monotonic() + 0.1
        else:
            of = f" of {self._total}" if self._total else ""
            print(f"{self._what}: {self._done}{of} {self._unit}", file=sys.stderr, flush=True)
            self._due = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.update(self._pending)
            self._bar.close()
