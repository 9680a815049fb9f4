"""A tree's index as flat arrays, and its file ``index.bin``, in the format of safetensors: read without unpickling.

The file has 5 arrays: offsets and sizes of all chunks (one number per dimension), then file number, start and length of
all records; and as a sixth the header, as JSON in UTF-8. Each chunk of a tensor, and each entry that is not a tensor,
has one record. The header has ``files`` (names), ``entries`` (lists of name, dtype, shape, number of records; dtype is
null unless the entry is a tensor) and ``metadata`` (size of the ``.metadata`` written at the same time).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

INDEX = "index.bin"
HEADER, ARRAYS = "header", ("offsets", "sizes", "files", "starts", "lengths")
Header = dict[str, Any]


class TensorEntry(dcp.TensorStorageMetadata):
    """A saved tensor. Makes DCP's records of chunks only on request, because a large model has a million chunks."""

    def __init__(self, dtype: torch.dtype, size: list[int], offsets: Any, sizes: Any) -> None:
        """``offsets`` and ``sizes`` have one row per chunk and one column per dimension."""
        self.properties, self.size = dcp.TensorProperties(dtype=dtype), torch.Size(size)
        self.offsets, self.sizes = offsets, sizes

    chunks: Any = property(lambda entry: entry.chunks_in(...))

    def overlapping(self, boxes: Iterable[dcp.ChunkStorageMetadata], name: str) -> dcp.TensorStorageMetadata:
        """Return the entry with only the chunks that overlap ``boxes``. Raises ValueError if the chunks leave gaps."""
        rows = np.zeros(len(self.offsets), bool)
        for box in boxes:
            low, extent = np.array((box.offsets, box.sizes), np.int64)
            high = np.minimum(self.offsets + self.sizes, low + extent)
            volumes = np.maximum(high - np.maximum(self.offsets, low), 0).prod(axis=1)
            if volumes.sum() < math.prod(box.sizes):
                raise ValueError(f"{name}: only {volumes.sum()} of {math.prod(box.sizes)} numbers are saved")
            rows |= volumes > 0
        return dcp.TensorStorageMetadata(self.properties, self.size, self.chunks_in(rows))

    def chunks_in(self, rows: Any) -> list[dcp.ChunkStorageMetadata]:
        """Return DCP's records of the chunks in some rows."""
        pairs = zip(self.offsets[rows].tolist(), self.sizes[rows].tolist(), strict=True)
        return [dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in pairs]


class _Records:
    """DCP's ``storage_data``: finds the file, start and length of a chunk, or of an entry that is not a tensor."""

    def __init__(self, entries: dict[str, Any], first: dict[str, int], files: list[str], columns: list[Any]) -> None:
        self._entries, self._first, self._files, self._columns = entries, first, files, columns

    def __getitem__(self, key: dcp.MetadataIndex) -> _StorageInfo:
        record = self._first[key.fqn]
        if key.offset is not None:
            record += int((self._entries[key.fqn].offsets == key.offset).all(axis=1).nonzero()[0][0])
        file, start, length = (int(column[record]) for column in self._columns)
        return _StorageInfo(self._files[file], start, length)


def pack(metadata: dcp.Metadata) -> tuple[Header, list[Any]]:
    """Return the header and arrays of DCP's index, without chunks that are not stored."""
    stored: dict[str, dict[Any, _StorageInfo]] = {}
    for key, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise ValueError("its entries are transformed, by compression or otherwise, which is not read here")
        stored.setdefault(key.fqn, {})[key.offset] = info
    infos: list[_StorageInfo] = []
    chunks: list[dcp.ChunkStorageMetadata] = []
    entries: list[Any] = []
    for name, entry in metadata.state_dict_metadata.items():
        records = stored.get(name, {})
        if isinstance(entry, dcp.BytesStorageMetadata):
            infos.append(records[None])
            entries.append((name, None, (), 1))
        else:
            saved = [chunk for chunk in entry.chunks if chunk.offsets in records]
            infos += [records[chunk.offsets] for chunk in saved]
            chunks += saved
            entries.append((name, str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size), len(saved)))
    numbers = {file: number for number, file in enumerate(dict.fromkeys(info.relative_path for info in infos))}
    columns: tuple[Iterable[int], ...] = (
        chain.from_iterable(chunk.offsets for chunk in chunks), chain.from_iterable(chunk.sizes for chunk in chunks),
        (numbers[info.relative_path] for info in infos), (info.offset for info in infos),
        (info.length for info in infos),
    )  # fmt: skip
    return {"files": list(numbers), "entries": entries}, [np.fromiter(column, np.int64) for column in columns]


