"""From a checkpoint to a folder that Hugging Face's ``from_pretrained`` opens, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from smp_train.checkpoints.dcp import Reader, read_tensor, saved_entries
from smp_train.checkpoints.discovery import Checkpoint
from smp_train.checkpoints.model_folder import put, put_made, stream, writing
from smp_train.checkpoints.state import gather_state
from smp_train.errors import CheckpointError
from smp_train.models.hub_names import hub_names, note, to_hub
from smp_train.models.hugging_face import load_tokenizer, model_of
from smp_train.models.streamed import FORMAT_DTYPES
from smp_train.models.weight_files import INDEXES, WeightFiles
from smp_train.storage import Storage
from smp_train.storage.paths import Place, on_this_machine, place

SHARD_BYTES = 5_000_000_000
MODEL = "model."
GENERATION = "generation_config.json"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in FORMAT_DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor of the folder: its name, shape and dtype there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Item:
    """What is read at once, and the tensors of the folder that come of it."""

    stored: tuple[Stored, ...]
    read: Callable[[], dict[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """Size in bytes of all tensors."""
        return sum(each.nbytes for each in self.stored)


def export(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    like: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the model of ``checkpoint`` to ``folder``, also in S3, as Hugging Face has it. No collective.

    Names and layout are the hub's: safetensors in files of about
    ``shard_bytes``, with an index where there are several; config.json, generation_config.json, and the files of
    ``tokenizer`` (a folder or a name) where given. ``dtype`` is that of the checkpoint unless given. Host memory: one
    parameter and what it is converted to. config.json is written last: without it the folder opens nowhere.

    ``like`` is where the weights were once read: a generation_config.json beside them is taken over.

    ``on_progress`` is called with the bytes done and in all. Raises `ConfigError` where ``folder`` holds a model
    already, which ``replace`` removes once this one is whole; `CheckpointError` where the checkpoint does not hold a
    whole model.
    """
    config = checkpoint.model_config()
    config.use_cache = True  # Switched off for training.
    plain = _plain_model(config)
    note(plain)
    reader = checkpoint.reader_of(gather_state(plain))
    items = _items_of_model(plain, reader, dtype, checkpoint.path)
    with writing(folder, replace) as out:
        write_weights(out, items, shard_bytes, on_progress)
        _describe(out, plain, config, items, tokenizer, like)


def export_weights(
    weights: Mapping[str, Tensor],
    config: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: str | None = None,
    like: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
) -> None:
    """Write a whole model that is in host memory, under Hugging Face names, as `export` does. No collective."""
    config.use_cache = True  # Switched off for training.
    plain = _plain_model(config)
    lacking = [name for name in _needed(plain) if name not in weights]
    if lacking:
        raise CheckpointError(f"what was exported is not the whole model: it lacks {', '.join(lacking[:3])}")
    items = []
    for name in _needed(plain):
        found = to_hub(plain, {name: weights[name]})
        stored = tuple(Stored(hub, tuple(value.shape), value.dtype) for hub, value in found.items())
        items.append(Item(stored, partial(dict, found)))
    with writing(folder, replace) as out:
        write_weights(out, items, shard_bytes)
        _describe(out, plain, config, items, tokenizer, like)


def _describe(
    out: Storage, plain: nn.Module, config: Any, items: Iterable[Item], tokenizer: str | None, like: str | None
) -> None:
    """Write what stands beside the weights, config.json last."""
    config.architectures = [type(plain).__name__]
    dtypes = {stored.dtype for item in items for stored in item.stored if stored.dtype.is_floating_point}
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", max(dtypes, key=lambda d: d.itemsize))
    write_tokenizer(tokenizer, out)
    from transformers import GenerationConfig

    generation = None if like is None else _folder_of(like) / GENERATION
    if generation is not None and generation.is_file():
        put(out, GENERATION, generation.read_bytes())
    else:
        put_made(out, GenerationConfig.from_model_config(config).save_pretrained)
    put_made(out, config.save_pretrained)


def _plain_model(config: Any) -> Any:
    with torch.device("meta"):
        return model_of(config)


