"""Weights that lie in S3, read by ranges: each rank fetches the rows it holds, and nothing goes to a disk."""

from __future__ import annotations

import io
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smp_train.errors import CheckpointError
from smp_train.storage import Entry, Range, s3
from smp_train.storage.paths import S3Path

logger = logging.getLogger("smp_train.models")

FORMAT_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
"""dtypes by their names in the safetensors format."""
LARGEST_HEADER = 100_000_000
"""Bytes, of the safetensors library."""
ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class Request:
    """A range of a file, and the function that takes its bytes."""

    range: Range
    put: Callable[[Tensor], None]
    dtype: torch.dtype


@dataclass(frozen=True)
class Streamed:
    """A stored tensor of which only the indexed block is fetched; see `models.weight_files.Block`.

    ``etag`` is the version of its file, ``start`` the byte there at which its numbers begin: row by row without gaps,
    or ``strides`` apart, as those of a transposed tensor, which is fetched whole.
    """

    file: S3Path
    etag: str
    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """Fetch the block at ``index``: a slice per dimension, all with both ends, or an ellipsis."""
        if self.strides is not None:
            span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
            flat = Streamed(self.file, self.etag, self.start, self.dtype, (0 if 0 in self.shape else span,))[...]
            return flat.as_strided(self.shape, self.strides)[index]
        target = torch.empty([high - low for low, high in self._bounds(index)], dtype=self.dtype)
        fetch([(target, self, index)], self.file.parent)
        return target

    def _bounds(self, index: Any) -> list[tuple[int, int]]:
        return [(0, size) for size in self.shape] if index is ... else [(each.start or 0, each.stop) for each in index]

    def requests(self, target: Tensor, index: Any) -> Iterator[Request]:
        """Yield what to fetch for the block at ``index``, which goes to ``target``: at most `PART_BYTES` at once."""
        if target.numel():
            shaped = target if self.shape else target.view(1)
            yield from self._rows(shaped, self.shape or (1,), self._bounds(index) or [(0, 1)], 0)

    def _rows(
        self, target: Tensor, shape: Sequence[int], bounds: Sequence[tuple[int, int]], at: int
    ) -> Iterator[Request]:
        """Yield the requests for a part of the tensor that begins ``at`` that number of it.

        Rows are fetched whole, several at once, which is cheaper than a request for what is wanted of each. A row that
        takes a request of its own is split along its own rows.
        """
        (low, high), *inner = bounds
        row, size = math.prod(shape[1:]), self.dtype.itemsize
        if 2 * row * size > s3.PART_BYTES and len(shape) > 1:
            for number in range(low, high):
                yield from self._rows(target[number - low], shape[1:], inner, at + number * row)
            return
        within = (slice(None), *(slice(*span) for span in inner))
        for first in range(low, high, s3.PART_BYTES // (row * size)):
            rows = target[first - low : first - low + s3.PART_BYTES // (row * size)]

            def put(data: Tensor, rows: Tensor = rows) -> None:
                rows.copy_(data.view(len(rows), *shape[1:])[within])

            begin = self.start + (at + first * row) * size
            yield Request(Range(self.file.name, begin, len(rows) * row * size, self.etag), put, self.dtype)


def fetch(copies: Iterable[tuple[Tensor, Any, Any]], folder: S3Path) -> None:
    """Fill each target with the elements of its block, of a file in ``folder``, at the index.

    ``copies`` are (target, block, index), consumed as needed: up to `AT_ONCE` requests are under way while one is
    copied. Blocks that cannot be fetched in parts are read at once.
    """
    waiting: deque[Request] = deque()

    def wanted() -> Iterator[Range]:
        for target, block, index in copies:
            if not isinstance(block, Streamed) or block.strides is not None:
                target.copy_(block[index])
                continue
            for request in block.requests(target, index):
                waiting.append(request)
                yield request.range

    for data in folder.storage.ranges(wanted()):
        request = waiting.popleft()
        request.put(torch.frombuffer(bytearray(data), dtype=request.dtype))


def open_safetensors(path: S3Path) -> tuple[list[str], Callable[[str], Streamed]]:
    """Read the header of a safetensors file; return its names and a function that returns a tensor by its name.

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
            found = {name: _stored(path, entry, 8 + length, stored) for name, stored in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise CheckpointError(f"{path} cannot be read as safetensors: {failure}") from failure
    return list(found), found.__getitem__


def _stored(path: S3Path, entry: Entry, begin: int, stored: dict[str, Any]) -> Streamed:
    dtype = FORMAT_DTYPES.get(stored["dtype"])
    if dtype is None:
        raise ValueError(f"a dtype {stored['dtype']} is not known here")
    first, last = stored["data_offsets"]
    shape = tuple(int(length) for length in stored["shape"])
    if last - first != math.prod(shape) * dtype.itemsize or begin + last > entry.size:
        raise ValueError("it is shorter than its header says")
    return Streamed(path, entry.etag, begin + first, dtype, shape)


def open_pickled(path: S3Path, load: Callable[..., Any]) -> tuple[Any, Callable[[Tensor], Any] | None]:
    """Open a file of ``torch.save``; return its content, and a function that returns the block of each tensor in it.

    Only the file's own pickle is fetched, by ``load``, which is `torch.load` for tensors and plain values; the tensors
    in it have no memory. Where this torch, or the file, is too old for that, all of it is read into memory, and the
    function is None.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    entry = path.entry()
    with path.open_ranges(entry) as file:
        begin = file.read(len(ZIP))
        file.seek(0)
        if begin == ZIP:
            with FakeTensorMode():
                content = load(file)
            if _has_places(content):
                return content, lambda tensor: _placed(path, entry.etag, tensor)
        logger.info("%s is not of a form that can be read in parts: fetching all of it into memory", path)
        file.seek(0)
        whole = io.BytesIO(file.read())
    return load(whole), None


def _has_places(content: Any) -> bool:
    """Tell whether each tensor knows where in the file it lies: from torch 2.7 on."""
    found: list[Any] = [content]
    while found:
        one = found.pop()
        if isinstance(one, dict):
            found += one.values()
        elif isinstance(one, Tensor):
            return hasattr(one.untyped_storage(), "_checkpoint_offset")
    return True


def _placed(path: S3Path, etag: str, tensor: Tensor) -> Streamed:
    storage: Any = tensor.untyped_storage()
    start = int(storage._checkpoint_offset + tensor.storage_offset() * tensor.dtype.itemsize)
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    return Streamed(path, etag, start, tensor.dtype, tuple(tensor.shape), strides)
