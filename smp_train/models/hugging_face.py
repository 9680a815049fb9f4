"""Reads Hugging Face configurations, tokenizers and models from a folder, a file, S3 or the hub.

Everything that transformers reads from outside goes through this module, so that code in a model's or a tokenizer's
files runs only with --trust_remote_code 1.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from smp_train.distributed import ALL_RANKS
from smp_train.errors import CheckpointError, ConfigError, first_line, one_line
from smp_train.models.weight_files import weight_files
from smp_train.storage.paths import Place, S3Path, place

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from smp_train.models.lora import Lora

CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
"""Settings of adapters, in peft's format."""
GENERATION_FILE = "generation_config.json"
"""How the model generates text: end tokens, temperature."""
OUR_META = "meta.json"
"""A checkpoint's metadata, with the content of the two files above under "model_config" and "generation_config"."""
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configuration, tokenizer and chat template."""
PROBE_SECONDS = 5.0

logger = logging.getLogger("smp_train.models")
_trusted = False


class HubUnreachable(OSError):
    """A name is not in the local cache, and the hub cannot be reached."""


@contextmanager
def asking_hub() -> Iterator[None]:
    """Let the body ask the Hugging Face hub, or only its local cache if the hub cannot be reached.

    Without this check, huggingface_hub repeats each request for half a minute and logs every attempt. Raises
    `HubUnreachable` if the cache does not suffice.
    """
    from huggingface_hub import constants, utils

    if constants.HF_HUB_OFFLINE or _accepts_connections(constants.ENDPOINT):
        yield
        return
    reset = getattr(utils, "reset_sessions", lambda: None)  # before version 1, open sessions ignore the change
    constants.HF_HUB_OFFLINE = True
    reset()
    try:
        yield
    except OSError as failure:
        raise HubUnreachable("no such path, and the hub cannot be reached") from failure
    finally:
        constants.HF_HUB_OFFLINE = False
        reset()


def _accepts_connections(endpoint: str) -> bool:
    """Return whether a connection to the server can be opened; with a proxy configured, assume that it can."""
    url = urlsplit(endpoint)
    if not urllib.request.getproxies().keys().isdisjoint({url.scheme, "all"}):
        return True
    address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
    try:
        socket.create_connection(address, PROBE_SECONDS).close()
    except OSError:
        return False
    return True


def transformers_major() -> int:
    """Return the major version of the installed transformers."""
    from transformers import __version__

    return int(__version__.split(".")[0])


def trust_code(trusted: bool) -> None:
    """Set whether this process runs code in the files of models and tokenizers."""
    global _trusted
    if trusted and not _trusted:
        logger.warning("--trust_remote_code 1: code that comes with a model or a tokenizer is run", extra=ALL_RANKS)
    _trusted = trusted


def _untrusted(name: object) -> ConfigError:
    return ConfigError(
        f"{name} needs code of its own (auto_map, or a kernel of the hub), which is not run; read that code, then "
        "give --trust_remote_code 1"
    )


def refuse_sentencepiece(path: Path) -> None:
    """Raise `ConfigError` for the file of a SentencePiece model, such as Meta's."""
    if path.suffix == ".model":
        raise ConfigError(
            f"--tokenizer {path}: a SentencePiece model cannot be read; give its tokenizer.json, or the folder or hub "
            "name of the Hugging Face version, such as meta-llama/Llama-2-7b-hf"
        )


def load_tokenizer(location: str) -> Any:
    """Return the tokenizer of a folder, a tokenizer.json, or a name on the hub. Raises `ConfigError`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(location)
    refuse_sentencepiece(path)
    file = path if path.is_file() else path / "tokenizer.json"
    settings = file.parent / "tokenizer_config.json"
    try:
        if file.is_file() and not settings.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(file))
        if settings.is_file():
            for key, value in json.loads(settings.read_text(encoding="utf-8")).items():
                if key.endswith("_file") and isinstance(value, str) and "/" in value and os.path.isfile(value):
                    raise ConfigError(f"{settings}: {key} leads out of the folder, to {value}; take that entry out")
        with nullcontext() if path.exists() else asking_hub():
            folder = str(file.parent) if path.is_file() else location
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=_trusted)
    except ConfigError:
        raise
    except Exception as failure:  # files of unknown origin can raise anything
        if "trust_remote_code" in str(failure):
            raise _untrusted(f"tokenizer {location}") from failure
        raise ConfigError(f"tokenizer {location} cannot be read: {first_line(failure)}") from failure


def model_of(config: Any, **options: Any) -> Any:
    """Return the causal LM of a configuration, by `AutoModelForCausalLM.from_config`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, trust_remote_code=_trusted, **options)


@dataclass(frozen=True)
class ModelSpec:
    """The model to build and its initial weights."""

    name: str
    """``llama_v2-7b`` for a preset, ``llama_v2`` for a family with widths, else the Hugging Face name."""
    model_type: str
    """The family's name, used in the names of checkpoint folders."""
    config: PretrainedConfig
    pretrained: str | None = None
    """Folder or file of the weights to start from; None: random initial weights."""
    lora: Lora | None = None
    """Adapters to train instead of the weights."""
    generation: Mapping[str, Any] | None = None
    """Content of the generation_config.json next to the weights."""


