"""Writing token files (`token_file` has the format)."""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from smp_train.data.arrays_file import atomic_file, write_arrays
from smp_train.data.source import IGNORED, Row
from smp_train.data.token_file import LABELS, VERSION, Header, dtype_for, row_checksum
from smp_train.errors import DataError

if TYPE_CHECKING:
    from smp_train.data.bad_records import BadRecords

FLUSH_BYTES = 1 << 20


class _Columns:
    """The index columns of one shard while it is written."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.starts, self.numbers = array("Q", [0]), array("Q")
        self.crc, self.first_targets = array("I"), array("I")
        self.counted = self.longest = self.longest_number = 0
        self.latest_target = 1
        self.labelled = False

    def add(self, number: int, row: Row) -> bytes:
        """Add a row; return its stored bytes."""
        tokens = row.input_ids.size
        stored = row.input_ids.astype(self.dtype).tobytes()
        if row.labels is None:
            self.counted += tokens
        else:
            self.labelled = True
            stored += row.labels.astype(LABELS).tobytes()
            self.counted += int(np.count_nonzero(row.labels != IGNORED))
            self.first_targets.append(row.first_target())
        self.crc.append(row_checksum(stored, tokens))
        self.starts.append(self.starts[-1] + tokens)
        self.numbers.append(number)
        if tokens > self.longest:
            self.longest, self.longest_number = tokens, number
        return stored

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays that the index needs."""
        starts, numbers = np.array(self.starts, "<u8"), np.array(self.numbers, "<u8")
        arrays = {"crc": np.array(self.crc, "<u4")}
        lengths = np.diff(starts)
        if (lengths != lengths[:1]).any():
            arrays["starts"] = starts
        if (numbers != np.arange(1, numbers.size + 1, dtype=np.uint64)).any():
            arrays["numbers"] = numbers
        if self.labelled:
            arrays["first_targets"] = np.array(self.first_targets, "<u4")
        return arrays


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
        columns = _Columns(dtype_for(self._vocab_size))
        digest = hashlib.blake2b(digest_size=16)
        waiting = bytearray()
        for number, row in rows:
            waiting += columns.add(number, row)
            if len(waiting) >= FLUSH_BYTES:
                self._tok.write(waiting)
                waiting.clear()
        self._tok.write(waiting)
        if not columns.crc and not may_be_empty:
            problem = f"none of its records is a row ({bad.first})" if bad and bad.count else "no row in it"
            raise DataError(f"{shown or name}: empty shard ({problem}); write it again or remove it")
        arrays = columns.arrays()
        for key in ("crc", "starts"):
            digest.update(arrays.get(key, np.empty(0)).tobytes())
        header = Header(
            source=name, size=size, version=version, rows=len(columns.crc), tokens=columns.starts[-1],
            counted=columns.counted, dtype=columns.dtype.str,
            row_length=None if "starts" in arrays else columns.longest, longest=columns.longest,
            longest_number=columns.longest_number, labelled=columns.labelled,
            latest_target=max(columns.first_targets, default=1), vocab_size=self._vocab_size,
            digest=digest.hexdigest(), skipped=bad.count if bad else 0,
            first_bad_number=bad.first_number if bad else 0, first_bad=bad.first_problem if bad else "",
            arrays={key: len(self.arrays) + number for number, key in enumerate(arrays)},
        )  # fmt: skip
        self.headers.append(header)
        self.arrays += arrays.values()
        return header


@contextlib.contextmanager
def writing(base: str, vocab_size: int) -> Iterator[Writer]:
    """Write ``<base>.tok`` and ``<base>.idx``, which appear complete and synced; on an error nothing is left."""
    with atomic_file(base + ".tok") as tok:
        writer = Writer(tok, vocab_size)
        yield writer
    write_arrays(base + ".idx", VERSION, [asdict(header) for header in writer.headers], writer.arrays)
