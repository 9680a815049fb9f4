"""Read DCP's own index of a tree, the pickle ``.metadata``, without running any code that it asks for."""

from __future__ import annotations

import gc
import io
import pickle
from collections.abc import Container, Mapping
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

_RECORDS = (dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata, dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta,
            dcp.TensorStorageMetadata)  # fmt: skip
_ALLOWED: Mapping[str, Container[str]] = {
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        *(record.__name__ for record in _RECORDS), "TensorProperties", "_MEM_FORMAT_ENCODING",
    ),
    "torch.serialization": ("_get_layout",), "torch": ("Size",), "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"), "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}  # fmt: skip


def unpickle(data: bytes) -> dcp.Metadata:
    """Return the index in a pickle. An invalid pickle may raise any exception."""
    collecting = gc.isenabled()
    gc.disable()  # else a third of the time goes to the collector, which revisits all records
    try:
        metadata = Unpickler(io.BytesIO(data)).load()
    finally:
        if collecting:
            gc.enable()
    if not isinstance(metadata, dcp.Metadata):
        raise ValueError("it is not an index of torch.distributed.checkpoint")
    return metadata


class Unpickler(pickle._Unpickler):
    """Builds nothing except DCP's plain records.

    This is the unpickler in Python, seven times as slow as the one in C. The one in C sets attributes on any object,
    functions and classes included, and a few bytes can make it allocate any amount of memory.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        """Set the fields of a record; refuse to set attributes of any other object."""
        record, state = self.stack[-2:]
        if type(record) in (*_RECORDS, _StorageInfo) and type(state) is dict:
            vars(record).update(state)
            self.stack.pop()
        elif type(record) is dcp.TensorProperties:
            super().load_build()  # type: ignore[misc]
        else:
            raise pickle.UnpicklingError("it sets attributes on an object that is not a record of a checkpoint's index")

    del dispatch[pickle.BYTEARRAY8[0]]  # this opcode allocates any length it names; DCP never writes it
    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        """Return a record type or a torch dtype; refuse every other name."""
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module.removesuffix("._local"), name)  # Python 3.13 writes pathlib._local
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint's index")