def _items_of_model(plain: Any, reader: Reader, dtype: torch.dtype | None, label: str) -> list[Item]:
    """Return what to write, entry by entry. Raises `CheckpointError` where it would not be the whole model."""
    as_on_hub = {tensor.name for tensors in hub_names(plain).tensors.values() for tensor in tensors}
    items = []
    saved = set()
    for key, entry in saved_entries(reader).items():
        if not key.startswith(MODEL) or not hasattr(entry, "size"):
            continue
        name = key.removeprefix(MODEL)
        saved.add(name)
        as_saved = entry.properties.dtype
        to = dtype if dtype is not None and as_saved.is_floating_point else as_saved
        converted = (lambda tensors: tensors) if name in as_on_hub else partial(to_hub, plain)
        stored = tuple(
            Stored(hub, tuple(value.shape), value.dtype)
            for hub, value in converted({name: torch.empty(entry.size, dtype=to, device="meta")}).items()
        )

        def read(key: str = key, name: str = name, to: torch.dtype = to, converted: Any = converted) -> Any:
            return converted({name: read_tensor(reader, key).to(to)})

        items.append(Item(stored, read))
    found = {stored.name for item in items for stored in item.stored}
    needed = {name: torch.empty(value.shape, device="meta") for name, value in _needed(plain).items()}
    lacking = [name for name in to_hub(plain, needed) if name not in found]
    if lacking and saved >= needed.keys():
        raise CheckpointError(f"{label}: transformers stores several parameters of this model as one; not exported")
    if lacking:
        raise CheckpointError(f"{label} does not hold the whole model: it lacks {', '.join(lacking[:3])}")
    return items


def _needed(plain: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by their names in memory, tied ones once."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, value in plain.state_dict(keep_vars=True).items():
        first.setdefault(id(value), (name, value))
    return dict(first.values())


def stored_item(files: WeightFiles, name: str, dtype: torch.dtype | None) -> Item:
    """Return a tensor of weight files as something to write, as it is or, if of floating point, as ``dtype``."""
    value = files.tensor(name)
    sample = value[(slice(0, 0),) * len(value.get_shape())] if value.get_shape() else value[...]
    to = dtype if dtype is not None and sample.dtype.is_floating_point else sample.dtype
    stored = Stored(name, tuple(value.get_shape()), to)
    return Item((stored,), lambda: {name: files.tensor(name)[...].to(to)})


def write_weights(
    out: Storage,
    items: Iterable[Item],
    shard_bytes: int = SHARD_BYTES,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the tensors of ``items`` to safetensors files of about ``shard_bytes``, and their index."""
    shards = _shards(items, shard_bytes)
    total = sum(item.nbytes for shard in shards for item in shard)
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with stream(out, name, sum(item.nbytes for item in shard)) as file:
            for written in _write_safetensors(file, shard):
                done += written
                on_progress(done, total)
        weight_map |= {stored.name: name for item in shard for stored in item.stored}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        put(out, INDEXES[0], (json.dumps(index, indent=2) + "\n").encode())


def _shards(items: Iterable[Item], shard_bytes: int) -> list[list[Item]]:
    shards: list[list[Item]] = [[]]
    for item in items:
        if shards[-1] and sum(each.nbytes for each in shards[-1]) + item.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(item)
    # Wide elements first keeps every tensor aligned to its own element size.
    return [sorted(shard, key=lambda item: -item.stored[0].dtype.itemsize) for shard in shards]


def _write_safetensors(file: BinaryIO, items: list[Item]) -> Iterator[int]:
    """Write one file of the safetensors format; yield the bytes of each item once written.

    The format (https://github.com/huggingface/safetensors#format): the header's length in 8 bytes, little endian; the
    header, JSON; the tensors, one after another without gaps. Written here because the library takes all tensors of
    a file at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for item in items:
        for stored in item.stored:
            header[stored.name] = {
                "dtype": NAMES[stored.dtype],
                "shape": list(stored.shape),
                "data_offsets": [offset, offset + stored.nbytes],
            }
            offset += stored.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for item in items:
        values = item.read()
        for stored in item.stored:
            value = values[stored.name].detach().contiguous()
            if tuple(value.shape) != stored.shape or value.dtype != stored.dtype:
                raise CheckpointError(f"{stored.name} is {list(value.shape)}, {list(stored.shape)} was announced")
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)
        yield item.nbytes


def write_tokenizer(tokenizer: str | None, out: Storage) -> None:
    """Write a tokenizer's files, those of a folder or of a name. Raises `ConfigError` where it cannot be read."""
    if tokenizer is not None:
        with _opened(tokenizer) as found:
            put_made(out, found.save_pretrained)


def check_tokenizer(tokenizer: str | None) -> None:
    """Raise `ConfigError` where `write_tokenizer` would."""
    if tokenizer is not None:
        with _opened(tokenizer):
            pass


@contextmanager
def _opened(tokenizer: str) -> Iterator[Any]:
    with on_this_machine(tokenizer) as folder:  # until it is saved: some tokenizers copy their files
        yield load_tokenizer(folder)


def tokenizer_beside(weights: str | None) -> str | None:
    """Return the folder of ``weights`` where a tokenizer lies beside them, to go with what is made of them."""
    if weights is None:
        return None
    folder = _folder_of(weights)
    return str(folder) if (folder / "tokenizer_config.json").is_file() else None


def _folder_of(weights: str) -> Place:
    there = place(weights)
    return there if there.is_dir() else there.parent
