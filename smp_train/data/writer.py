"""Writes token files (`token_file` describes the format)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from smp_train.data.arrays_file import atomic_file, write_arrays
from smp_train.data.bad_records import BadRecords
from smp_train.data.files import DataFile
from smp_train.data.source import IGNORED, Row
from smp_train.data.token_file import ARRAYS, LABELS, VERSION, Header, dtype_for, row_checksum
from smp_train.errors import DataError

Shard = tuple[DataFile, Iterable[tuple[int, Row]], BadRecords]
"""(file, (record number, row) pairs, bad records); the bad records are complete once all rows have been read."""


def write_token_file(base: str, shards: Iterable[Shard], vocab_size: int) -> None:
    """Write ``<base>.tok`` and ``<base>.idx``, which appear complete and synced; an error leaves neither."""
    headers: list[Header] = []
    columns: list[list[np.ndarray]] = []
    with atomic_file(base + ".tok") as tok:
        for shard in shards:
            header, columns_of_shard = _write_shard(tok, *shard, dtype_for(vocab_size))
            headers.append(header)
            columns.append(columns_of_shard)
    arrays = dict(zip(ARRAYS, map(np.concatenate, zip(*columns, strict=True)), strict=True))
    write_arrays(base + ".idx", VERSION, [header._asdict() for header in headers], arrays)


def _write_shard(
    tok: BinaryIO, file: DataFile, rows: Iterable[tuple[int, Row]], bad: BadRecords, dtype: np.dtype
) -> tuple[Header, list[np.ndarray]]:
    """Write the rows of a shard; return its part of the index. Raises DataError for a shard without a row."""
    counted, labelled = 0, False
    starts, numbers, crc, first_targets = array("Q", [0]), array("Q"), array("I"), array("I")
    for number, row in rows:
        stored = row.input_ids.astype(dtype).tobytes()
        if row.labels is not None:
            labelled = True
            stored += row.labels.astype(LABELS).tobytes()
            counted += int(np.count_nonzero(row.labels != IGNORED))
        tok.write(stored)
        crc.append(row_checksum(stored, row.input_ids.size))
        starts.append(starts[-1] + row.input_ids.size)
        numbers.append(number)
        first_targets.append(row.first_target())
    if not numbers and file.kind != "text":
        problem = f"none of its records is a row ({bad.first})" if bad.count else "no row in it"
        raise DataError(f"{file.shown}: empty shard ({problem}); write it again or remove it")
    columns = starts, numbers, crc, first_targets
    arrays = [np.array(column, dtype) for column, dtype in zip(columns, ARRAYS.values(), strict=True)]
    lengths = np.diff(arrays[0])
    digest = hashlib.blake2b(arrays[2].tobytes() + lengths.tobytes(), digest_size=16)
    header = Header(
        source=file.name, size=file.size, version=file.version, rows=len(numbers), tokens=starts[-1],
        counted=counted if labelled else starts[-1], dtype=dtype.str, longest=int(lengths.max(initial=0)),
        longest_number=numbers[int(lengths.argmax())] if numbers else 0, labelled=labelled,
        latest_target=max(first_targets, default=1), digest=digest.hexdigest(), skipped=bad.count,
        first_bad_number=bad.first_number, first_bad=bad.first_problem,
    )  # fmt: skip
    return header, arrays
