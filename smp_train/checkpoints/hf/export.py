"""Export a checkpoint's model to a folder for Hugging Face's ``from_pretrained``, one tensor in memory at a time."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.dcp.trees import read_tensor, saved_entries
from smp_train.checkpoints.hf.card import CARD_FILE, hub_name, is_our_card, model_card
from smp_train.checkpoints.hf.model_folder import new_model
from smp_train.checkpoints.pretrained import kind_of, load_weights
from smp_train.errors import CheckpointError, ConfigError, first_few
from smp_train.models.build import build_meta, materialise
from smp_train.models.hub_names import attach_hub_names, canonical_name, hub_names, named_once, to_hub
from smp_train.models.hub_state import gather_state
from smp_train.models.hugging_face import GENERATION_FILE, ModelSpec, model_of
from smp_train.models.lora import merge_adapters
from smp_train.models.resolve import resolve_saved
from smp_train.models.tokenizer import saved_files, tokenizer_files
from smp_train.models.weight_writer import SHARD_BYTES, LazyTensors, Progress, write_weights
from smp_train.storage.paths import place

log = logging.getLogger("smp_train.checkpoints")

MODEL = "model."
"""Prefix of the parameters' names in a checkpoint."""


def export(
    checkpoint: Checkpoint, folder: str | os.PathLike[str], *, weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None, tokenizer: str | None = None, shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False, merge: bool = False, base: str | None = None, on_progress: Progress | None = None,
) -> None:  # fmt: skip
    """Write a verified checkpoint's model to ``folder``, which may be in S3, in the form of Hugging Face's libraries.

    The folder gets safetensors files of about ``shard_bytes`` with the hub's names and layouts, config.json,
    generation_config.json, a model card (unless the user has a README.md there) and the tokenizer, by default the
    checkpoint's. ``weights`` (name: tensor) replace the checkpoint's tensors. ``dtype`` defaults to each tensor's own
    (float32 for adapters). If the run has adapters, only the adapters are written, in peft's form. With ``merge`` they
    are added to the base model's weights. ``base`` is the base model, if it is not where it was in training.

    See `new_model` for what happens to an existing model (``overwrite``). Raises `CheckpointError` if the checkpoint
    does not hold a whole model. Not collective.
    """
    spec = resolve_saved(checkpoint.model_config(), checkpoint.marker.model_type, checkpoint.path, checkpoint.meta)
    if merge and spec.lora is None:
        raise ConfigError(f"{checkpoint.path} has no adapters; leave --merge out")
    if base is not None and spec.lora is None:
        raise ConfigError(f"--model {base}: {checkpoint.path} has no adapters to add to it; leave --model out")
    files, name = _small_files(checkpoint, folder, tokenizer), "model"
    if spec.lora is not None and not merge:
        name, reader = "adapter_model", checkpoint.reader()
        adapters = {"base_model.model." + key.removeprefix(MODEL): read_tensor(reader, key).to(dtype or torch.float32)
                    for key in saved_entries(reader) if key.startswith(MODEL)}  # fmt: skip
        base = base or spec.pretrained or ""
        if kind_of(base) == "ours":
            log.warning(
                "The adapters' base model, %s, is a checkpoint, which peft cannot read: export it as well and give "
                "that folder by --model, or add the adapters to its weights by --merge 1", base,
            )  # fmt: skip
        settings, items = [spec.lora.config(hub_name(base))], [LazyTensors(adapters, lambda: adapters)]
    else:
        weights = _merged_weights(checkpoint, spec, base) if merge else weights
        settings, items = _model(checkpoint, spec.config, weights, dtype)
    with new_model(folder, overwrite=overwrite) as out:
        out.put_all(write_weights(out.stream, items, shard_bytes, on_progress, name))
        for setting in settings:
            out.put_all(saved_files(setting.save_pretrained))
        out.put_all(files)


def _small_files(checkpoint: Checkpoint, folder: str | os.PathLike[str], tokenizer: str | None) -> dict[str, bytes]:
    """Return the tokenizer's files, generation_config.json, and a model card unless ``folder`` has the user's."""
    files = checkpoint.tokenizer() if tokenizer is None else tokenizer_files(tokenizer)
    card = place(folder) / CARD_FILE
    if not card.is_file() or is_our_card(card.read_bytes()):
        name = os.path.basename(checkpoint.path)
        text = model_card(checkpoint.meta, name=name, step=checkpoint.step, tokenizer=files)
        files[CARD_FILE] = text.encode()
    if "generation_config" in checkpoint.meta:
        files[GENERATION_FILE] = (json.dumps(checkpoint.meta["generation_config"], indent=2) + "\n").encode()
    return files


def _merged_weights(checkpoint: Checkpoint, spec: ModelSpec, base: str | None) -> dict[str, Tensor]:
    """Return the base model's weights with the adapters added."""
    model: Any = build_meta(spec)
    materialise(model, "cpu")
    load_weights(model, base or spec.pretrained or "")
    checkpoint.load(gather_state(model))
    merge_adapters(model)
    return {canonical_name(key): value.detach() for key, value in named_once(model).items()}


def _model(
    checkpoint: Checkpoint, config: Any, weights: Mapping[str, Tensor] | None, dtype: torch.dtype | None
) -> tuple[list[Any], list[LazyTensors]]:
    """Return the model's configurations, and its tensors in the hub's layout, from ``weights`` or the checkpoint.

    Raises `CheckpointError` if a tensor of the model is missing or has another shape.
    """
    from transformers import GenerationConfig

    config.use_cache = True  # the key-value cache, which training has switched off
    with torch.device("meta"):
        plain = model_of(config)
    attach_hub_names(plain)
    if weights is None:
        reader = checkpoint.reader_of(gather_state(plain))
        entries = {k.removeprefix(MODEL): v for k, v in saved_entries(reader).items() if k.startswith(MODEL)}
        stored = {name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                  for name, entry in entries.items() if hasattr(entry, "size")}  # fmt: skip
    else:
        stored = {name: weights[name] for name in named_once(plain) if name in weights}
    in_hub_layout = {tensor.name for tensors in hub_names(plain).tensors.values() for tensor in tensors}
    items = []
    for name, value in stored.items():
        to = dtype if dtype is not None and value.is_floating_point() else value.dtype
        convert: Any = dict if name in in_hub_layout else partial(to_hub, plain)

        def read(name: str = name, to: torch.dtype = to, convert: Any = convert) -> Any:
            tensor = read_tensor(reader, MODEL + name) if weights is None else weights[name]
            return convert({name: tensor.to(to)})

        items.append(LazyTensors(convert({name: torch.empty(value.shape, dtype=to, device="meta")}), read))
    tensors = {name: value for item in items for name, value in item.tensors.items()}
    expected = to_hub(plain, {name: value.detach() for name, value in named_once(plain).items()})
    shapes = {name: list(value.shape) for name, value in tensors.items()}
    problems = [f"{name} is {shapes.get(name, 'missing')} in the checkpoint and {list(value.shape)} in the model"
                for name, value in expected.items() if shapes.get(name) != list(value.shape)]  # fmt: skip
    if problems:
        raise CheckpointError(f"{checkpoint.path} does not hold the whole model: {first_few(problems, '; ')}")
    config.architectures = [type(plain).__name__]
    dtypes = {value.dtype for value in tensors.values() if value.dtype.is_floating_point}
    setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", max(dtypes, key=lambda d: d.itemsize))
    return [GenerationConfig.from_model_config(config), config], items
