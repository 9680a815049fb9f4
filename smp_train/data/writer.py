"""Writing token files (`token_file` has the format)."""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import BinaryIO

import numpy as np

from smp_train.data.arrays_file import atomic_file, write_arrays
from smp_train.data.bad_records import BadRecords
from smp_train.data.source import IGNORED, Row
from smp_train.data.token_file import ARRAYS, LABELS, VERSION, Header, dtype_for, row_checksum
from smp_train.errors import DataError


class Writer:
    """Writes shards one after the other into one pair of files; made by `writing`."""

    def __init__(self, tok: BinaryIO, vocab_size: int) -> None:
        self._tok, self._vocab_size = tok, vocab_size
        self.headers: list[Header] = []
        self.arrays: list[np.ndarray] = []

    def add(
        self, name: str, size: int, version: str, rows: Iterable[tuple[int, Row]], bad: BadRecords | None = None, *,
        shown: str = "", may_be_empty: bool = False,
    ) -> Header:  # fmt: skip
        """Add a shard of (number of the record, row), and return its header; ``shown`` is its name in messages.

        ``bad`` counts its bad records once all rows are read. Raises DataError where there is no row, unless the shard
        ``may_be_empty``.
        """
        bad = bad or BadRecords(skip=False)
        dtype, counted, labelled = dtype_for(self._vocab_size), 0, False
        starts, numbers, crc, first_targets = array("Q", [0]), array("Q"), array("I"), array("I")
        for number, row in rows:
            stored = row.input_ids.astype(dtype).tobytes()
            if row.labels is not None:
                labelled = True
                stored += row.labels.astype(LABELS).tobytes()
                counted += int(np.count_nonzero(row.labels != IGNORED))
            self._tok.write(stored)
            crc.append(row_checksum(stored, row.input_ids.size))
            starts.append(starts[-1] + row.input_ids.size)
            numbers.append(number)
            first_targets.append(row.first_target())
        if not numbers and not may_be_empty:
            problem = f"none of its records is a row ({bad.first})" if bad.count else "no row in it"
            raise DataError(f"{shown or name}: empty shard ({problem}); write it again or remove it")
        lengths = np.diff(np.array(starts, "<u8"))
        longest = int(lengths.argmax()) if numbers else None
        columns = starts, numbers, crc, first_targets
        arrays = [np.array(column, dtype) for column, dtype in zip(columns, ARRAYS.values(), strict=True)]
        digest = hashlib.blake2b(arrays[2].tobytes() + lengths.tobytes(), digest_size=16)
        header = Header(
            source=name, size=size, version=version, rows=len(numbers), tokens=starts[-1],
            counted=counted if labelled else starts[-1], dtype=dtype.str,
            longest=0 if longest is None else int(lengths[longest]),
            longest_number=0 if longest is None else numbers[longest], labelled=labelled,
            latest_target=max(first_targets, default=1), vocab_size=self._vocab_size, digest=digest.hexdigest(),
            skipped=bad.count, first_bad_number=bad.first_number, first_bad=bad.first_problem,
        )  # fmt: skip
        self.headers.append(header)
        self.arrays += arrays
        return header


@contextlib.contextmanager
def writing(base: str, vocab_size: int) -> Iterator[Writer]:
    """Write ``<base>.tok`` and ``<base>.idx``, which appear complete and synced; on an error nothing is left."""
    with atomic_file(base + ".tok") as tok:
        writer = Writer(tok, vocab_size)
        yield writer
    write_arrays(base + ".idx", VERSION, [asdict(header) for header in writer.headers], writer.arrays)
