"""A Hugging Face model's configuration, and which weights go with it: from a folder, a file, S3, or the hub."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train.errors import CheckpointError, ConfigError, one_line
from smp_train.models.weight_files import weight_files
from smp_train.runtime.places import Place, S3Path, place

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_FILE = "config.json"
# What a checkpoint of ours says of itself; the configuration is its "model_config".
OUR_META = "meta.json"
# Written last into a checkpoint of ours; where it was in S3 once, this tells in which sub-folder its files are.
OUR_MARK = "COMMITTED"


def open_configuration(location: str, weights: str | None = None) -> tuple[str, PretrainedConfig, str | None]:
    """Return (name, configuration, weights) of a folder, of one config.json (random weights), or of a model on the hub.

    ``weights`` are taken instead of what lies beside the configuration.
    """
    path = place(location)
    name = location
    if path.is_file():
        # The files of a checkpoint that was in S3 are a folder further down.
        inner = path.name == OUR_META and (path.parent.parent / OUR_MARK).is_file()
        config, name = _load_config(path), (path.parent.parent if inner else path.parent).name
    elif path.is_dir():
        name = path.name
        if not (path / CONFIG_FILE).is_file():
            raise ConfigError(f"{path} has no {CONFIG_FILE}: it is not the folder of a Hugging Face model")
        config = _load_config(path / CONFIG_FILE)
        weights = weights or (str(path) if weight_files(path) else None)
    elif isinstance(path, S3Path):
        raise ConfigError(f"there is nothing at {location}; give the folder of a Hugging Face model")
    elif location.startswith((".", "/", "~")) or (location.count("/") != 1 and "/" in location):
        raise ConfigError(f"{location} does not exist; give the folder of a Hugging Face model, or its name")
    else:
        folder = _download(location, with_weights=weights is None)
        config = _load_config(folder / CONFIG_FILE)
        weights = weights or (str(folder) if weight_files(folder) else None)
    return name, config, weights


def _load_config(path: Place) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        if path.name == OUR_META:
            return config_of(json.loads(path.read_text(encoding="utf-8"))["model_config"])
        if not isinstance(path, S3Path):
            return AutoConfig.from_pretrained(str(path))
        with tempfile.TemporaryDirectory() as folder:  # transformers reads files
            copy = Path(folder) / CONFIG_FILE
            copy.write_bytes(path.read_bytes())
            return AutoConfig.from_pretrained(str(copy))
    except CheckpointError:  # S3 does not give it
        raise
    except Exception as failure:  # Anything a file of unknown origin may lead to.
        raise ConfigError(f"transformers cannot read {path}: {one_line(failure)}") from failure


def config_of(fields: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration that a checkpoint of ours has as ``model_config``. Raises KeyError for another type."""
    from transformers import CONFIG_MAPPING

    config: PretrainedConfig = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    return config


def _download(name: str, *, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=["*.json", *["*.safetensors"] * with_weights]))
        if with_weights and not weight_files(folder):
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.bin"]))
        return folder
    except Exception as failure:  # No network, no such model, no access: each has its own class.
        raise ConfigError(
            f"--hf_pretrained_model_name_or_dir {name}: is no folder, and the Hugging Face hub does not give it "
            f"({type(failure).__name__}); download it and give the folder"
        ) from failure
