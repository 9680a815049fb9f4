"""From a checkpoint to a folder that Hugging Face's ``from_pretrained`` opens, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor, nn

from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.dcp import Reader, read_tensor, saved_entries
from smp_train.checkpoints.model_card import TAG, hub_name, model_card
from smp_train.checkpoints.model_folder import put, put_made, stream, writing
from smp_train.checkpoints.pretrained import load_weights
from smp_train.checkpoints.state import gather_state
from smp_train.checkpoints.tokenizer import tokenizer_files
from smp_train.errors import CheckpointError, ConfigError, first_few
from smp_train.models.build import build_meta, materialise
from smp_train.models.hub_names import canonical_name, hub_names, named_once, note, to_hub
from smp_train.models.hugging_face import GENERATION_FILE, model_of
from smp_train.models.lora import merge_adapters
from smp_train.models.resolve import ModelSpec, resolve_saved
from smp_train.models.streamed import FORMAT_DTYPES
from smp_train.models.weight_files import INDEXES, WeightFiles
from smp_train.storage import Storage
from smp_train.storage.paths import place

SHARD_BYTES = 5_000_000_000
MODEL = "model."
CARD = "README.md"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in FORMAT_DTYPES.items()}


class Item(NamedTuple):
    """What is read at once: the tensors of the folder that come of it, by name, and a function that reads them.

    Of the former only shape and dtype are used: they may be on meta.
    """

    tensors: Mapping[str, Tensor]
    read: Callable[[], Mapping[str, Tensor]]

    @property
    def nbytes(self) -> int:
        """Size in bytes of all tensors."""
        return sum(value.nbytes for value in self.tensors.values())


def export(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    merge: bool = False,
    base: str | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the model of ``checkpoint`` to ``folder``, also in S3, as Hugging Face has it. No collective.

    Names and layout are the hub's: safetensors in files of about ``shard_bytes``, with an index where there are
    several; config.json, generation_config.json, a model card (README.md, unless the user's own is there), and the
    files of ``tokenizer`` (a folder or a name; by default the checkpoint's). ``dtype`` is that of the checkpoint unless
    given. Host memory: one parameter and what it is converted to. config.json is written last: without it the folder
    opens nowhere.

    Of a run with adapters these alone are written, as peft has them (adapter_model.safetensors, adapter_config.json);
    with ``merge`` the weights they belong to (``base``, by default where these were), with the adapters added in, in
    host memory as a whole.

    ``on_progress`` is called with the bytes done and in all. Raises `ConfigError` where ``folder`` holds a model, which
    ``replace`` removes once this one is whole; `CheckpointError` where the checkpoint does not hold a whole model.
    """
    files = files_beside(checkpoint, folder, tokenizer)
    if merge and "adapter" not in checkpoint.meta:
        raise ConfigError(f"{checkpoint.path} has no adapters; leave --merge out")
    if merge:
        weights, config = _merged(checkpoint, base, dtype)
        export_weights(weights, config, folder, files=files, shard_bytes=shard_bytes, replace=replace)
        return
    if base is not None:
        raise ConfigError(f"--model {base}: are weights to add adapters into; give --merge 1, or leave --model out")
    if "adapter" in checkpoint.meta:
        _export_adapter(checkpoint, folder, files, dtype=dtype, replace=replace)
        return
    config, plain = _plain_model(checkpoint.model_config())
    note(plain)
    items = _items_of_model(plain, checkpoint.reader_of(gather_state(plain)), dtype, checkpoint.path)
    with writing(folder, replace) as out:
        write_weights(out, items, shard_bytes, on_progress)
        _describe(out, plain, config, items, files)


def files_beside(
    checkpoint: Checkpoint, folder: str | os.PathLike[str], tokenizer: str | None = None
) -> dict[str, bytes]:
    """Return the small files of a model that is exported to ``folder``: tokenizer, model card, generation_config.json.

    No card where the user's own README.md is there, and no settings of generation where none are known.
    """
    files = checkpoint.tokenizer() if tokenizer is None else tokenizer_files(tokenizer)
    card = model_card(
        checkpoint.meta, name=os.path.basename(checkpoint.path), step=checkpoint.step, tokenizer=bool(files)
    )
    there = place(folder) / CARD
    if not there.is_file() or TAG.encode() in there.read_bytes():
        files[CARD] = card.encode()
    if "generation_config" in checkpoint.meta:
        files[GENERATION_FILE] = (json.dumps(checkpoint.meta["generation_config"], indent=2) + "\n").encode()
    return files


def _merged(checkpoint: Checkpoint, base: str | None, dtype: torch.dtype | None) -> tuple[dict[str, Tensor], Any]:
    """Return the weights with the adapters added in, by the names of the hub, and the model's configuration."""
    spec = _adapted(checkpoint)
    model: Any = build_meta(spec)
    materialise(model, "cpu")
    load_weights(model, base or spec.pretrained or "")
    checkpoint.load(gather_state(model))
    merge_adapters(model)
    return {
        canonical_name(key): value.detach() if dtype is None or not value.is_floating_point() else value.to(dtype)
        for key, value in named_once(model).items()
    }, spec.config


def _adapted(checkpoint: Checkpoint) -> ModelSpec:
    return resolve_saved(
        checkpoint.model_config(), checkpoint.committed.model_type, checkpoint.path, checkpoint.meta
    )


