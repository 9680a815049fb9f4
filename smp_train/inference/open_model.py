"""A model and its tokenizer, opened from a checkpoint or a Hugging Face folder: for generation and evaluation."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from smp_train import distributed
from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.pretrained import kind_of, load_weights
from smp_train.errors import CheckpointError, ConfigError, one_line
from smp_train.models import tokenizer
from smp_train.models.build import build_meta, decoder_layers, materialise
from smp_train.models.hub_state import gather_state
from smp_train.models.hugging_face import CONFIG_FILE, GENERATION_FILE, open_configuration
from smp_train.models.resolve import ModelSpec, resolve_saved
from smp_train.storage.paths import place

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str | None, device: torch.device) -> torch.dtype:
    """Return the type of the weights: by name, else bfloat16 on a GPU and float32 on a CPU."""
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ConfigError(f"dtype {name}: is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class Described:
    """What a location says of its model.

    Attributes:
        location: of the checkpoint that was chosen, or of the model.
        spec: the model; its ``pretrained`` are the weights, None for a checkpoint of this program that holds them all.
        checkpoint: the checkpoint of this program, if it is one.
    """

    location: str
    spec: ModelSpec
    checkpoint: Checkpoint | None = None

    def fill(self, model: nn.Module) -> None:
        """Read the weights into a materialised model, each rank its own part; collective."""
        if self.spec.pretrained is not None:  # those of a Hugging Face model, or those that adapters belong to
            load_weights(model, self.spec.pretrained)
        if self.checkpoint is not None:
            self.checkpoint.load(gather_state(model))

    @contextmanager
    def opened_tokenizer(self, given: str | None = None) -> Iterator[Any]:
        """Yield the tokenizer: ``given`` (a folder or a name), else the one beside the weights, else None."""
        if given is None and self.checkpoint is not None:
            with tokenizer.tokenizer_from(self.checkpoint.tokenizer()) as found:
                yield found
            return
        on_hub = not place(self.location).exists()
        where = given or (self.location if on_hub else tokenizer.tokenizer_folder(self.location))
        if where is None:
            yield None
            return
        with tokenizer.open_tokenizer(where) as found:
            yield found

    @contextmanager
    def tokenizer_folder(self) -> Iterator[str | None]:
        """Yield the folder or name of the tokenizer beside the weights, or None; a checkpoint's is a temporary copy."""
        if self.checkpoint is None:
            yield tokenizer.tokenizer_folder(self.location) if place(self.location).exists() else self.location
            return
        files = self.checkpoint.tokenizer()
        with tokenizer.folder_of(files) as folder:
            yield folder if files else None

    def generation_config(self) -> Any:
        """Return transformers' GenerationConfig that lay beside the weights, or that of the model's configuration."""
        from transformers import GenerationConfig

        if self.spec.generation is None:
            return GenerationConfig.from_model_config(self.spec.config)
        try:
            return GenerationConfig.from_dict(dict(self.spec.generation))
        except Exception as failure:  # anything, for a file of unknown origin
            raise ConfigError(
                f"{self.location}: transformers cannot read its {GENERATION_FILE}: {one_line(failure)}"
            ) from None


def describe(location: str, model: str | None = None) -> Described:
    """Return what is at ``location``; collective.

    ``location`` is a checkpoint of this program, a run's folder of checkpoints (its newest one), a Hugging Face folder
    or name, or, with ``model`` (a folder, a config.json or a name), a checkpoint of AWS's sample scripts.
    All may be in S3. Of adapters, ``model`` are the weights that they belong to, where these have moved. Raises
    `CheckpointError` and `ConfigError` on every rank.
    """
    kind = distributed.on_main(f"looking at {location}", lambda: kind_of(location))
    if kind == "ours":
        found = open_verified(location)
        with distributed.together(f"reading the model of {location}"):
            spec = resolve_saved(found.model_config(), found.marker.model_type, found.path, found.meta)
            if model is not None and spec.lora is None:
                raise ConfigError(f"--model {model}: {found.path} says which model it is; leave --model out")
            if model is not None:
                spec = replace(spec, pretrained=open_configuration(model).weights or model)
            if spec.lora is not None and not place(spec.pretrained or "").exists():
                raise CheckpointError(
                    f"{found.path} holds adapters of {spec.pretrained}, which is not there; give those weights, --model"
                )
        return Described(found.path, spec, found)
    with distributed.together(f"reading the model of {location}"):
        if kind == "aws" and model is None:
            raise ConfigError(
                f"{location} is a checkpoint of AWS's sample, which does not say which model it is; add --model FOLDER "
                f"(one with its {CONFIG_FILE}) or --model NAME (on the hub)"
            )
        name, config, weights, generation = open_configuration(model or location, location if model else None)
        if weights is None:
            raise CheckpointError(f"{location} has a {CONFIG_FILE} and no weights")
    return Described(location, ModelSpec(name, config.model_type, config, weights, generation=generation))


def positions(config: Any) -> int:
    """Return how many tokens a text of this model may have."""
    found: int | None = getattr(config, "max_position_embeddings", None)
    return sys.maxsize if found is None else found


def ids_of(tokenizer: Any, prompt: str, config: Any, *, chat: bool = False) -> list[int]:
    """Return the ids of a prompt; with ``chat`` of a user's turn and the beginning of the answer.

    Raises `ConfigError` where they do not fit the model's vocabulary or positions. Not collective.
    """
    if chat:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError("--chat: the tokenizer has no chat template; leave --chat out")
        turns = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        found = tokenizer(prompt)["input_ids"]
    if not found:
        raise ConfigError(f"--prompt {prompt!r}: the tokenizer makes no token of it")
    if max(found) >= config.vocab_size:
        raise ConfigError(
            f"--prompt {prompt!r}: has token {max(found)} and the model a vocabulary of {config.vocab_size}; give "
            "the tokenizer that the model was trained with"
        )
    if len(found) >= positions(config):
        raise ConfigError(f"--prompt: has {len(found)} tokens and the model {positions(config)} positions")
    return list(map(int, found))


def load(described: Described, device: torch.device, dtype: torch.dtype, *, attn_implementation: str = "sdpa") -> Any:
    """Return the model in evaluation mode, on ``device``; sharded over all ranks where there are several. Collective.

    Raises `CheckpointError` where the weights are not those of the configuration.
    """
    model: Any = build_meta(described.spec, dtype=dtype, attn_implementation=attn_implementation)
    if distributed.world_size() > 1:
        from torch.distributed.device_mesh import init_device_mesh

        from smp_train.parallel import fsdp

        mesh = init_device_mesh(device.type, (distributed.world_size(),))
        layers = [layer for _, layer in decoder_layers(model)]
        fsdp.shard(model, layers, mesh, param_dtype=None, reshard_after_forward=True)
    materialise(model, device)
    described.fill(model)
    model.config.use_cache = True
    return model.eval()
