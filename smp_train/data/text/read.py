"""One file of documents: a text file is one document; so is a line of JSON, and a row of parquet, Arrow or the hub."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from smp_train.data import s3
from smp_train.data.arrow_file import END_MARK
from smp_train.data.bad_rows import LeftOut
from smp_train.data.lines import BYTE_ORDER_MARK, GZIP_ERRORS, GZIP_MAGIC, GzipFile, lines_of, open_file
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

    def open(self) -> IO[bytes]:
        """Open a local file or an object in S3, seekable. Raises DataError."""
        return s3.open_ranges(self.path, self.size, self.version) if s3.is_s3(self.path) else open_file(self.path)


def documents(
    file: TextFile,
    column: str = "text",
    *,
    start: int = 0,
    part: int = 0,
    parts: int = 1,
    left_out: LeftOut | None = None,
) -> Iterator[tuple[int, str]]:
    """Yield (number from 1: of the line or row, text) of the documents of a file, or of a part of it.

    Part p of n is every n-th document from the p-th on; ``start`` of the part's own are left out, unparsed. A text
    file is one document, with number 1. Documents without a visible character come as empty texts, and so do malformed
    ones where there is a ``left_out`` to count them: so the others keep their index. Raises DataError with file and
    line; always where a file is damaged, as it is not known what is missing.
    """
    first, kind = start * parts + part, file.kind
    for index, number, value in _records(file, column, first):
        if index < first or (index - part) % parts:
            continue
        text: Any = _text_of(file, number, value, column) if kind == "lines" else value
        problem = _problem(text, column)
        if not problem:
            yield number, text if text.strip() else ""
            continue
        where = {"whole": file.path, "lines": f"{file.path}:{number}"}.get(kind, f"{file.shown}: row {number}")
        if left_out is None:
            raise DataError(f"{where}: {problem}, or leave such documents out with --bad_rows skip")
        left_out(f"{where}: {problem}")
        yield number, ""


def _records(file: TextFile, column: str, first: int) -> Iterator[tuple[int, int, Any]]:
    """Yield (index from 0, number from 1, content) of documents; those before index ``first`` may be missing."""
    if file.kind in ("hub", "table"):
        columns = _table(file, column, first) if file.split is None else file.split.columns(file.shard, column, first)
        for before, values in columns:
            for index, text in enumerate(_texts(values), before):
                yield index, index + 1, text
    elif file.kind == "lines":
        with file.open() as raw:
            for index, (number, line) in enumerate(lines_of(raw, file.path)):
                yield index, number, line
    elif first == 0:
        yield 0, 1, _whole(file)


def _problem(text: Any, column: str) -> str:
    """Return why what was read is no text to train on, and what to do; nothing when it is."""
    if isinstance(text, UnicodeDecodeError):
        return f"byte {text.start} is not UTF-8 ({text.reason}); save it as UTF-8"
    if isinstance(text, ValueError):
        return str(text)
    if not isinstance(text, str):
        return f"column {column} holds no text; set --text_column"
    if "\0" in text:
        return f"character {text.index(chr(0))} is a NUL; is it text? remove it"
    return ""


def _text_of(file: TextFile, number: int, line: bytes, column: str) -> str | ValueError:
    """Return the text of a line, or what is wrong with it."""
    if line.lstrip().startswith(BYTE_ORDER_MARK):
        return ValueError("starts with a byte order mark, as where files were joined; remove it")
    try:
        record = loads(line)
    except ValueError as error:
        return ValueError(f"broken JSON ({error}); one object per line is needed")
    text = record.get(column) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    if isinstance(record, dict) and "input_ids" in record:
        hint = "these are tokens already: give them by --training_dir"
        raise DataError(f'{file.path}:{number}: no "{column}" string in this line; {hint}')
    hint = "set --text_column" if isinstance(record, dict) else "one object per line is needed"
    return ValueError(f'no "{column}" string in this line; {hint}')


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


def _table(file: TextFile, column: str, first: int) -> Iterator[tuple[int, Any]]:
    """Yield (rows before, values) of a column of parquet, or of a file of Arrow batches that ``datasets`` saved.

    Groups of rows that end before index ``first`` are not read.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"{file.path}: needs the package pyarrow: {install('text')}") from None
    is_parquet = file.name.lower().endswith(PARQUET_SUFFIX)
    before = 0
    with file.open() as raw:
        try:
            if is_parquet:
                opened: Any = pq.ParquetFile(raw)
                _refuse_column(file, column, opened.schema_arrow.names)
                sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
                while sizes and before + sizes[0] <= first:
                    before += sizes.pop(0)
                groups = range(opened.num_row_groups - len(sizes), opened.num_row_groups)
                batches = opened.iter_batches(1024, row_groups=groups, columns=[column]) if groups else ()
            else:
                # Of a file that was truncated between two batches only the end mark is missing.
                raw.seek(-len(END_MARK), os.SEEK_END)
                if raw.read() != END_MARK:
                    raise DataError(f"{file.path}: not a whole Arrow file (it has no end mark); copy it again")
                raw.seek(0)
                opened = batches = pa.ipc.open_stream(raw)
                _refuse_column(file, column, opened.schema.names)
            for batch in batches:
                if before + batch.num_rows > first:
                    yield before, batch.column(column)
                before += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            what, why = "parquet" if is_parquet else "an Arrow file", " ".join(str(error).split())
            raise DataError(f"{file.path}: is damaged or not {what} ({why}); copy it again") from None


def _refuse_column(file: TextFile, column: str, names: list[str]) -> None:
    if column not in names:
        hint = "these are tokens: give them by --training_dir" if "input_ids" in names else "set --text_column"
        raise DataError(f"{file.path}: no column {column} (it has {', '.join(names)}); {hint}")


def _texts(values: Any) -> Iterator[Any]:
    """Yield the values of an Arrow array; of a text that is not UTF-8, the error."""
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
