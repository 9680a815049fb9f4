"""One file of documents: a text file is one document; so is a line of JSON, and a row of parquet, Arrow or the hub."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from smp_train.data import s3
from smp_train.data.arrow_file import END_MARK
from smp_train.data.bad_rows import leave_out
from smp_train.data.lines import BYTE_ORDER_MARK, GZIP_ERRORS, GZIP_MAGIC, GzipFile, lines_of, open_file
from smp_train.data.text.fields import TEXTS, Document, Fields
from smp_train.errors import ConfigError, DataError, install

if TYPE_CHECKING:
    from smp_train.data.text.hub import Split

try:
    from orjson import loads
except ImportError:
    loads: Callable[[bytes], Any] = json.loads  # type: ignore[no-redef]

UNPACKED_BYTES = 256 << 20
"""Of a text file that is gzipped, which is one document."""
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".txt.gz")
LINES_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz", ".ndjson", ".ndjson.gz")
LOOKED_INTO = ".json"
"""A file of this suffix is taken when its first line is an object with the field of the text."""
PARQUET_SUFFIX = ".parquet"
TABLE_SUFFIXES = (PARQUET_SUFFIX, ".arrow")


@dataclass(frozen=True)
class TextFile:
    """One file of documents, as it was when it was listed."""

    path: str
    """A path, ``s3://bucket/key``, or the name of a data set of the hub."""
    name: str
    """Its name within its data set."""
    size: int
    """Bytes; 0 where they are not known."""
    version: str = ""
    """Differs between contents of the same name: the modification time, or S3's ETag."""
    split: Split | None = None
    """The data set of the hub that this is a shard of."""
    shard: int = 0

    @property
    def kind(self) -> str:
        """The reader that it is for: ``hub``, ``table``, ``lines``, or ``whole``."""
        name = self.name.lower()
        if self.split is not None:
            return "hub"
        if name.endswith(TABLE_SUFFIXES):
            return "table"
        return "lines" if name.endswith((*LINES_SUFFIXES, LOOKED_INTO)) else "whole"

    @property
    def remote(self) -> bool:
        """True of objects in S3 and shards of the hub, whose size of 0 means that it is not known."""
        return self.split is not None or s3.is_s3(self.path)

    @property
    def shown(self) -> str:
        """What messages call it."""
        return self.path if self.split is None else f"{self.path}/{self.name}"

    def at(self, number: int) -> str:
        """What messages call a document, by its number from 1."""
        kind = self.kind
        return self.path if kind == "whole" else f"{self.path}:{number}" if kind == "lines" else (
            f"{self.shown}: row {number}"
        )

    def open(self) -> IO[bytes]:
        """Open a local file or an object in S3, seekable. Raises DataError."""
        return s3.open_ranges(self.path, self.size, self.version) if s3.is_s3(self.path) else open_file(self.path)


def documents(
    file: TextFile,
    fields: Fields = TEXTS,
    *,
    start: int = 0,
    part: int = 0,
    parts: int = 1,
    left_out: Callable[[str], None] | None = None,
) -> Iterator[tuple[int, Document]]:
    """Yield (number from 1: of the line or row, document) of a file, or of a part of it.

    Part p of n is every n-th document from the p-th on; ``start`` of the part's own are left out, unparsed. A text
    file is one document, with number 1. Documents without a visible character come as empty texts, and so do malformed
    ones where there is a ``left_out`` to count them: so the others keep their index. Raises DataError with file and
    line; always where a file is damaged, as it is not known what is missing.
    """
    first = start * parts + part
    for index, number, values in _records(file, fields, first):
        if index < first or (index - part) % parts:
            continue
        document: Document = ""
        try:
            document = fields.document(_fields_of(file, number, values, fields))
        except UnicodeDecodeError as error:
            why = f"byte {error.start} is not UTF-8 ({error.reason}); save it as UTF-8"
            leave_out(f"{file.at(number)}: {why}", left_out)
        except ValueError as error:
            leave_out(f"{file.at(number)}: {error}", left_out)
        yield number, document


def _records(file: TextFile, fields: Fields, first: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (index from 0, number from 1, a line or the values of the fields) of records.

    Those before index ``first`` may be missing.
    """
    if file.kind in ("hub", "table"):
        tables = _tables(file, fields, first) if file.split is None else file.split.tables(file.shard, fields, first)
        for before, columns in tables:
            for index, values in enumerate(zip(*map(_values, columns), strict=True), before):
                yield index, index + 1, values
    elif file.kind == "lines":
        with file.open() as raw:
            for index, (number, line) in enumerate(lines_of(raw, file.path)):
                yield index, number, line
    elif first == 0:
        yield 0, 1, (_whole(file),)


def record_of(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ValueError: reason; what to do."""
    if line.lstrip().startswith(BYTE_ORDER_MARK):
        raise ValueError("starts with a byte order mark, as where files were joined; remove it")
    try:
        record = loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"broken JSON ({error}); one object per line is needed") from None
    if not isinstance(record, dict):
        raise ValueError("no object in this line; one object per line is needed")
    return record