def open_configuration(location: str, weights: str | None = None) -> ModelSpec:
    """Return the model of a folder, of a config.json (without weights), of a checkpoint's meta.json, or of a hub name.

    ``weights`` replace those in the folder. Raises `ConfigError`.
    """
    path, name = place(location), location
    if path.is_file():
        return _spec(path.parent.name, path, weights)
    if path.is_dir():
        folder, name = path, path.name
        if not (folder / CONFIG_FILE).is_file():
            if (folder / ADAPTER_FILE).is_file():
                raise ConfigError(
                    f"{path} holds adapters alone; give the checkpoint they are from, or what smp-train checkpoint "
                    "export CHECKPOINT FOLDER --merge 1 writes"
                )
            raise ConfigError(f"{path} has no {CONFIG_FILE}: it is not the folder of a Hugging Face model")
    elif isinstance(path, S3Path):
        raise ConfigError(f"there is nothing at {location}; give the folder of a Hugging Face model")
    elif location.startswith((".", "/", "~")) or location.count("/") > 1:
        raise ConfigError(f"{location} does not exist; give the folder of a Hugging Face model, or its name")
    else:
        folder = _download(location, with_weights=weights is None)
    weights = weights or (str(folder) if weight_files(folder) else None)
    return _spec(name, folder / CONFIG_FILE, weights)


def _spec(name: str, file: Place, weights: str | None) -> ModelSpec:
    config = _read_config(file)
    model_type = config.model_type
    if model_type == "llama":
        model_type = "llama_v3" if config.vocab_size >= 100_000 else "llama_v2"
    return ModelSpec(name or model_type, model_type, config, weights, generation=_read_generation(file.parent))


def _download(name: str, *, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with asking_hub():
            safetensors = ["*.safetensors"] if with_weights else []
            folder = Path(snapshot_download(name, allow_patterns=[*SMALL_FILES, *safetensors]))
            if with_weights and not weight_files(folder):
                folder = Path(snapshot_download(name, allow_patterns=[*SMALL_FILES, "*.bin"]))
            return folder
    except Exception as failure:  # no network, unknown model, no access: each raises another class
        reason = failure if isinstance(failure, HubUnreachable) else type(failure).__name__
        raise ConfigError(
            f"{name} is neither a folder nor a model that the Hugging Face hub gives ({reason}); download it and give "
            "the folder"
        ) from failure


def _read_generation(folder: Place) -> dict[str, Any] | None:
    """Return the generation settings of a model's folder or of a checkpoint; None if they are missing."""
    for file, key in ((folder / GENERATION_FILE, None), (folder / OUR_META, "generation_config")):
        if file.is_file():
            try:
                fields = json.loads(file.read_text(encoding="utf-8"))
                return fields if key is None else fields.get(key)
            except (ValueError, RecursionError, AttributeError) as failure:
                raise ConfigError(f"{file} cannot be read: {one_line(failure)}; mend or remove it") from None
    return None


def _read_config(file: Place) -> PretrainedConfig:
    """Return the configuration in a config.json or meta.json. Raises `ConfigError` and `CheckpointError`."""
    from transformers import CONFIG_MAPPING

    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        if file.name == OUR_META:
            return config_of(fields["model_config"])
        if _trusted and "auto_map" in fields and not isinstance(file, S3Path):
            return _config_with_code(file, fields)
        if not _trusted and "auto_map" in fields and fields["model_type"] not in CONFIG_MAPPING:
            raise _untrusted(file)
        return config_of(fields, file)
    except (CheckpointError, ConfigError):
        raise
    except Exception as failure:  # files of unknown origin can raise anything
        reason = f"no {failure} is known" if isinstance(failure, KeyError) else one_line(failure)
        raise ConfigError(f"transformers cannot read {file}: {reason}") from failure


def _config_with_code(file: Path, fields: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration of a model whose files contain code; the code is run."""
    from transformers import CONFIG_MAPPING, AutoConfig

    # transformers finds the code in the folder, but reads no other file name than config.json from a folder.
    location = file.parent if file.name == CONFIG_FILE else file
    original = AutoConfig.from_pretrained(str(location), trust_remote_code=True)
    config: PretrainedConfig = type(original).from_dict(readable(fields))
    config.name_or_path = original.name_or_path  # the folder that transformers loads code from
    if config.model_type not in CONFIG_MAPPING:  # other modules look up types in it
        AutoConfig.register(config.model_type, type(config))
    return config


def config_of(fields: dict[str, Any], name: object = "model_config") -> PretrainedConfig:
    """Return the configuration of ``fields``; ``name`` is theirs, for messages.

    Raises KeyError for an unknown type, and `ConfigError` for fields that have transformers run code from the hub.
    """
    from transformers import CONFIG_MAPPING

    config: PretrainedConfig = CONFIG_MAPPING[fields["model_type"]].from_dict(readable(fields))
    if not _trusted:
        _refuse_kernels(fields, name)
        config.__dict__.pop("auto_map", None)
    return config


def _refuse_kernels(fields: dict[str, Any], name: object) -> None:
    """Raise `ConfigError` for a configuration that names an attention kernel on the hub, at any depth."""
    for key, value in fields.items():
        if key.endswith("_implementation") and "/" in str(value):
            raise _untrusted(f"{name}: {key} {value}")
        if isinstance(value, dict):
            _refuse_kernels(value, name)


def transformers4_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Return configuration fields with ``rope_parameters`` of transformers 5 under the names of transformers 4."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return dict(fields)
    fields, rope = dict(fields), dict(rope)
    del fields["rope_parameters"]
    neox = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    for name, of_neox in neox.items():
        if name in rope:
            fields[of_neox if fields.get("model_type") == "gpt_neox" else name] = rope.pop(name)
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    return fields


def readable(fields: dict[str, Any]) -> dict[str, Any]:
    """Return configuration fields under the names that the installed transformers reads.

    Version 4 would ignore ``rope_parameters`` and use its default rotary base, and cannot serialize ``dtype``.
    """
    from transformers import PretrainedConfig

    if transformers_major() >= 5:
        return fields
    fields = transformers4_names(fields)
    if "dtype" in fields and not hasattr(PretrainedConfig(), "dtype"):
        fields["torch_dtype"] = fields.pop("dtype")
    return fields
