"""Files read line by line, gzipped or plain, in bounded memory."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
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

GZIP_MAGIC = b"\x1f\x8b"
LINE_BYTES = 64 << 20
"""Longest line that is read: a few kB of gzip may be any number of bytes without an end of line."""
OTHER_MAGIC = {
    b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\3\4": "zip", b"\x04\x22\x4d\x18": "lz4",
}  # fmt: skip
"""Magic bytes of compressions that are not read."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


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

    Lines end at ``\n`` alone. ``tick`` is called with the number of bytes read since its last call. Raises
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
            if number == 1 and line.startswith(BYTE_ORDER_MARK):
                raise DataError(f"{shown}:1: starts with a byte order mark; save it as UTF-8 without one")
            if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise DataError(f"{shown}:1: is UTF-16; save it as UTF-8")
            yield number, line
            if number % 64 == 0:
                tick(raw.tell() - done)
                done = raw.tell()
        tick(raw.tell() - done)
    except InterruptedError:  # of `tick`, not of the file, though an OSError too
        raise
    except GZIP_ERRORS as error:
        what = "gzip stream is damaged or cut short" if zipped else "cannot be read on"
        # The decoder reads ahead of the lines that were yielded.
        number = _lines_before_damage(raw) if zipped else number
        raise DataError(f"{shown}:{number + 1}: {what} ({error}); copy the shard again") from None


def _lines_before_damage(raw: IO[bytes]) -> int:
    """Return how many lines of a gzip stream end before the byte at which it cannot be read on."""
    raw.seek(0)
    lines, decoder = 0, zlib.decompressobj(31)
    with suppress(zlib.error):
        while data := decoder.unused_data or raw.read(1 << 16):
            decoder = zlib.decompressobj(31) if decoder.eof else decoder
            before = decoder.copy()
            try:
                lines += decoder.decompress(data).count(b"\n")
            except zlib.error:
                for at in range(len(data)):
                    lines += before.decompress(data[at : at + 1]).count(b"\n")
    return lines
