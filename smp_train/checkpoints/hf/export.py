"""Export a checkpoint's model to a folder for Hugging Face's ``from_pretrained``, one tensor in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor

from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.dcp.trees import read_tensor, saved_entries
from smp_train.checkpoints.hf.card import CARD_FILE, hub_name, is_our_card, model_card
from smp_train.checkpoints.hf.model_folder import new_model
from smp_train.checkpoints.pretrained import load_weights
from smp_train.errors import CheckpointError, ConfigError, first_few
from smp_train.models.build import build_meta, materialise
from smp_train.models.hub_names import canonical_name, hub_names, named_once, note, to_hub
from smp_train.models.hub_state import gather_state
from smp_train.models.hugging_face import GENERATION_FILE, model_of
from smp_train.models.lora import merge_adapters
from smp_train.models.resolve import ModelSpec, resolve_saved
from smp_train.models.tokenizer import saved_files, tokenizer_files
from smp_train.models.weight_writer import SHARD_BYTES, LazyTensors, Progress, write_weights
from smp_train.storage.paths import place

MODEL = "model."


def export(
    checkpoint: Checkpoint,
    folder: str | os.PathLike[str],
    *,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    merge: bool = False,
    base: str | None = None,
    on_progress: Progress | None = None,
) -> None:
    """Write the model of a verified checkpoint to ``folder``, also in S3, as Hugging Face's libraries do.

    The folder gets the hub's names and layouts in safetensors files of about ``shard_bytes``, config.json,
    generation_config.json, a model card (unless the user has a README.md there) and the tokenizer, by default the
    checkpoint's. The weights are read from the checkpoint, unless ``weights`` has them by name, and keep their dtype
    by default. For a run with adapters only the adapters are written, as peft writes them; with ``merge`` the weights
    of their base model (``base``, if it has moved since training) are loaded and the adapters are added.

    `new_model` has the rules for an existing model (``overwrite``). Raises `CheckpointError` if the checkpoint does not
    hold a whole model. Not collective.
    """
    has_adapter = "adapter" in checkpoint.meta
    if merge and not has_adapter:
        raise ConfigError(f"{checkpoint.path} has no adapters; leave --merge out")
    if base is not None and not merge:
        raise ConfigError(f"--model {base}: are weights to add adapters into; give --merge 1, or leave --model out")
    files = _small_files(checkpoint, folder, tokenizer)
    if has_adapter and not merge:
        lora, tensors = _adapter(checkpoint, dtype)
        settings, items = [lora], [LazyTensors(tensors, lambda: tensors)]
    else:
        weights, config = _merged_weights(checkpoint, base) if merge else (weights, checkpoint.model_config())
        settings, items = _model(checkpoint, config, weights, dtype)
    with new_model(folder, overwrite=overwrite) as out:
        name = "adapter_model" if has_adapter and not merge else "model"
        out.put_all(write_weights(out.stream, items, shard_bytes, on_progress, name))
        for setting in settings:
            out.put_all(saved_files(setting.save_pretrained))
        out.put_all(files)


def _small_files(checkpoint: Checkpoint, folder: str | os.PathLike[str], tokenizer: str | None) -> dict[str, bytes]:
    """Return the files of the tokenizer, the model card unless the user has another one, and generation_config.json."""
    files = checkpoint.tokenizer() if tokenizer is None else tokenizer_files(tokenizer)
    card = place(folder) / CARD_FILE
    if not card.is_file() or is_our_card(card.read_bytes()):
        name = os.path.basename(checkpoint.path)
        text = model_card(checkpoint.meta, name=name, step=checkpoint.step, tokenizer=bool(files))
        files[CARD_FILE] = text.encode()
    if "generation_config" in checkpoint.meta:
        files[GENERATION_FILE] = (json.dumps(checkpoint.meta["generation_config"], indent=2) + "\n").encode()
    return files


def _model_with_adapters(checkpoint: Checkpoint) -> ModelSpec:
    model_type = checkpoint.marker.model_type
    return resolve_saved(checkpoint.model_config(), model_type, checkpoint.path, checkpoint.meta)


def _adapter(checkpoint: Checkpoint, dtype: torch.dtype | None) -> tuple[Any, dict[str, Tensor]]:
    """Return peft's configuration of the adapters, and their tensors under peft's names."""
    spec, reader = _model_with_adapters(checkpoint), checkpoint.reader()
    assert spec.lora is not None
    return spec.lora.config(hub_name(spec.pretrained or "")), {
        "base_model.model." + key.removeprefix(MODEL): read_tensor(reader, key).to(dtype or torch.float32)
        for key in saved_entries(reader)
        if key.startswith(MODEL)
    }


def _merged_weights(checkpoint: Checkpoint, base: str | None) -> tuple[dict[str, Tensor], Any]:
    """Return the base model's weights with the adapters added, and its configuration."""
    spec = _model_with_adapters(checkpoint)
    model: Any = build_meta(spec)
    materialise(model, "cpu")
    load_weights(model, base or spec.pretrained or "")
    checkpoint.load(gather_state(model))
    merge_adapters(model)
    return {canonical_name(key): value.detach() for key, value in named_once(model).items()}, spec.config