def _fields_of(file: TextFile, number: int, values: Any, fields: Fields) -> Sequence[Any]:
    """Return the values of the fields, out of a line where ``values`` are that. Raises ValueError and DataError."""
    if not isinstance(values, bytes):
        return tuple(values)
    record = record_of(values)
    if "input_ids" in record and not all(name in record for name in fields.names):
        hint = "these are tokens already: give them by --training_dir"
        raise DataError(f"{file.at(number)}: no {' and '.join(fields.names)} in this line; {hint}")
    return [record.get(name) for name in fields.columns(record)]


def _whole(file: TextFile) -> str | ValueError:
    with file.open() as raw:
        try:
            content = raw.read()
            zipped = content.startswith(GZIP_MAGIC)
            if zipped:
                content = GzipFile(fileobj=io.BytesIO(content), mode="rb").read(UNPACKED_BYTES + 1)
        except GZIP_ERRORS as error:
            raise DataError(f"{file.path}: is damaged or cut short ({error}); copy it again") from None
    if zipped and len(content) > UNPACKED_BYTES:
        raise DataError(f"{file.path}: is one document of over {UNPACKED_BYTES >> 20} MiB; unpack it, or divide it")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        return error


def _tables(file: TextFile, fields: Fields, first: int) -> Iterator[tuple[int, list[Any]]]:
    """Yield (rows before, columns of the fields) of parquet, or of a file of Arrow batches that ``datasets`` saved.

    Groups of rows that end before index ``first`` are not read.
    """
    import pyarrow as pa

    before = 0
    with opened_table(file) as (opened, schema):
        refuse_columns(file.path, fields, schema.names)
        names = fields.columns(schema.names)
        batches = opened
        try:
            if is_parquet(file):
                sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
                while sizes and before + sizes[0] <= first:
                    before += sizes.pop(0)
                groups = range(opened.num_row_groups - len(sizes), opened.num_row_groups)
                batches = opened.iter_batches(1024, row_groups=groups, columns=names) if groups else ()
            for batch in batches:
                if before + batch.num_rows > first:
                    yield before, [batch.column(name) for name in names]
                before += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise _damaged(file, error) from None


def is_parquet(file: TextFile) -> bool:
    """True of a table that is no file of Arrow batches."""
    return file.name.lower().endswith(PARQUET_SUFFIX)


@contextlib.contextmanager
def opened_table(file: TextFile) -> Iterator[tuple[Any, Any]]:
    """Yield (an open file of parquet or a stream of Arrow batches, its schema). Raises DataError."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"{file.path}: needs the package pyarrow: {install('text')}") from None
    with file.open() as raw:
        try:
            opened: Any
            if is_parquet(file):
                opened = pq.ParquetFile(raw)
            else:
                # Of a file that was truncated between two batches only the end mark is missing.
                raw.seek(-len(END_MARK), os.SEEK_END)
                if raw.read() != END_MARK:
                    raise DataError(f"{file.path}: not a whole Arrow file (it has no end mark); copy it again")
                raw.seek(0)
                opened = pa.ipc.open_stream(raw)
            schema = opened.schema_arrow if is_parquet(file) else opened.schema
        except (pa.ArrowException, OSError) as error:
            raise _damaged(file, error) from None
        yield opened, schema


def _damaged(file: TextFile, error: Exception) -> DataError:
    what, why = "parquet" if is_parquet(file) else "an Arrow file", " ".join(str(error).split())
    return DataError(f"{file.path}: is damaged or not {what} ({why}); copy it again")


def refuse_columns(shown: str, fields: Fields, names: Sequence[str]) -> None:
    """Raise DataError for a table that lacks one of the fields."""
    for name in fields.names:
        if name not in names:
            hint = "these are tokens: give them by --training_dir" if "input_ids" in names else "set --text_column"
            raise DataError(f"{shown}: no column {name} (it has {', '.join(names)}); {hint}")


def _values(values: Any) -> Iterator[Any]:
    """Yield the values of an Arrow array; of one with a text that is not UTF-8, the error."""
    try:
        yield from values.to_pylist()
        return
    except UnicodeDecodeError:
        pass  # raised before the first is yielded
    for value in values:
        try:
            yield value.as_py()
        except UnicodeDecodeError as error:
            yield error
