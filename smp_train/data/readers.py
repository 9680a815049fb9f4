"""Reads the numbered records of one file: lines of JSON, rows of tables, or a whole text."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any, cast

from smp_train.data import hub, s3, tables
from smp_train.errors import DataError
from smp_train.storage import is_s3

if TYPE_CHECKING:
    from smp_train.data.files import DataFile

GZIP_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
GzipFile: Any = gzip.GzipFile
compress: Callable[..., bytes] = gzip.compress
try:  # Intel's decoder is 2.8 times as fast as zlib, and detects the same damage.
    from isal import igzip, isal_zlib

    # isal annotates its exception class as an instance.
    GZIP_ERRORS += (cast(type[Exception], isal_zlib.error),)
    GzipFile, compress = igzip.IGzipFile, igzip.compress
except ImportError:
    pass

Record = bytes | dict[str, Any] | str | UnicodeDecodeError
"""A line of JSON, a row of a table by column, a whole text, or the exception for a text that is not UTF-8."""
LINE_BYTES = 64 << 20
"""Longest line that is read: without a limit a small gzip file could fill the memory."""
TEXT_BYTES = 256 << 20
"""Largest text file that is read after decompression: the whole file is one record."""
TICK_LINES = 64
GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
"""The byte order marks of UTF-8 and UTF-16."""


def records(
    file: DataFile, fields: Sequence[str] | None = None, *, first: int = 0, step: int = 1,
    raw: io.BufferedReader | None = None, tick: Callable[[int], None] = lambda done: None,
) -> Iterator[tuple[int, int, Record]]:  # fmt: skip
    """Yield (index from 0, number of the line or row from 1, record) for each record in a file.

    Blank lines are no records, but are counted in the line numbers. From a table, only the columns ``fields`` that
    exist are read; by default, all columns. Every ``step``-th record from index ``first`` on is yielded. ``raw`` is the
    open file if the caller has opened it. ``tick`` is called with the bytes read since its last call.

    Raises DataError, with file and line, if the file is damaged.
    """
    if file.kind == "hub":
        yield from tables.rows(hub.batches(file, first), fields, first, step)
        return
    with raw or open_file(file) as raw:
        if file.kind == "lines":
            for index, (number, line) in enumerate(read_lines(raw, file.shown, tick)):
                if index >= first and (index - first) % step == 0:
                    yield index, number, line
        elif file.kind == "text":
            if first == 0:
                yield 0, 1, _whole_text(raw, file.shown)
            tick(file.size)
        else:
            yield from tables.rows(tables.batches(file, raw, fields, first, tick), fields, first, step)


def open_file(file: DataFile) -> io.BufferedReader:
    """Open a local file, or an object in S3, for reading and seeking. Raises DataError."""
    if is_s3(file.path):
        return s3.open_object(file)
    try:
        raw = open(file.path, "rb")  # noqa: SIM115
    except OSError as error:
        raise DataError(f"{file.path}: cannot be read ({error.strerror})") from None
    size = os.fstat(raw.fileno()).st_size
    if size != file.size:
        raw.close()
        raise DataError(
            f"{file.path}: has {size} bytes, and had {file.size} when it was listed; start again when it is complete"
        )
    return raw


def read_lines(raw: io.BufferedReader, shown: str, tick: Callable[[int], None]) -> Iterator[tuple[int, bytes]]:
    r"""Yield (number from 1, line) for every non-blank line of a plain or gzipped file; only ``\n`` ends a line."""
    number = done = 0
    zipped = raw.peek(len(GZIP_MAGIC)).startswith(GZIP_MAGIC)
    lines: IO[bytes] = io.BufferedReader(GzipFile(fileobj=raw, mode="rb"), 1 << 20) if zipped else raw
    try:
        for number, line in enumerate(iter(partial(lines.readline, LINE_BYTES + 1), b""), 1):
            if len(line) > LINE_BYTES:
                raise DataError(
                    f"{shown}:{number}: the line has more than {LINE_BYTES >> 20} MiB; write one record per line"
                )
            if line.isspace():
                continue
            yield number, line
            if number % TICK_LINES == 0:
                tick(raw.tell() - done)
                done = raw.tell()
        tick(raw.tell() - done)
    except GZIP_ERRORS as error:
        # The decoder reads ahead: the damage may lie many lines after the last line that was yielded.
        reason = "gzip stream is damaged or cut short" if zipped else f"cannot be read after line {number}"
        raise DataError(f"{shown}: {reason} ({error}); copy the file again") from None


def _whole_text(raw: IO[bytes], shown: str) -> str | UnicodeDecodeError:
    try:
        content = raw.read(TEXT_BYTES + 1)
        if content.startswith(GZIP_MAGIC):
            content = GzipFile(fileobj=io.BytesIO(content), mode="rb").read(TEXT_BYTES + 1)
    except GZIP_ERRORS as error:
        raise DataError(f"{shown}: is damaged or cut short ({error}); copy it again") from None
    if len(content) > TEXT_BYTES:
        raise DataError(
            f"{shown}: is one text of more than {TEXT_BYTES >> 20} MiB; divide it, or write its documents as JSON lines"
        )
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return error


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return the problem with text that is not UTF-8: "reason; what to do"."""
    return f"byte {error.start} is not UTF-8 ({error.reason}); save it as UTF-8"


def parse_object(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ValueError, "reason; what to do", also for a key that occurs twice."""
    if line.lstrip().startswith(BYTE_ORDER_MARKS):
        raise ValueError("starts with a byte order mark, or is UTF-16; save it as UTF-8 without a byte order mark")
    array = "is a JSON array; one object per line is needed: jq -c '.[]'"
    try:
        record = DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from None
    except (ValueError, RecursionError) as error:
        reason = f"broken JSON ({error}); one whole object per line is needed"
        raise ValueError(array if line.lstrip()[:1] == b"[" else reason) from None
    if not isinstance(record, dict):
        raise ValueError(array if isinstance(record, list) else "no object in this line; write one object per line")
    return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} is given twice")
    return record


DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=int)
"""Refuses a key that occurs twice, and also NaN and Infinity, since `int` raises ValueError for them."""
