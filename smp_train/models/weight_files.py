"""Weight files of a model, from which any block of any tensor can be read alone."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Protocol

from smp_train.errors import CheckpointError, first_line
from smp_train.storage.paths import Place, S3Path, names_in

if TYPE_CHECKING:  # torch is imported where tensors are read: finding files works without it
    from torch import Tensor

SAFETENSORS, PICKLED = ".safetensors", (".bin", ".pt", ".pth")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Keys under which programs store a state dict in one file.
ENVELOPES = ("model", "state_dict", "model_state_dict", "module")
# Files of a trainer beside pickled weights.
NOT_MODEL_FILES = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")


class Block(Protocol):
    """A stored tensor that is read only when indexed."""

    def get_shape(self) -> list[int]:
        """Return its shape."""

    def __getitem__(self, index: Any) -> Tensor:
        """Read the block at ``index``."""


class Mapped:
    """A tensor in memory or mapped from a file."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return its shape."""
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


class WeightFiles:
    """The weight files at a location (a folder, or one file, on a file system or in S3), opened as needed.

    Attributes:
        files: name of the file that holds each stored tensor.
    """

    def __init__(self, location: Place, stack: ExitStack) -> None:
        """Find the files. Raises `CheckpointError` where there are none, or files of the index are missing."""
        self._stack = stack
        self._open: dict[str, Callable[[str], Block]] = {}
        self._names: dict[str, list[str]] = {}
        if location.is_file():
            self._folder: Place = location.parent
            self.files = dict.fromkeys(self._keys(location.name), location.name)
        else:
            self._folder = location
            self.files = _files_of(location, self._keys)

    def tensor(self, name: str) -> Block:
        """Return the stored tensor ``name``."""
        file = self.files[name]
        self._keys(file)
        return self._open[file](name)

    def copy(self, copies: Iterable[tuple[Tensor, Block, Any]]) -> None:
        """Copy, for each (target, block, index), the block at the index into the target; from S3 in parallel."""
        if isinstance(self._folder, S3Path):
            from smp_train.models.streamed import fetch

            fetch(copies, self._folder)
            return
        for target, source, index in copies:
            target.copy_(source[index])

    def _keys(self, file: str) -> list[str]:
        if file not in self._open:
            read = _open_pickled if file.endswith(PICKLED) else _open_safetensors
            self._names[file], self._open[file] = read(self._folder / file, self._stack)
        return self._names[file]


def refuse_compressed(file: IO[bytes]) -> None:
    """Raise ValueError for a file of ``torch.save`` with compressed entries, whose memory its size does not bound.

    torch writes none. Files of the format before torch 1.6 are not archives and pass.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it has compressed entries, which torch.save does not write")
    file.seek(0)


def load_plain(file: Any, **options: Any) -> Any:
    """Return `torch.load` of a file of tensors and plain values. Raises ValueError for one with other objects.

    torch's own message advises to run the code in the file.
    """
    import torch

    try:
        return torch.load(file, weights_only=True, **options)
    except pickle.UnpicklingError as failure:
        name = re.search(r"GLOBAL ([\w.]+)", str(failure))
        kind = f"an object of {name[1]}" if name else "something"
        raise ValueError(f"it holds {kind} that is no tensor or plain value; no code of a file is run") from None


def _open_safetensors(path: Place, stack: ExitStack) -> tuple[list[str], Callable[[str], Block]]:
    if isinstance(path, S3Path):
        from smp_train.models.streamed import open_safetensors

        return open_safetensors(path)
    from safetensors import SafetensorError, safe_open

    try:
        handle = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
    except (OSError, SafetensorError) as failure:
        raise CheckpointError(f"{path} cannot be read: {failure}") from failure
    return list(handle.keys()), handle.get_slice


def _open_pickled(path: Place, stack: ExitStack) -> tuple[list[str], Callable[[str], Block]]:
    """Open a file of ``torch.save``, tensors and plain values only: nothing in it is executed."""
    load = partial(load_plain, map_location="cpu")
    block: Callable[[Tensor], Block] = Mapped
    try:
        if isinstance(path, S3Path):
            from smp_train.models.streamed import open_pickled

            content, fetched = open_pickled(path, load)
            block = fetched or Mapped
        else:
            with path.open("rb") as file:
                refuse_compressed(file)
            # The format before torch 1.6 cannot be mapped; it is read whole.
            content = load(path, mmap=zipfile.is_zipfile(path))
    except Exception as failure:  # anything, for a file of unknown origin
        raise CheckpointError(f"{path} cannot be read as a file of tensors: {first_line(failure)}") from failure
    tensors = _tensors_in(content)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors by name; is it the file with the model's weights?")
    storages = {one._cdata: one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors.values())}
    for name, tensor in tensors.items():
        if math.prod(tensor.shape) * tensor.dtype.itemsize > sum(storages.values()):
            raise CheckpointError(f"{path}: {name} would be larger than all that the file holds: {list(tensor.shape)}")
    return list(tensors), lambda name: block(tensors[name])


def _tensors_in(content: Any) -> dict[str, Tensor]:
    from torch import Tensor

    for envelope in ENVELOPES:
        if isinstance(content, dict) and isinstance(content.get(envelope), dict):
            return _tensors_in(content[envelope])
    if not isinstance(content, dict):
        return {}
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _files_of(folder: Place, keys: Callable[[str], list[str]]) -> dict[str, str]:
    """Return the file of each stored tensor; safetensors win where there are both kinds."""
    there = set(names_in(folder))
    for name in INDEXES:
        index = folder / name
        if name not in there or (name != INDEXES[0] and any(file.endswith(SAFETENSORS) for file in there)):
            continue
        try:
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            named = sorted(set(files.values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
            raise CheckpointError(f"{index} is not an index of weight files: {failure}") from failure
        missing = [file for file in named if file not in there]
        if missing:
            raise CheckpointError(f"{folder}: the index names {missing[0]}, which is not there")
        return files
    found = weight_files(folder)
    if not found:
        raise CheckpointError(f"{folder} has no weights (*.safetensors or *.bin)")
    return {key: file for file in found for key in keys(file)}


def weight_files(folder: Place) -> list[str]:
    """Return the names of a folder's safetensors files, or of its pickled files where it has none."""
    there = [name for name in names_in(folder) if not name.startswith(NOT_MODEL_FILES)]
    for suffixes in ((SAFETENSORS,), PICKLED):
        found = [name for suffix in suffixes for name in there if name.endswith(suffix)]
        if found:
            return found
    return []
