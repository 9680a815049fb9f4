"""Writes weight files in the safetensors format, with one tensor in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from smp_train.errors import CheckpointError
from smp_train.models.hf_weights import NOT_WEIGHTS
from smp_train.models.streamed import FORMAT_DTYPES
from smp_train.models.weight_files import INDEXES, WeightFiles, shape_of

SHARD_BYTES = 5_000_000_000
Progress = Callable[[int, int], None]
"""A function that is called with the bytes written so far and in all."""
_DTYPE_NAMES = {dtype: name for name, dtype in FORMAT_DTYPES.items()}


class LazyTensors(NamedTuple):
    """Tensors to write, by name, which may be on the meta device, and a function that reads their values."""

    tensors: Mapping[str, Tensor]
    read: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """Size in bytes of all tensors."""
        return sum(value.nbytes for value in self.tensors.values())


def stored_tensors(files: WeightFiles, dtype: torch.dtype | None) -> list[LazyTensors]:
    """Return the tensors in weight files; floating-point tensors get ``dtype`` if it is not None."""

    def lazy(name: str) -> LazyTensors:
        block = files.tensor(name)
        shape = shape_of(block)
        stored_dtype = block[(slice(0, 0),) * len(shape) or ...].dtype
        target = dtype if dtype is not None and stored_dtype.is_floating_point else stored_dtype
        empty = torch.empty(shape, dtype=target, device="meta")
        return LazyTensors({name: empty}, lambda: {name: block[...].to(target)})

    return [lazy(name) for name in files.files if not NOT_WEIGHTS.search(name)]


def write_weights(
    stream: Callable[[str, int], AbstractContextManager[BinaryIO]], items: Iterable[LazyTensors], shard_bytes: int,
    on_progress: Progress | None = None, name: str = "model",
) -> dict[str, bytes]:  # fmt: skip
    """Write tensors to files ``<name>*.safetensors`` of about ``shard_bytes``.

    ``stream`` opens a file by name and size. Returns the index file, by name, if there are several files.
    """
    shards = _shards(items, shard_bytes)
    total, done = sum(item.nbytes for shard in shards for item in shard), 0
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"{name}-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else f"{name}.safetensors"
        for written in _write_file(partial(stream, file), shard):
            done += written
            if on_progress is not None:
                on_progress(done, total)
        file_of |= {tensor: file for item in shard for tensor in item.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
    return {INDEXES[0]: (json.dumps(index, indent=2) + "\n").encode()} if len(shards) > 1 else {}


def _shards(items: Iterable[LazyTensors], shard_bytes: int) -> list[list[LazyTensors]]:
    shards: list[list[LazyTensors]] = [[]]
    for item in items:
        if shards[-1] and sum(earlier.nbytes for earlier in shards[-1]) + item.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(item)
    # Large dtypes first, so that every tensor is aligned to its elements.
    return [sorted(shard, key=lambda item: -next(iter(item.tensors.values())).dtype.itemsize) for shard in shards]


def _write_file(stream: Callable[[int], AbstractContextManager[BinaryIO]], items: list[LazyTensors]) -> Iterator[int]:
    """Write one file of the safetensors format; yield the number of bytes after each item.

    The format (https://github.com/huggingface/safetensors#format): the header's length in 8 bytes, little endian; the
    header, JSON; the tensors without gaps. The library itself needs all tensors of a file in memory at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    size = 0
    for key, value in (pair for item in items for pair in item.tensors.items()):
        offsets = [size, size + value.nbytes]
        header[key] = {"dtype": _DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        size = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with stream(size) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for item in items:
            values = item.read()
            for key, expected in item.tensors.items():
                value = values[key].detach().contiguous()
                if (value.shape, value.dtype) != (expected.shape, expected.dtype):
                    raise CheckpointError(f"{key} is {list(value.shape)}, {list(expected.shape)} was announced")
                file.write(value.reshape(-1).view(torch.uint8).numpy().data)
            yield item.nbytes
