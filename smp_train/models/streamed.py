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
from smp_train.storage import Entry, Range
from smp_train.storage.paths import S3Path
from smp_train.storage.s3 import parts

FORMAT_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""dtypes by their names in the safetensors format."""
LARGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors library."""


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
        first, end = self._rows(index)
        target = torch.empty(end - first, *self.shape[1:], dtype=self.dtype)[self._within_rows(index)]
        fetch([(target, self, index)], self.file.parent)
        return target

    def ranges(self, index: Any) -> list[Range]:
        """Return the parts of the file that hold the rows of the block at ``index``, with all of their columns."""
        (first, end), row_bytes = self._rows(index), math.prod(self.shape[1:]) * self.dtype.itemsize
        return list(parts(self.file.name, self.start + first * row_bytes, (end - first) * row_bytes, self.etag))

    def block(self, content: bytearray, index: Any) -> Tensor:
        """Return the block at ``index``, from the content of `ranges`."""
        first, end = self._rows(index)
        rows = torch.frombuffer(content, dtype=self.dtype).view(end - first, *self.shape[1:])
        return rows[self._within_rows(index)]

    def _rows(self, index: Any) -> tuple[int, int]:
        if index is ...:
            return 0, (self.shape or (1,))[0]
        return index[0].start or 0, index[0].stop

    def _within_rows(self, index: Any) -> Any:
        """Return the index of the block within its rows; a tensor without dimensions counts as one row."""
        return 0 if not self.shape else ... if index is ... else (slice(None), *index[1:])


def fetch(copies: Iterable[tuple[Tensor, Any, Any]], folder: S3Path) -> None:
    """Fill targets with blocks of files in ``folder``; ``copies`` yields (target, block, index).

    ``copies`` is consumed as needed: while one block is copied, the next requests are in flight.
    """
    waiting: deque[tuple[Tensor, Streamed, Any, int]] = deque()

    def ranges() -> Iterator[Range]:
        for target, block, index in copies:
            if not isinstance(block, Streamed):
                target.copy_(block[index])
            elif target.numel():
                needed = block.ranges(index)
                waiting.append((target, block, index, len(needed)))
                yield from needed

    received = folder.storage.ranges(ranges())
    for data in received:
        target, block, index, count = waiting.popleft()
        content = bytearray().join([data, *itertools.islice(received, count - 1)])
        target.copy_(block.block(content, index))


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