def encode(header: Header, columns: list[Any]) -> bytes:
    """Return ``index.bin``, with each array in the smallest type that holds its numbers."""
    smallest = [column.astype(np.min_scalar_type(column.max(initial=0))) for column in columns]
    text = np.frombuffer(json.dumps(header).encode(), np.uint8)
    return save({HEADER: text, **dict(zip(ARRAYS, smallest, strict=True))})


def decode(data: bytes, metadata_bytes: int) -> tuple[Header, list[Any]] | None:
    """Return the header and the arrays, or None if another program wrote the file, or for another ``.metadata``.

    An invalid header may raise any exception.
    """
    try:
        arrays = load(data)
        text, *columns = (arrays[name] for name in (HEADER, *ARRAYS))
    except (SafetensorError, KeyError):
        return None
    header = json.loads(text.tobytes())
    return (header, [column.astype(np.int64) for column in columns]) if header["metadata"] == metadata_bytes else None


def unpack(header: Header, columns: list[Any], files: Mapping[str, int]) -> dcp.Metadata:
    """Return DCP's index of a tree of ``files`` (name: size in bytes).

    Any exception may be raised if the index names a file outside the tree, bytes outside a file, a chunk outside its
    tensor, or a tensor larger than all files together (a load would allocate memory for this tensor).
    """
    offsets, sizes, numbers, starts, lengths = columns
    names, total = header["files"], sum(files.values())
    if outside := [name for name in names if name not in files]:
        raise ValueError(f"it names {outside[0]!r}, which is not a file of this checkpoint")
    ends = np.array([files[name] for name in names], np.int64)[numbers]
    invalid = (starts < 0) | (lengths < 0) | (lengths > ends - starts)
    if invalid.any():
        raise ValueError(f"it names bytes that {names[numbers[invalid.argmax()]]} does not have")
    entries: dict[str, Any] = {}
    first: dict[str, int] = {}
    record = position = 0
    for name, kind, shape, count in header["entries"]:
        first[name], record = record, record + count
        if kind is None:
            entries[name] = dcp.BytesStorageMetadata()
            continue
        dtype = vars(torch).get(kind)
        if not isinstance(dtype, torch.dtype) or min(count, *shape, 0) < 0:
            raise ValueError(f"{name} has {count} chunks of type {kind} and shape {list(shape)}")
        if math.prod(shape) * dtype.itemsize > total:
            raise ValueError(f"{name} would have {list(shape)} numbers, and all files together have {total} bytes")
        rows = slice(position, position + count * len(shape))
        low, extent = (array[rows].reshape(count, len(shape)) for array in (offsets, sizes))
        if not ((low >= 0) & (extent >= 0) & (extent <= np.array(shape, np.int64) - low)).all():
            raise ValueError(f"{name} has a chunk outside its shape {list(shape)}")
        entries[name], position = TensorEntry(dtype, shape, low, extent), rows.stop
    if [position, position, record, record, record] != [len(column) for column in columns]:
        raise ValueError("its arrays have other lengths than its entries need")
    return dcp.Metadata(entries, storage_data=_Records(entries, first, names, columns[2:]),
                        storage_meta=dcp.StorageMeta())  # fmt: skip
