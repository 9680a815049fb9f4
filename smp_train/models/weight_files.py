"""Files with model weights, opened so that any block of any tensor can be read without reading the rest."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from smp_train.errors import CheckpointError

if TYPE_CHECKING:  # Imported where it is used: what only looks for files does without.
    from torch import Tensor

SAFETENSORS, PICKLED = ".safetensors", (".bin", ".pt", ".pth")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# What programs put around a state dict that they store in one file.
ENVELOPES = ("model", "state_dict", "model_state_dict", "module")
# Beside the weights of a pickled checkpoint lie the trainer's own files.
NOT_MODEL_FILES = ("optimizer", "scheduler", "training_args", "rng_state", "scaler")


class Block(Protocol):
    """A stored tensor of which nothing is read until it is indexed."""

    def get_shape(self) -> list[int]:
        """Return its shape."""

    def __getitem__(self, index: Any) -> Tensor:
        """Read the block at ``index``."""


class _Mapped:
    """A tensor in memory, or one that is mapped from a file: its pages are read when touched."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


class WeightFiles:
    """The weight files at a location (a folder, or one file), opened as needed.

    Attributes:
        files: name of the file that holds each stored tensor.
    """

    def __init__(self, location: Path, stack: ExitStack) -> None:
        """Find the files. Raises `CheckpointError` where there are none or their index does not fit them."""
        self._stack = stack
        self._open: dict[str, Callable[[str], Block]] = {}
        self._names: dict[str, list[str]] = {}
        if location.is_file():
            self._folder = location.parent
            self.files = dict.fromkeys(self._keys(location.name), location.name)
        else:
            self._folder = location
            self.files = _files_of(location, self._keys)

    def tensor(self, name: str) -> Block:
        """Return the stored tensor ``name``."""
        file = self.files[name]
        self._keys(file)
        return self._open[file](name)

    def _keys(self, file: str) -> list[str]:
        if file not in self._open:
            read = _open_pickled if file.endswith(PICKLED) else _open_safetensors
            self._names[file], self._open[file] = read(self._folder / file, self._stack)
        return self._names[file]


def _open_safetensors(path: Path, stack: ExitStack) -> tuple[list[str], Callable[[str], Block]]:
    from safetensors import SafetensorError, safe_open

    try:
        handle = stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
    except (OSError, SafetensorError) as failure:
        raise CheckpointError(f"{path} cannot be read: {failure}") from failure
    return list(handle.keys()), handle.get_slice


def _open_pickled(path: Path, stack: ExitStack) -> tuple[list[str], Callable[[str], Block]]:
    """Open a file of ``torch.save``, tensors and plain values only: nothing in it is executed."""
    import torch

    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # The format of before torch 1.6 cannot be mapped; it is read whole.
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as failure:
        first = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        raise CheckpointError(f"{path} cannot be read as a file of tensors: {first}") from failure
    tensors = _tensors_in(content)
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors by name; is it the file with the model's weights?")
    return list(tensors), lambda name: _Mapped(tensors[name])


def _tensors_in(content: Any) -> dict[str, Tensor]:
    from torch import Tensor

    for envelope in ENVELOPES:
        if isinstance(content, dict) and isinstance(content.get(envelope), dict):
            return _tensors_in(content[envelope])
    if not isinstance(content, dict):
        return {}
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def _files_of(folder: Path, keys: Callable[[str], list[str]]) -> dict[str, str]:
    """Return which file holds each stored tensor; safetensors are preferred where there are both kinds."""
    for name in INDEXES:
        index = folder / name
        if not index.is_file() or (index.name != INDEXES[0] and any(folder.glob(f"*{SAFETENSORS}"))):
            continue
        try:
            files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as failure:
            raise CheckpointError(f"{index} is not an index of weight files: {failure}") from failure
        missing = sorted(file for file in set(files.values()) if not (folder / file).is_file())
        if missing:
            raise CheckpointError(f"{folder}: the index names {missing[0]}, which is not there")
        return files
    found = weight_files(folder)
    if not found:
        raise CheckpointError(f"{folder} has no weights (*.safetensors or *.bin)")
    return {key: path.name for path in found for key in keys(path.name)}


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a folder: its safetensors, or where there are none its pickled ones."""
    for suffixes in ((SAFETENSORS,), PICKLED):
        found = [path for suffix in suffixes for path in sorted(folder.glob(f"*{suffix}"))]
        found = [path for path in found if not path.name.startswith(NOT_MODEL_FILES)]
        if found:
            return found
    return []
