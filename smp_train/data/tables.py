"""Rows of parquet and Arrow files."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from smp_train.errors import ConfigError, DataError, install, one_line

if TYPE_CHECKING:
    from smp_train.data.files import DataFile

BATCH_ROWS = 1024
ARROW_FILE_MAGIC = b"ARROW1"
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of a complete stream of Arrow batches."""


def batches(
    file: DataFile, raw: IO[bytes], fields: Sequence[str] | None, first: int, tick: Callable[[int], None]
) -> Iterator[tuple[int, Any]]:
    """Yield (index of the batch's first row, record batch) of a file; skip parquet row groups before row ``first``."""
    try:
        import pyarrow as pa
    except ImportError:
        raise ConfigError(f"{file.path}: needs the package pyarrow: {install('text')}") from None
    try:
        row, stream = _parquet_batches(raw, fields, first) if file.kind == "parquet" else (0, _arrow_batches(raw))
        for batch in stream:
            yield row, batch
            row += batch.num_rows
        tick(file.size)
    except (pa.ArrowException, OSError, EOFError) as error:
        kind = "a parquet" if file.kind == "parquet" else "an Arrow"
        raise DataError(f"{file.path}: is damaged or not {kind} file ({one_line(error)}); copy it again") from None


def _parquet_batches(raw: IO[bytes], fields: Sequence[str] | None, first: int) -> tuple[int, Iterator[Any]]:
    """Return the index of the first row that is read, and the batches from that row on."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(raw)
    columns = None if fields is None else [name for name in fields if name in table.schema_arrow.names]
    starts = [0, *accumulate(table.metadata.row_group(group).num_rows for group in range(table.num_row_groups))]
    groups = range(max(0, bisect_right(starts, first) - 1), table.num_row_groups)
    # If no row group were given, `iter_batches` would read all row groups.
    return starts[groups.start], table.iter_batches(BATCH_ROWS, groups, columns) if groups else iter(())


def _arrow_batches(raw: IO[bytes]) -> Iterator[Any]:
    """Yield the batches of the stream format, which ``save_to_disk`` writes, or of the file format."""
    import pyarrow as pa

    if raw.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC:
        reader = pa.ipc.open_file(raw)
        stream: Iterable[Any] = map(reader.get_batch, range(reader.num_record_batches))
    else:
        # A file that was cut off between two batches lacks only the end mark.
        raw.seek(-len(ARROW_END), os.SEEK_END)
        if raw.read() != ARROW_END:
            raise EOFError("it has no end mark")
        raw.seek(0)
        stream = pa.ipc.open_stream(raw)
    for batch in stream:
        try:
            batch.validate(full=True)  # reading a list or string with damaged offsets would crash the process
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error):  # text that is not UTF-8 is a problem of its record
                raise
        yield batch


def rows(
    batches_of_file: Iterable[tuple[int, Any]], fields: Sequence[str] | None, first: int, step: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield (index from 0, number from 1, row as a dict) of the rows ``first``, ``first + step``, ..."""
    for batch_start, batch in batches_of_file:
        start = max(first, batch_start)
        start += (first - start) % step
        selected = range(start, batch_start + batch.num_rows, step)
        if not selected:
            continue
        batch = batch.take([row - batch_start for row in selected]) if step > 1 else batch.slice(start - batch_start)
        names = [name for name in batch.schema.names if fields is None or name in fields]
        columns = [_values(batch.column(name)) for name in names]
        for index, *values in zip(selected, *columns, strict=True):
            yield index, index + 1, dict(zip(names, values, strict=True))


def _values(column: Any) -> Sequence[Any]:
    """Return a column's values: a list of integers as an array, a text that is not UTF-8 as a UnicodeDecodeError."""
    import pyarrow as pa

    kind = column.type
    lists = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if lists and pa.types.is_integer(kind.value_type) and not column.null_count:
        values = column.flatten()
        if not values.null_count:
            ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
            return np.split(values.to_numpy(zero_copy_only=False), ends[:-1]) if len(column) else []
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError as error:
        return [error] if len(column) == 1 else [_values(column.slice(row, 1))[0] for row in range(len(column))]
