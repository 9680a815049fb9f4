"""A saved model: its specification, weights and tokenizer, opened for generation and evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smp_train import distributed
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.pretrained import kind_of, load_weights
from smp_train.distributed.group import device_of
from smp_train.errors import CheckpointError, ConfigError, one_line
from smp_train.models import tokenizer as tokenizers
from smp_train.models.build import build_meta, decoder_layers, materialise
from smp_train.models.hub_state import gather_state
from smp_train.models.hugging_face import CONFIG_FILE, GENERATION_FILE, ModelSpec, open_configuration, trust_code
from smp_train.models.lora import merge_adapters
from smp_train.models.resolve import resolve_saved
from smp_train.storage.paths import place

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class SavedModel:
    """A model in a checkpoint, in a Hugging Face folder, or on the hub.

    Attributes:
        location: location of the checkpoint or model.
        spec: specification of the model.
        checkpoint: this program's checkpoint; None for other models. It may hold adapters only: ``spec.pretrained`` is
            then the location of the model's other weights.
    """

    location: str
    spec: ModelSpec
    checkpoint: Checkpoint | None = None

    def load_weights(self, model: nn.Module) -> None:
        """Read the weights into a materialised model, each rank its own part; collective."""
        if self.spec.pretrained is not None:
            load_weights(model, self.spec.pretrained)
        if self.checkpoint is not None:
            self.checkpoint.load(gather_state(model))

    @contextmanager
    def tokenizer_location(self) -> Iterator[str | None]:
        """Yield the folder, or name on the hub, of the saved tokenizer; None without a tokenizer. Not collective.

        The tokenizer of a checkpoint is copied to a temporary folder.
        """
        if self.checkpoint is not None:
            files = self.checkpoint.tokenizer()
            with tokenizers.folder_of(files) as folder:
                yield folder if files else None
        elif place(self.location).exists():
            yield tokenizers.tokenizer_folder(self.location)
        else:
            yield self.location

    @contextmanager
    def tokenizer(self, location: str | None = None) -> Iterator[Any]:
        """Yield the tokenizer at ``location``, by default the saved tokenizer or None; not collective."""
        with ExitStack() as opened:
            location = location or opened.enter_context(self.tokenizer_location())
            yield None if location is None else opened.enter_context(tokenizers.open_tokenizer(location))

    def generation_config(self) -> Any:
        """Return transformers' GenerationConfig, as saved or by default for the model's configuration."""
        from transformers import GenerationConfig

        if self.spec.generation is None:
            return GenerationConfig.from_model_config(self.spec.config)
        try:
            config = GenerationConfig.from_dict(dict(self.spec.generation))
            config._from_model_config = False  # otherwise transformers 4.50 asks for a hash that it lacks
            return config
        except Exception as failure:  # the file may hold anything
            raise ConfigError(
                f"{self.location}: transformers cannot read its {GENERATION_FILE}: {one_line(failure)}"
            ) from None


def open_model(location: str, model: str | None = None) -> SavedModel:
    """Return the model at ``location``; collective. Raises `CheckpointError` or `ConfigError` on every rank.

    Args:
        location: checkpoint of this program, a run's folder of checkpoints (the newest is opened), Hugging Face folder,
            name on the hub, or checkpoint of AWS's sample scripts; all but names may be in S3.
        model: for AWS's sample, its configuration: a folder, a config.json or a name. For adapters, the weights of the
            model that they change, if these have moved.
    """
    kind = distributed.on_main(f"looking at {location}", lambda: kind_of(location))
    if kind == "ours":
        checkpoint = open_verified(location)
        with distributed.together(f"reading the model of {location}"):
            return SavedModel(checkpoint.path, _spec_of(checkpoint, model), checkpoint)
    with distributed.together(f"reading the model of {location}"):
        if kind == "aws" and model is None:
            raise ConfigError(
                f"{location} is a checkpoint of AWS's sample, which does not say which model it is; add --model FOLDER "
                f"(one with its {CONFIG_FILE}) or --model NAME (on the hub)"
            )
        spec = open_configuration(model or location, location if model else None)
        if spec.pretrained is None:
            raise CheckpointError(f"{location} has a {CONFIG_FILE} and no weights")
        return SavedModel(location, spec)


def _spec_of(checkpoint: Checkpoint, model: str | None) -> ModelSpec:
    spec = resolve_saved(checkpoint.model_config(), checkpoint.marker.model_type, checkpoint.path, checkpoint.meta)
    if model is not None and spec.lora is None:
        raise ConfigError(f"--model {model}: {checkpoint.path} says which model it is; leave --model out")
    if model is not None:
        spec = replace(spec, pretrained=open_configuration(model).pretrained or model)
    if spec.lora is not None and not place(spec.pretrained or "").exists():
        raise CheckpointError(
            f"{checkpoint.path} holds adapters of {spec.pretrained}, which is not there; give those weights, --model"
        )
    return spec


def sharded_model(saved: SavedModel, device: torch.device, dtype: str | None, attn_implementation: str = "sdpa") -> Any:
    """Return the loaded model in evaluation mode, sharded over all ranks; collective.

    Args:
        saved: the model.
        device: this rank's device.
        dtype: name of the weights' type; by default bfloat16 on a GPU and float32 on a CPU.
        attn_implementation: attention kernel.
    """
    dtype = dtype or ("bfloat16" if device.type == "cuda" else "float32")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype}: is not one of {', '.join(DTYPES)}")
    model: Any = build_meta(saved.spec, dtype=DTYPES[dtype], attn_implementation=attn_implementation)
    if distributed.world_size() > 1:
        from torch.distributed.device_mesh import init_device_mesh

        from smp_train.parallel import fsdp

        mesh = init_device_mesh(device.type, (distributed.world_size(),))
        layers = [layer for _, layer in decoder_layers(model)]
        fsdp.shard(model, layers, mesh, param_dtype=None, reshard_after_forward=True)
    materialise(model, device)
    saved.load_weights(model)
    model.config.use_cache = True
    with distributed.together("reading how the model generates"):
        model.generation_config = saved.generation_config()
    return model.eval()


def load_model(
    location: str, *, device: Any = None, dtype: str | None = None, attn_implementation: str = "sdpa",
    model: str | None = None, tokenizer: str | None = None, trust_remote_code: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the transformers model of any checkpoint or folder, in evaluation mode, and its tokenizer or None.

    Each process loads the whole model, and adds adapters to its weights; not collective.

    Args:
        location: checkpoint, a run's folder of checkpoints (the newest), or Hugging Face model; also ``s3://``.
        device: a torch device; by default this process's GPU, or else the CPU.
        dtype: float32, bfloat16 or float16; by default bfloat16 on a GPU, float32 on a CPU.
        attn_implementation: attention kernel.
        model: configuration of a checkpoint of AWS's sample: folder, config.json or name on the hub.
        tokenizer: folder, tokenizer.json or name; by default the model's own.
        trust_remote_code: run the model's own Python code.
    """
    trust_code(trust_remote_code)
    device = device_of(distributed.detect(), "auto") if device is None else torch.device(device)
    with distributed.alone():
        saved = open_model(location, model)
        loaded = sharded_model(saved, device, dtype, attn_implementation)
        if saved.spec.lora is not None:
            merge_adapters(loaded)
        with saved.tokenizer(tokenizer) as opened_tokenizer:
            return loaded, opened_tokenizer
