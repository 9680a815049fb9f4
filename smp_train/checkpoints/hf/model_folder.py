"""Write a model to a folder as Hugging Face's libraries read it, on a file system or in S3.

A model never overwrites another one. The files of an existing model are first moved to a sub-folder ``previous-<n>``,
because a mount point (SageMaker's ``/opt/ml/model``) and a prefix in S3 cannot be renamed.
Without config.json or adapter_config.json no library opens the folder: it is moved first and written last. A process
that is killed in between therefore leaves no folder that opens with wrong or mixed weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from smp_train import storage
from smp_train.checkpoints.hf.card import CARD_FILE, is_our_card
from smp_train.errors import CheckpointError, ConfigError, SmpTrainError
from smp_train.models.hf_weights import NOT_WEIGHTS
from smp_train.models.hugging_face import ADAPTER_FILE, CONFIG_FILE, GENERATION_FILE
from smp_train.models.streamed import FORMAT_DTYPES
from smp_train.models.tokenizer import TOKENIZER_FILES
from smp_train.models.weight_files import INDEXES, NOT_MODEL_FILES, PICKLED, SAFETENSORS, Block, WeightFiles
from smp_train.storage import Storage
from smp_train.storage.paths import names_in, place

ENTRY_FILES = (CONFIG_FILE, ADAPTER_FILE)
"""Files by which a model, or an adapter, is opened."""
SHARD_BYTES = 5_000_000_000
MOVING = ".moving"
"""File in ``previous-<n>`` while files are moved there."""
_PREVIOUS = re.compile(r"previous-(\d{1,9})")
_DTYPE_NAMES = {dtype: name for name, dtype in FORMAT_DTYPES.items()}
Progress = Callable[[int, int], None]
"""A function that is called with the bytes written so far and in all."""

logger = logging.getLogger(__name__)


class LazyTensors(NamedTuple):
    """Tensors to write, by name, which only have shape and dtype (they may be on meta), and a function to read them."""

    tensors: Mapping[str, Tensor]
    read: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """Size in bytes of all tensors."""
        return sum(value.nbytes for value in self.tensors.values())


def stored_tensors(files: WeightFiles, dtype: torch.dtype | None) -> list[LazyTensors]:
    """Return the tensors in weight files, those of floating point in ``dtype`` if it is not None."""
    items = []
    for name in files.files:
        if not NOT_WEIGHTS.search(name):
            block = files.tensor(name)
            stored = block[(slice(0, 0),) * len(block.get_shape()) or ...].dtype
            to = dtype if dtype is not None and stored.is_floating_point else stored
            tensors = {name: torch.empty(block.get_shape(), dtype=to, device="meta")}
            items.append(LazyTensors(tensors, partial(_read_block, name, block, to)))
    return items


def _read_block(name: str, block: Block, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: block[...].to(dtype)}


class ModelFolder:
    """The files of a new model. ``entry_files`` keeps the files by which the model is opened until all are written."""

    def __init__(self, folder: Storage) -> None:
        self.folder = folder
        self.entry_files: dict[str, bytes] = {}
        self.written: list[str] = []

    @contextmanager
    def stream(self, name: str, size: int) -> Iterator[BinaryIO]:
        """Yield a stream into a file of about ``size`` bytes, which exists once the context ends without an error."""
        self.written.append(name)
        with _errors_named(f"{self.folder.location}/{name}"), self.folder.writer(name, size) as file:
            yield file

    def put_all(self, files: Mapping[str, bytes]) -> None:
        """Write small files."""
        for name, data in files.items():
            if name in ENTRY_FILES:
                self.entry_files[name] = data
                continue
            with self.stream(name, len(data)) as file:
                file.write(data)

    def put_weights(
        self, items: Iterable[LazyTensors], shard_bytes: int, on_progress: Progress | None = None, name: str = "model"
    ) -> None:
        """Write tensors to files ``<name>*.safetensors`` of about ``shard_bytes``, and the index of several files."""
        shards = _shards(items, shard_bytes)
        total, done = sum(item.nbytes for shard in shards for item in shard), 0
        file_of: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            file = f"{name}-{number:05d}-of-{len(shards):05d}.safetensors" if shards[1:] else f"{name}.safetensors"
            for written in self._put_safetensors(file, shard):
                done += written
                if on_progress is not None:
                    on_progress(done, total)
            file_of |= {tensor: file for item in shard for tensor in item.tensors}
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
            self.put_all({INDEXES[0]: (json.dumps(index, indent=2) + "\n").encode()})

    def _put_safetensors(self, name: str, items: list[LazyTensors]) -> Iterator[int]:
        """Write one file of the safetensors format; yield the number of bytes after each item.

        The format (https://github.com/huggingface/safetensors#format): the header's length in 8 bytes, little endian;
        the header, JSON; the tensors without gaps. The library itself needs all tensors of a file in memory at once.
        """
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for key, value in (pair for item in items for pair in item.tensors.items()):
            offsets = [offset, offset + value.nbytes]
            header[key] = {"dtype": _DTYPE_NAMES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
            offset = offsets[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with self.stream(name, offset) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for item in items:
                values = item.read()
                for key, expected in item.tensors.items():
                    value = values[key].detach().contiguous()
                    if (value.shape, value.dtype) != (expected.shape, expected.dtype):
                        raise CheckpointError(f"{key} is {list(value.shape)}, {list(expected.shape)} was announced")
                    file.write(value.reshape(-1).view(torch.uint8).numpy().data)
                yield item.nbytes


def _shards(items: Iterable[LazyTensors], shard_bytes: int) -> list[list[LazyTensors]]:
    shards: list[list[LazyTensors]] = [[]]
    for item in items:
        if shards[-1] and sum(earlier.nbytes for earlier in shards[-1]) + item.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(item)
    # Large dtypes first: every tensor is then aligned to its elements.
    return [sorted(shard, key=lambda item: -next(iter(item.tensors.values())).dtype.itemsize) for shard in shards]


@contextmanager
def new_model(location: str | os.PathLike[str], *, overwrite: bool = False) -> Iterator[ModelFolder]:
    """Yield the folder of a new model at ``location``, which opens once the context ends without an error.

    Raises `ConfigError` if a model, or part of one, is there already. With ``overwrite`` the existing model's files are
    moved to a sub-folder ``previous-<n>``. Files that are not part of a model stay. If the context ends with an error,
    the new files are deleted.
    """
    folder = storage.at(location)
    with _errors_named(folder.location):
        names = _existing_model(location)
        if names and not overwrite:
            raise ConfigError(
                f"{folder.location} holds a model already; give another folder, or move that model to a sub-folder "
                "with --overwrite 1"
            )
        _move_aside(folder, names)
    model = ModelFolder(folder)
    try:
        yield model
        for name, data in model.entry_files.items():
            with model.stream(name, len(data)) as file:
                file.write(data)
    except BaseException:
        with contextlib.suppress(OSError, SmpTrainError):
            for name in reversed(model.written):
                folder.delete(name)
        raise


def _existing_model(location: str | os.PathLike[str]) -> list[str]:
    """Return the names of a model's files in the order to move them: entry files, weights, small files, indexes."""
    folder = place(location)
    names = names_in(folder)
    weights = [n for n in names if n.endswith((SAFETENSORS, *PICKLED)) and not n.startswith(NOT_MODEL_FILES)]
    if not weights and not {*ENTRY_FILES, *INDEXES}.intersection(names):
        return []
    small = [name for name in names if name in TOKENIZER_FILES or name == GENERATION_FILE]
    small += [CARD_FILE] if CARD_FILE in names and is_our_card((folder / CARD_FILE).read_bytes()) else []
    return [name for name in (*ENTRY_FILES, *weights, *small, *INDEXES) if name in names]


def _move_aside(folder: Storage, names: list[str]) -> None:
    """Move files to a new sub-folder ``previous-<n>``, or complete an interrupted move to the last such sub-folder."""
    numbers = [int(match[1]) for name in folder.level()[1] if (match := _PREVIOUS.fullmatch(name))]
    number = max(numbers, default=0)
    interrupted = folder.exists(f"previous-{number}/{MOVING}")
    if not names and not interrupted:
        return
    # Entry files move first: if one is in both folders, somebody has written another model since the interruption.
    entry_files = [name for name in names if name in ENTRY_FILES]
    another = any(folder.exists(f"previous-{number}/{name}") for name in entry_files)
    previous = f"previous-{number}" if interrupted and not another else f"previous-{number + 1}"
    folder.put(f"{previous}/{MOVING}", b"")
    for name in names:
        folder.move(name, f"{previous}/{name}")
    folder.delete(f"{previous}/{MOVING}")
    logger.warning("%s held a model, which is now in %s/%s", folder.location, folder.location, previous)


def check_writable(location: str | os.PathLike[str], flag: str) -> None:
    """Write and delete a file in the folder that ``flag`` names. Raises `CheckpointError` on failure."""
    probe = f".probe-{uuid.uuid4().hex[:8]}"
    try:
        folder = storage.at(location)
        with _errors_named(folder.location):
            folder.put(probe, b"smp-train\n")
            folder.delete(probe)
    except CheckpointError as error:
        raise CheckpointError(f"--{flag}: {error}") from None


@contextmanager
def _errors_named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write to {path}: {error.strerror or error}; give another folder") from None
