"""Safetensors in S3, read by ranges: each rank fetches the rows it needs into memory, and nothing is put on a disk."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smp_train.errors import CheckpointError
from smp_train.storage import Entry, Range, s3
from smp_train.storage.paths import S3Path

FORMAT_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""dtypes by their names in the safetensors format."""
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""
Request = tuple[Range, Callable[[bytes], object]]
"""A range of a file, and the function that takes the range's bytes."""


@dataclass(frozen=True)
class Streamed:
    """A contiguous tensor in a file, which is fetched when it is indexed.

    Attributes:
        file: The file.
        etag: The file's version.
        start: Offset of the tensor in the file, in bytes.
        dtype: The tensor's dtype.
        shape: The tensor's shape.
    """

    file: S3Path
    etag: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> Tensor:
        """Fetch the block at ``index``: a slice with both ends per dimension, or an ellipsis."""
        target = torch.empty([high - low for low, high in self._bounds(index)], dtype=self.dtype)
        fetch([(target, self, index)], self.file.parent)
        return target

    def _bounds(self, index: Any) -> list[tuple[int, int]]:
        return [(0, size) for size in self.shape] if index is ... else [(part.start or 0, part.stop) for part in index]

    def requests(self, target: Tensor, index: Any) -> Iterator[Request]:
        """Yield the requests, of at most `PART_BYTES` each, that fill ``target`` with the block at ``index``.

        A request fetches several whole rows, because skipping the unused columns would take a request per row. Rows
        that are longer than half a request are split along their next dimension.
        """
        shape, bounds = self.shape or (1,), self._bounds(index) or [(0, 1)]
        target = target if self.shape else target.view(1)
        below = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        split = next((dim for dim, row in enumerate(below) if 2 * row * self.itemsize <= s3.PART_BYTES), len(shape) - 1)
        columns = (slice(None), *(slice(*span) for span in bounds[split + 1 :]))
        low, high = bounds[split]
        rows_at_once = max(1, s3.PART_BYTES // max(1, below[split] * self.itemsize))
        for outer in itertools.product(*(range(*span) for span in bounds[:split])):
            block = target[tuple(number - span[0] for number, span in zip(outer, bounds, strict=False))]
            element = sum(number * row for number, row in zip(outer, below, strict=False))
            for first in range(low, high if target.numel() else low, rows_at_once):
                rows = block[first - low : first - low + rows_at_once]

                def put(data: bytes, rows: Tensor = rows) -> None:
                    values = torch.frombuffer(bytearray(data), dtype=self.dtype)
                    rows.copy_(values.view(len(rows), *shape[split + 1 :])[columns])

                begin = self.start + (element + first * below[split]) * self.itemsize
                yield Range(self.file.name, begin, len(rows) * below[split] * self.itemsize, self.etag), put

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


def fetch(copies: Iterable[tuple[Tensor, Any, Any]], folder: S3Path) -> None:
    """Fill targets with blocks of files in ``folder``; ``copies`` yields (target, block, index).

    ``copies`` is consumed as needed: while one block is copied, up to `AT_ONCE` requests are in flight.
    """
    puts: deque[Callable[[bytes], object]] = deque()

    def ranges() -> Iterator[Range]:
        for target, block, index in copies:
            if isinstance(block, Streamed):
                for byte_range, put in block.requests(target, index):
                    puts.append(put)
                    yield byte_range
            else:
                target.copy_(block[index])

    for data in folder.storage.ranges(ranges()):
        puts.popleft()(data)


def open_safetensors(path: S3Path) -> tuple[list[str], Callable[[str], Streamed]]:
    """Read the header of a safetensors file; return the tensors' names and a function that opens a tensor by name.

    The format: https://github.com/huggingface/safetensors#format.
    """
    entry = path.entry()
    with path.open_ranges(entry) as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            if not 0 < length <= min(LARGEST_HEADER, entry.size - 8):
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            tensors = {name: _in_safetensors(path, entry, 8 + length, fields) for name, fields in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise CheckpointError(f"{path} cannot be read as safetensors: {failure}") from failure
    return list(tensors), tensors.__getitem__


def _in_safetensors(path: S3Path, entry: Entry, data_start: int, fields: dict[str, Any]) -> Streamed:
    dtype = FORMAT_DTYPES.get(fields["dtype"])
    if dtype is None:
        raise ValueError(f"a dtype {fields['dtype']} is not known here")
    first, last = fields["data_offsets"]
    shape = tuple(int(length) for length in fields["shape"])
    if last - first != math.prod(shape) * dtype.itemsize or data_start + last > entry.size:
        raise ValueError("it is shorter than its header says")
    return Streamed(path, entry.etag, data_start + first, dtype, shape)
