"""Weight files of a model, from which any block of any tensor can be read alone."""

from __future__ import annotations

import io
import json
import logging
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

from smp_train.errors import CheckpointError, first_line
from smp_train.storage.paths import Place, S3Path, names_in

if TYPE_CHECKING:  # finding files must work without torch
    from torch import Tensor

SAFETENSORS, PICKLED = ".safetensors", (".bin", ".pt", ".pth")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ENVELOPES = ("model", "state_dict", "model_state_dict", "module")
"""Keys under which programs put the state dict in a file."""
NOT_MODEL_FILES = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")
"""Names that a trainer gives to its other files, without their suffixes."""

logger = logging.getLogger("smp_train.models")

Block = Any
"""A stored tensor that is read when it is indexed: a slice of safetensors, a `Streamed`, or a mapped tensor."""
OpenFile = tuple[list[str], Callable[[str], Block]]
"""The names of a file's tensors, and a function that opens a tensor by name."""


def shape_of(block: Block) -> tuple[int, ...]:
    """Return a stored tensor's shape."""
    return tuple(block.get_shape() if hasattr(block, "get_shape") else block.shape)


class WeightFiles:
    """The weight files at a location (a folder, or one file, on a file system or in S3), opened as needed.

    Attributes:
        files: the file of each stored tensor, by the tensor's name.
    """

    def __init__(self, location: Place, stack: ExitStack) -> None:
        """Find the files; ``stack`` closes them. Raises `CheckpointError` if files are missing."""
        self._stack = stack
        self._opened: dict[str, OpenFile] = {}
        self._folder: Place = location.parent if location.is_file() else location
        if location.is_file():
            self.files = dict.fromkeys(self._open(location.name)[0], location.name)
        else:
            self.files = _files_in_index(location) or {
                name: file for file in weight_files(location) for name in self._open(file)[0]
            }
        if not self.files:
            raise CheckpointError(f"{location} has no weights (*.safetensors or *.bin)")

    def tensor(self, name: str) -> Block:
        """Return the stored tensor ``name``."""
        return self._open(self.files[name])[1](name)

    def copy(self, copies: Iterable[tuple[Tensor, Block, Any]]) -> None:
        """For each (target, block, index), copy the block at the index into the target; from S3 in parallel."""
        if isinstance(self._folder, S3Path):
            from smp_train.models.streamed import fetch

            fetch(copies, self._folder)
        else:
            for target, source, index in copies:
                target.copy_(source[index])

    def _open(self, file: str) -> OpenFile:
        if file not in self._opened:
            path = self._folder / file
            is_pickled = file.endswith(PICKLED)
            self._opened[file] = _open_pickled(path) if is_pickled else _open_safetensors(path, self._stack)
        return self._opened[file]


def refuse_compressed(file: IO[bytes]) -> None:
    """Raise ValueError for a file of ``torch.save`` with compressed entries, which could fill the memory when read.

    torch itself does not compress. Files of torch before 1.6 are not archives, and pass.
    """
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("it has compressed entries, which torch.save does not write")
    file.seek(0)


def load_plain(file: Any, **options: Any) -> Any:
    """Return `torch.load` of a file of tensors and plain values. Raises ValueError for a file with other objects.

    torch's own message would advise to run the code in the file.
    """
    import torch

    try:
        return torch.load(file, weights_only=True, **options)
    except pickle.UnpicklingError as failure:
        name = re.search(r"GLOBAL ([\w.]+)", str(failure))
        kind = f"an object of {name[1]}" if name else "something"
        raise ValueError(f"it holds {kind} that is no tensor or plain value; no code of a file is run") from None


def _open_safetensors(path: Place, stack: ExitStack) -> OpenFile:
    if isinstance(path, S3Path):
        from smp_train.models.streamed import open_safetensors

        return open_safetensors(path)
    from safetensors import SafetensorError, safe_open

    try:
        handle = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
    except (OSError, SafetensorError) as failure:
        raise CheckpointError(f"{path} cannot be read: {failure}") from failure
    return list(handle.keys()), handle.get_slice


def _open_pickled(path: Place) -> OpenFile:
    """Open a file of ``torch.save`` with tensors and plain values only; nothing in it is executed."""
    in_s3 = isinstance(path, S3Path)
    if in_s3:
        logger.info("%s is not safetensors, which could be read in parts: fetching all of it into memory", path)
    try:
        with path.open_ranges(path.entry()) if isinstance(path, S3Path) else path.open("rb") as source:
            file = io.BytesIO(source.read()) if in_s3 else source
            refuse_compressed(file)
            mapped = not in_s3 and zipfile.is_zipfile(file)  # files of torch before 1.6 are no archives
            file.seek(0)
            content = load_plain(path if mapped else file, map_location="cpu", mmap=mapped)
    except Exception as failure:  # files of unknown origin can raise anything
        raise CheckpointError(f"{path} cannot be read as a file of tensors: {first_line(failure)}") from failure
    tensors = _tensors_in(content)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors by name; is it the file with the model's weights?")
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    for name, tensor in tensors.items():
        if math.prod(tensor.shape) * tensor.dtype.itemsize > sum(storages.values()):
            raise CheckpointError(f"{path}: {name} would be larger than all that the file holds: {list(tensor.shape)}")
    return list(tensors), tensors.__getitem__


def _tensors_in(content: Any) -> dict[str, Tensor]:
    from torch import Tensor

    if not isinstance(content, dict):
        return {}
    for envelope in ENVELOPES:
        if isinstance(content.get(envelope), dict):
            return _tensors_in(content[envelope])
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _files_in_index(folder: Place) -> dict[str, str]:
    """Return the file of each stored tensor, as the folder's index lists them; empty if there is no index to use.

    An index of pickled files is not used if there are safetensors.
    """
    names = set(names_in(folder))
    for name in INDEXES:
        if name not in names or (name != INDEXES[0] and any(file.endswith(SAFETENSORS) for file in names)):
            continue
        index = folder / name
        try:
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            missing = sorted(set(files.values()) - names)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
            raise CheckpointError(f"{index} is not an index of weight files: {failure}") from failure
        if missing:
            raise CheckpointError(f"{folder}: the index names {missing[0]}, which is not there")
        return files
    return {}


def weight_files(folder: Place) -> list[str]:
    """Return the names of a folder's safetensors files, or of its pickled files if it has no safetensors."""
    names = [name for name in names_in(folder) if not name.startswith(NOT_MODEL_FILES)]
    pickled = [name for suffix in PICKLED for name in names if name.endswith(suffix)]
    return [name for name in names if name.endswith(SAFETENSORS)] or pickled