def _export_adapter(
    checkpoint: Checkpoint, folder: str | os.PathLike[str], files: Mapping[str, bytes], *, dtype: torch.dtype | None,
    replace: bool,
) -> None:  # fmt: skip
    spec = _adapted(checkpoint)
    assert spec.lora is not None
    reader = checkpoint.reader()
    tensors = {
        "base_model.model." + key.removeprefix(MODEL): read_tensor(reader, key).to(dtype or torch.float32)
        for key in saved_entries(reader)
        if key.startswith(MODEL)
    }
    items = [Item({key: value}, partial(dict, {key: value})) for key, value in tensors.items()]
    with writing(folder, replace) as out:
        with stream(out, "adapter_model.safetensors", sum(item.nbytes for item in items)) as file:
            for _ in _write_safetensors(file, items):
                pass
        put_all(out, files)
        put_made(out, spec.lora.config(hub_name(spec.pretrained or "")).save_pretrained)


def export_weights(
    weights: Mapping[str, Tensor],
    config: Any,
    folder: str | os.PathLike[str],
    *,
    files: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
) -> None:
    """Write a whole model that is in host memory, under Hugging Face names, as `export` does. No collective.

    ``files`` are those of `files_beside`.
    """
    config, plain = _plain_model(config)
    missing = [name for name in named_once(plain) if name not in weights]
    if missing:
        raise CheckpointError(f"the export is not the whole model: it lacks {first_few(missing)}")
    found = (to_hub(plain, {name: weights[name]}) for name in named_once(plain))
    items = [Item(tensors, partial(dict, tensors)) for tensors in found]
    with writing(folder, replace) as out:
        write_weights(out, items, shard_bytes)
        _describe(out, plain, config, items, files or {})


def _describe(
    out: Storage, plain: nn.Module, config: Any, items: Iterable[Item], files: Mapping[str, bytes]
) -> None:
    """Write the files beside the weights, config.json last."""
    from transformers import GenerationConfig

    config.architectures = [type(plain).__name__]
    dtypes = {value.dtype for item in items for value in item.tensors.values() if value.dtype.is_floating_point}
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", max(dtypes, key=lambda d: d.itemsize))
    put_all(out, files)
    if GENERATION_FILE not in files:
        put_made(out, GenerationConfig.from_model_config(config).save_pretrained)
    put_made(out, config.save_pretrained)


def _plain_model(config: Any) -> tuple[Any, Any]:
    """Return the configuration as it was before training, and its model on meta."""
    config.use_cache = True
    with torch.device("meta"):
        return config, model_of(config)


def _items_of_model(plain: Any, reader: Reader, dtype: torch.dtype | None, label: str) -> list[Item]:
    """Return what to write, entry by entry. Raises `CheckpointError` where it would not be the whole model."""
    as_on_hub = {tensor.name for tensors in hub_names(plain).tensors.values() for tensor in tensors}
    items: list[Item] = []
    saved = set()
    for key, entry in saved_entries(reader).items():
        if not key.startswith(MODEL) or not hasattr(entry, "size"):
            continue
        name = key.removeprefix(MODEL)
        as_saved = entry.properties.dtype
        to = dtype if dtype is not None and as_saved.is_floating_point else as_saved
        converted = (lambda tensors: tensors) if name in as_on_hub else partial(to_hub, plain)

        def read(key: str = key, name: str = name, to: torch.dtype = to, converted: Any = converted) -> Any:
            return converted({name: read_tensor(reader, key).to(to)})

        items.append(Item(converted({name: torch.empty(entry.size, dtype=to, device="meta")}), read))
        saved.add(name)
    shapes = {name: value.shape for item in items for name, value in item.tensors.items()}
    needed = {name: torch.empty(value.shape, device="meta") for name, value in named_once(plain).items()}
    on_hub = {name: value.shape for name, value in to_hub(plain, needed).items()}
    missing = [name for name in on_hub if name not in shapes]
    misshapen = [f"{name} is {list(shapes[name])} in the checkpoint and {list(shape)} in the model"
                 for name, shape in on_hub.items() if shapes.get(name, shape) != shape]  # fmt: skip
    if missing and saved >= needed.keys():
        raise CheckpointError(f"{label}: transformers stores several parameters of this model as one; not exported")
    if missing:
        raise CheckpointError(f"{label} does not hold the whole model: it lacks {first_few(missing)}")
    if misshapen:
        raise CheckpointError(f"{label} does not hold the model of its configuration: {first_few(misshapen, '; ')}")
    return items


def stored_item(files: WeightFiles, name: str, dtype: torch.dtype | None) -> Item:
    """Return a tensor of weight files as something to write, as it is or, if of floating point, as ``dtype``."""
    value = files.tensor(name)
    shape = value.get_shape()
    sample = value[(slice(0, 0),) * len(shape) or ...]
    to = dtype if dtype is not None and sample.dtype.is_floating_point else sample.dtype
    return Item({name: torch.empty(shape, dtype=to, device="meta")}, lambda: {name: files.tensor(name)[...].to(to)})


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
        weight_map |= {tensor: name for item in shard for tensor in item.tensors}
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
    return [sorted(shard, key=lambda item: -next(iter(item.tensors.values())).dtype.itemsize) for shard in shards]


def _write_safetensors(file: BinaryIO, items: list[Item]) -> Iterator[int]:
    """Write one file of the safetensors format; yield the bytes of each item once written.

    The format (https://github.com/huggingface/safetensors#format): the header's length in 8 bytes, little endian; the
    header, JSON; the tensors, one after another without gaps. Written here because the library takes all tensors of
    a file at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, value in (pair for item in items for pair in item.tensors.items()):
        offsets = [offset, offset + value.nbytes]
        header[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for item in items:
        values = item.read()
        for name, expected in item.tensors.items():
            value = values[name].detach().contiguous()
            if (value.shape, value.dtype) != (expected.shape, expected.dtype):
                raise CheckpointError(f"{name} is {list(value.shape)}, {list(expected.shape)} was announced")
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)
        yield item.nbytes


def put_all(out: Storage, files: Mapping[str, bytes]) -> None:
    """Write small files."""
    for name, content in files.items():
        put(out, name, content)