def _model(
    checkpoint: Checkpoint, config: Any, weights: Mapping[str, Tensor] | None, dtype: torch.dtype | None
) -> tuple[list[Any], list[LazyTensors]]:
    """Return the model's configurations, and its tensors from the ``weights`` in memory or from the checkpoint."""
    from transformers import GenerationConfig

    config.use_cache = True  # of keys and values: training has switched it off
    with torch.device("meta"):
        plain = model_of(config)
    note(plain)
    if weights is None:
        reader = checkpoint.reader_of(gather_state(plain))
        entries = {k.removeprefix(MODEL): v for k, v in saved_entries(reader).items() if k.startswith(MODEL)}
        stored = {name: (e.size, e.properties.dtype) for name, e in entries.items() if hasattr(e, "size")}
        items = _tensors(plain, stored, lambda name: read_tensor(reader, MODEL + name), dtype, checkpoint.path)
    else:
        stored = {name: (weights[name].shape, weights[name].dtype) for name in named_once(plain) if name in weights}
        items = _tensors(plain, stored, weights.__getitem__, dtype, checkpoint.path)
    config.architectures = [type(plain).__name__]
    dtypes = {value.dtype for item in items for value in item.tensors.values() if value.dtype.is_floating_point}
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", max(dtypes, key=lambda d: d.itemsize))
    return [GenerationConfig.from_model_config(config), config], items


def _tensors(
    plain: Any, stored: Mapping[str, tuple[Size, torch.dtype]], read: Callable[[str], Tensor],
    dtype: torch.dtype | None, label: str,
) -> list[LazyTensors]:  # fmt: skip
    """Return the ``stored`` tensors, which ``read`` reads by name, in the hub's layout and in ``dtype``.

    Raises `CheckpointError` unless they are all tensors of the model ``plain``, with its shapes.
    """
    hub_layout = {tensor.name for tensors in hub_names(plain).tensors.values() for tensor in tensors}
    items: list[LazyTensors] = []
    for name, (size, stored_dtype) in stored.items():
        to = dtype if dtype is not None and stored_dtype.is_floating_point else stored_dtype
        convert = (lambda tensors: tensors) if name in hub_layout else partial(to_hub, plain)

        def read_converted(name: str = name, to: torch.dtype = to, convert: Any = convert) -> Mapping[str, Tensor]:
            tensors: Mapping[str, Tensor] = convert({name: read(name).to(to)})
            return tensors

        items.append(LazyTensors(convert({name: torch.empty(size, dtype=to, device="meta")}), read_converted))
    shapes = {name: value.shape for item in items for name, value in item.tensors.items()}
    parameters = {name: torch.empty(value.shape, device="meta") for name, value in named_once(plain).items()}
    expected = {name: value.shape for name, value in to_hub(plain, parameters).items()}
    missing = [name for name in expected if name not in shapes]
    misshapen = [f"{name} is {list(shapes[name])} in the checkpoint and {list(shape)} in the model"
                 for name, shape in expected.items() if shapes.get(name, shape) != shape]  # fmt: skip
    if missing and stored.keys() >= parameters.keys():
        raise CheckpointError(f"{label}: transformers stores several parameters of this model as one; not exported")
    if missing:
        raise CheckpointError(f"{label} does not hold the whole model: it lacks {first_few(missing)}")
    if misshapen:
        raise CheckpointError(f"{label} does not hold the model of its configuration: {first_few(misshapen, '; ')}")
    return items
