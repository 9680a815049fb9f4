"""The documents of one file: a text file is one; so is a line of JSON, a row of parquet, a row of a hub's data set."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import IO, Any

from smp_train.data import s3
from smp_train.data.text.files import PARQUET_SUFFIXES, TextFile
from smp_train.data.utils import GZIP_ERRORS, GZIP_MAGIC, GzipFile, lines_of, open_file
from smp_train.errors import ConfigError, DataError

try:
    from orjson import loads
except ImportError:
    loads: Callable[[bytes], Any] = json.loads  # type: ignore[no-redef]


def open_bytes(file: TextFile) -> IO[bytes]:
    """Open a local file or an object in S3, seekable. Raises DataError."""
    if s3.is_s3(file.path):
        return s3.open_ranges(file.path, file.size, file.version)
    return open_file(file.path)


def documents(
    file: TextFile, column: str = "text", *, start: int = 0, part: int = 0, parts: int = 1
) -> Iterator[tuple[int, str]]:
    """Yield (number from 1: of the line or row, text) of the documents of a file, or of a part of it.

    Part p of n is every n-th document from the p-th on; ``start`` of the part's own are left out, unparsed. A text
    file is one document, with number 1. Documents without a visible character come as empty texts. Raises DataError
    with file and line.
    """
    found: Iterator[tuple[int, str]]
    if file.split is not None:
        rows = file.split.documents(file.shard, column, start * parts + part)
        found = ((number, text) for place, (number, text) in enumerate(rows) if place % parts == 0)
    elif file.name.endswith(PARQUET_SUFFIXES):
        found = _of_parquet(file, column, start, part, parts)
    elif file.holds_many:
        found = _of_lines(file, column, start, part, parts)
    else:
        found = iter([(1, _whole(file))] if part == start == 0 else [])
    for number, text in found:
        yield number, text if text.strip() else ""


def _of_lines(file: TextFile, column: str, start: int, part: int, parts: int) -> Iterator[tuple[int, str]]:
    first = start * parts + part
    with open_bytes(file) as raw:
        for place, (number, line) in enumerate(lines_of(raw, file.path)):
            if place >= first and (place - part) % parts == 0:
                yield number, _text_of(file, number, line, column)


def _text_of(file: TextFile, number: int, line: bytes, column: str) -> str:
    try:
        record = loads(line)
    except ValueError as error:
        raise DataError(f"{file.path}:{number}: broken JSON ({error}); one object per line is needed") from None
    text = record.get(column) if isinstance(record, dict) else None
    if not isinstance(text, str):
        hint = "set --text_column" if isinstance(record, dict) else "one object per line is needed"
        if isinstance(record, dict) and "input_ids" in record:
            hint = "these are tokens already: give them by --training_dir"
        raise DataError(f'{file.path}:{number}: no "{column}" string in this line; {hint}')
    return text


def _whole(file: TextFile) -> str:
    with open_bytes(file) as raw:
        try:
            content = raw.read()
            if content.startswith(GZIP_MAGIC):
                content = GzipFile(fileobj=io.BytesIO(content), mode="rb").read()
        except GZIP_ERRORS as error:
            raise DataError(f"{file.path}: is damaged or cut short ({error}); copy it again") from None
    # A stray byte in one of ten thousand sources is no reason to stop; U+FFFD marks the place.
    return content.decode("utf-8", errors="replace")


def _of_parquet(file: TextFile, column: str, start: int, part: int, parts: int) -> Iterator[tuple[int, str]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"{file.path}: parquet needs the package pyarrow: pip install 'smp-train[text]'") from None
    first = start * parts + part
    with open_bytes(file) as raw:
        try:
            opened: Any = pq.ParquetFile(raw)
            if column not in opened.schema_arrow.names:
                has = ", ".join(opened.schema_arrow.names)
                raise DataError(f"{file.path}: no column {column} (it has {has}); set --text_column")
            before = 0
            for group in range(opened.num_row_groups):
                rows = opened.metadata.row_group(group).num_rows
                if before + rows > first:
                    for place, text in enumerate(_of_group(opened, group, column), before):
                        if place >= first and (place - part) % parts == 0:
                            if not isinstance(text, str):
                                raise DataError(f"{file.path}: row {place + 1}: column {column} holds no text")
                            yield place + 1, text
                before += rows
        except (pa.ArrowException, OSError) as error:
            why = " ".join(str(error).split())
            raise DataError(f"{file.path}: is damaged or not parquet ({why}); copy it again") from None


def _of_group(opened: Any, group: int, column: str) -> Iterator[Any]:
    for batch in opened.iter_batches(batch_size=1024, row_groups=[group], columns=[column]):
        yield from batch.column(0).to_pylist()
