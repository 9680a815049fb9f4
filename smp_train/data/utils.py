"""Where shards live, how they are listed, and how their lines are read."""

from __future__ import annotations

import gzip
import io
import logging
import os
import stat
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from smp_train.distributed import ALL_RANKS
from smp_train.errors import DataError

logger = logging.getLogger("smp_train.data")

GZIP_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
GzipFile: Any = gzip.GzipFile
try:  # Intel's decoder: 2.8 times as fast as zlib, and on damaged input it stops wherever zlib does.
    from isal import igzip, isal_zlib

    # Annotated by the library as an instance, which it is not.
    GZIP_ERRORS += (cast(type[Exception], isal_zlib.error),)
    GzipFile = igzip.IGzipFile
except ImportError:
    pass

SUFFIXES = (".json", ".jsonl", ".ndjson", ".json.gz", ".jsonl.gz", ".ndjson.gz")
"""Of shards, in small letters or capitals."""
GZIP_MAGIC = b"\x1f\x8b"
LINE_BYTES = 64 << 20
"""No row and no document on a line is longer: a few kB of gzip may be any number of bytes without an end of line."""
OTHER_MAGIC = {
    b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\3\4": "zip", b"\x04\x22\x4d\x18": "lz4",
}  # fmt: skip
"""How files begin whose compression is not read."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
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
        if name.lower().endswith(suffix):
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

    Hidden files and names that start with ``_`` are no shards; of others a warning says so. ``zipped`` only checks:
    True or False raises when a shard is stored the other way; None asks nothing. Raises DataError when there is no
    shard or one is unusable.
    """
    found, others, within = _s3_folder(location) if location.startswith("s3://") else _folder(location)
    if not found:
        hint = f"; its subfolders are {', '.join(within[:5])}: give one of those" if within else ""
        raise DataError(f"{location}: no shard in this folder ({', '.join('*' + s for s in SUFFIXES)}){hint}")
    say_left_out(location, others, within)
    _refuse_duplicates(found)
    shards = [shard for shard, _ in found]
    if zipped is not None:
        for shard in shards:
            # Of an object in S3 the name is all that can be looked at before it is fetched.
            is_zipped = shard.name.lower().endswith(".gz") if shard.etag else is_gzip(shard.path)
            if is_zipped != zipped:
                kind = "plain" if zipped else "gzipped"
                raise DataError(
                    f"{shard.path}: is {kind}, but --zipped_data is {int(zipped)}; leave the flag out"
                )
    return shards


def is_shard_name(name: str) -> bool:
    """Tell whether a file of this name is taken for a shard."""
    return name.lower().endswith(SUFFIXES) and name[0] not in "._"


def say_left_out(location: str, names: Iterable[str], folders: Iterable[str] = ()) -> None:
    """Warn, once in a process, of what is in a folder and not read, by kinds of names."""
    kinds = Counter(f"*{os.path.splitext(name)[1]}" for name in names if name[0] not in "._")
    said = [f"{number} {kind}" for kind, number in kinds.most_common(5)] + [f"{name}/" for name in sorted(folders)[:5]]
    if said:
        more = len(kinds) > 5 or len(list(folders)) > 5
        _warn_once(f"{location}: left out, as it is not read: {', '.join(said)}{' and more' if more else ''}")


@cache
def _warn_once(text: str) -> None:
    logger.warning(text, extra=ALL_RANKS)


def _folder(location: str) -> tuple[list[tuple[Shard, tuple[int, int]]], list[str], list[str]]:
    """Return the shards of a folder, or the one file given, and the names of other files and of folders in it."""
    folder = Path(location)
    if folder.is_file():
        return [_shard(folder)], [], []
    if not folder.is_dir():
        raise DataError(f"{location}: no such data folder; check --training_dir and --test_dir")
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise DataError(f"{location}: cannot be listed ({error.strerror})") from None
    within = [name for name in names if name[0] not in "._" and (folder / name).is_dir()]
    found = [_shard(folder / name) for name in names if is_shard_name(name) and name not in within]
    return found, [name for name in names if not is_shard_name(name) and not (folder / name).is_dir()], within


def _s3_folder(location: str) -> tuple[list[tuple[Shard, tuple[int, int]]], list[str], list[str]]:
    from smp_train.data.s3 import list_folder

    objects, within = list_folder(location)
    found = [shard for shard in objects if is_shard_name(shard.name)]
    for shard in found:
        if shard.size == 0:
            raise DataError(f"{shard.path}: empty shard (0 bytes); write it again or remove it")
    others = [shard.name for shard in objects if not is_shard_name(shard.name)]
    return [(shard, (-1, number)) for number, shard in enumerate(found)], others, within


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
    head = raw.read(8)
    zipped = head.startswith(GZIP_MAGIC)
    for magic, name in OTHER_MAGIC.items():
        if head.startswith(magic):
            raise DataError(f"{shown}: is compressed with {name}, which is not read; unpack it, or use gzip")
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
        if zipped:
            # The decoder reads ahead of the lines that were yielded.
            number = _lines_before_damage(raw)
        raise DataError(f"{shown}:{number + 1}: {what} ({error}); copy the shard again") from None


def _lines_before_damage(raw: IO[bytes]) -> int:
    """Return how many lines of a gzip stream end before the place where it cannot be read on."""
    raw.seek(0)
    lines, data, decoder = 0, b"", zlib.decompressobj(31)
    while data := data or raw.read(1 << 16):
        before = decoder.copy()
        try:
            lines += decoder.decompress(data).count(b"\n")
        except zlib.error:
            with suppress(zlib.error):
                for place in range(len(data)):
                    lines += before.decompress(data[place : place + 1]).count(b"\n")
            return lines
        data = decoder.unused_data
        if decoder.eof:
            decoder = zlib.decompressobj(31)
    return lines


def refuse_byte_order_mark(path: str, line: bytes) -> None:
    """Raise DataError when a file starts as UTF-16 or with UTF-8's mark, neither of which is JSON."""
    if line.startswith(BYTE_ORDER_MARK):
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
