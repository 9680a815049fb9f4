"""Reading of Hugging Face configurations, tokenizers and models from a folder, a file, S3 or the hub.

Everything that transformers reads from outside goes through this module: code that comes with it is not run without
--trust_remote_code 1.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from smp_train.distributed import ALL_RANKS
from smp_train.errors import CheckpointError, ConfigError, first_line, one_line
from smp_train.models.weight_files import weight_files
from smp_train.storage.paths import Place, S3Path, place

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_FILE = "config.json"
# Settings of an adapter, as peft has them.
ADAPTER_FILE = "adapter_config.json"
# How the model generates text: its end tokens, its temperature.
GENERATION_FILE = "generation_config.json"
# Metadata of a checkpoint of ours; "model_config" in it is the configuration, "generation_config" the settings above.
OUR_META = "meta.json"
# Commit marker of a checkpoint of ours; its "root" is the sub-folder with the files, for a checkpoint saved to S3.
OUR_MARK = "COMMITTED"
BESIDE_WEIGHTS = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of the configuration, of the tokenizer and of its chat template."""

PROBE_SECONDS = 5.0

logger = logging.getLogger("smp_train.models")
_trusted = False


class HubUnreachable(OSError):
    """A name is not on this machine, and the hub cannot be reached."""


@contextmanager
def asking_hub() -> Iterator[None]:
    """Let the body ask the Hugging Face hub; where that cannot be reached, its cache on this machine alone.

    Otherwise each request would be repeated for half a minute, with a line each time. Raises `HubUnreachable`.
    """
    from huggingface_hub import constants, utils

    if constants.HF_HUB_OFFLINE or _answers(constants.ENDPOINT):
        yield
        return
    reset = getattr(utils, "reset_sessions", lambda: None)  # before version 1 a session keeps its mode
    constants.HF_HUB_OFFLINE = True
    reset()
    try:
        yield
    except OSError as failure:
        raise HubUnreachable("no such path, and the hub cannot be reached") from failure
    finally:
        constants.HF_HUB_OFFLINE = False
        reset()


def _answers(endpoint: str) -> bool:
    """Return whether a server can be connected to, at the second attempt at the latest; true behind a proxy."""
    where = urlsplit(endpoint)
    if not urllib.request.getproxies().keys().isdisjoint({where.scheme, "all"}):
        return True
    for wait in (0, 1):
        time.sleep(wait)
        try:
            port = where.port or (80 if where.scheme == "http" else 443)
            socket.create_connection((where.hostname or "", port), PROBE_SECONDS).close()
        except OSError:
            continue
        return True
    return False


def transformers_major() -> int:
    """Return the major version of the installed transformers."""
    from transformers import __version__

    return int(__version__.split(".")[0])


def trust_code(trusted: bool) -> None:
    """Set whether this process runs code that comes with models and tokenizers."""
    global _trusted
    if trusted and not _trusted:
        logger.warning("--trust_remote_code 1: code that comes with a model or a tokenizer is run", extra=ALL_RANKS)
    _trusted = trusted


def _foreign_code(where: object) -> ConfigError:
    return ConfigError(
        f"{where} needs code of its own (auto_map, or a kernel of the hub), which is not run; read that code, then "
        "give --trust_remote_code 1"
    )


def load_tokenizer(location: str) -> Any:
    """Return the tokenizer of a folder, of a tokenizer.json, or of a name on the hub; else `ConfigError`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = Path(location)
    file = path if path.is_file() else path / "tokenizer.json"
    try:
        settings = file.parent / "tokenizer_config.json"
        if file.is_file() and not settings.is_file():
            return PreTrainedTokenizerFast(tokenizer_file=str(file))
        location = str(file.parent) if path.is_file() else location
        if settings.is_file():
            for key, value in json.loads(settings.read_text(encoding="utf-8")).items():
                if key.endswith("_file") and isinstance(value, str) and "/" in value and os.path.isfile(value):
                    raise ConfigError(f"{settings}: {key} leads out of the folder, to {value}; take that entry out")
        with nullcontext() if path.exists() else asking_hub():
            return AutoTokenizer.from_pretrained(location, trust_remote_code=_trusted)
    except ConfigError:
        raise
    except Exception as failure:  # anything, for files of unknown origin
        if "trust_remote_code" in str(failure):
            raise _foreign_code(f"tokenizer {location}") from failure
        raise ConfigError(f"tokenizer {location} cannot be read: {first_line(failure)}") from failure


def model_of(config: Any, **more: Any) -> Any:
    """Return the causal LM of a configuration, as `AutoModelForCausalLM.from_config`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, trust_remote_code=_trusted, **more)


def _refuse_kernels(fields: Any, where: object) -> None:
    """Raise `ConfigError` for a configuration that has transformers fetch a kernel from the hub."""
    left = [fields]
    while left:
        for key, value in left.pop().items():
            if key.endswith("_implementation") and "/" in str(value):
                raise _foreign_code(f"{where}: {key} {value}")
            left += [value] if isinstance(value, dict) else []


class Opened(NamedTuple):
    """What a location says of its model."""

    name: str
    config: PretrainedConfig
    weights: str | None
    """Their folder or file; None for random ones."""
    generation: dict[str, Any] | None
    """Contents of generation_config.json, where there is one."""


def open_configuration(location: str, weights: str | None = None) -> Opened:
    """Return what a folder, one config.json (random weights), or a model on the hub says of its model.

    ``weights`` take the place of weights beside the configuration.
    """
    folder = path = place(location)
    name = location
    if path.is_file():
        # A checkpoint saved to S3 has its files in a sub-folder.
        inner = path.name == OUR_META and (path.parent.parent / OUR_MARK).is_file()
        config, name, folder = _load_config(path), (path.parent.parent if inner else path.parent).name, path.parent
    elif path.is_dir():
        name = path.name
        if not (path / CONFIG_FILE).is_file():
            if (path / ADAPTER_FILE).is_file():
                raise ConfigError(
                    f"{path} holds adapters alone; give the checkpoint they are from, or what smp-train checkpoint "
                    "export CHECKPOINT FOLDER --merge 1 writes"
                )
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
    return Opened(name, config, weights, _generation_in(folder))


def _generation_in(folder: Place) -> dict[str, Any] | None:
    """Return how the model of a folder, or of a checkpoint of ours, generates; None where it does not say."""
    for file, key in ((GENERATION_FILE, None), (OUR_META, "generation_config")):
        if (folder / file).is_file():
            try:
                fields = json.loads((folder / file).read_text(encoding="utf-8"))
                return fields if key is None else fields.get(key)
            except (ValueError, RecursionError, AttributeError) as failure:
                raise ConfigError(f"{folder / file} cannot be read: {one_line(failure)}; mend or remove it") from None
    return None


def _load_config(path: Place) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING

    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if path.name == OUR_META:
            return config_of(fields["model_config"])
        if _trusted and "auto_map" in fields and not isinstance(path, S3Path):
            return _with_code(path, fields)
        if not _trusted and "auto_map" in fields and fields["model_type"] not in CONFIG_MAPPING:
            raise _foreign_code(path)
        return config_of(fields, path)
    except (CheckpointError, ConfigError):
        raise
    except Exception as failure:  # anything, for a file of unknown origin
        what = f"no {failure} is known" if isinstance(failure, KeyError) else one_line(failure)
        raise ConfigError(f"transformers cannot read {path}: {what}") from failure


def _with_code(path: Path, fields: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration of a model that brings code, which is run."""
    from transformers import CONFIG_MAPPING, AutoConfig

    # By folder, which holds the code; by file where its name is not the one that transformers reads.
    found = AutoConfig.from_pretrained(str(path.parent if path.name == CONFIG_FILE else path), trust_remote_code=True)
    config: PretrainedConfig = type(found).from_dict(readable(fields))
    config.name_or_path = found.name_or_path  # the folder that transformers loads code from
    if config.model_type not in CONFIG_MAPPING:  # the other modules look types up there
        AutoConfig.register(config.model_type, type(config))
    return config


def config_of(fields: dict[str, Any], where: object = "model_config") -> PretrainedConfig:
    """Return the configuration of ``fields``, as in a checkpoint of ours. Raises KeyError for an unknown type."""
    from transformers import CONFIG_MAPPING

    config: PretrainedConfig = CONFIG_MAPPING[fields["model_type"]].from_dict(readable(fields))
    if not _trusted:
        _refuse_kernels(fields, where)
        config.__dict__.pop("auto_map", None)
    return config


def transformers4_names(fields: dict[str, Any], hf_model_type: str) -> dict[str, Any]:
    """Return configuration fields with ``rope_parameters`` of transformers 5 under the names of transformers 4."""
    rope = fields.get("rope_parameters")
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return dict(fields)
    fields, rope = dict(fields), dict(rope)
    del fields["rope_parameters"]
    neox = hf_model_type == "gpt_neox"
    for new, old in (
        ("rope_theta", "rotary_emb_base" if neox else "rope_theta"),
        ("partial_rotary_factor", "rotary_pct" if neox else "partial_rotary_factor"),
    ):
        if new in rope:
            fields[old] = rope.pop(new)
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    return fields


def readable(fields: dict[str, Any]) -> dict[str, Any]:
    """Return configuration fields under the names that the installed transformers reads.

    Version 4 ignores ``rope_parameters`` and would use its default rotary base; nor can it serialize ``dtype``.
    """
    from transformers import PretrainedConfig

    if transformers_major() >= 5:
        return fields
    fields = transformers4_names(fields, fields.get("model_type", ""))
    if "dtype" in fields and not hasattr(PretrainedConfig(), "dtype"):
        fields["torch_dtype"] = fields.pop("dtype")
    return fields


def _download(name: str, *, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        with asking_hub():
            folder = Path(snapshot_download(name, allow_patterns=[*BESIDE_WEIGHTS, *["*.safetensors"] * with_weights]))
            if with_weights and not weight_files(folder):
                folder = Path(snapshot_download(name, allow_patterns=[*BESIDE_WEIGHTS, "*.bin"]))
            return folder
    except Exception as failure:  # no network, no such model, no access: each raises its own class
        why = failure if isinstance(failure, HubUnreachable) else type(failure).__name__
        raise ConfigError(
            f"{name} is neither a folder nor a model that the Hugging Face hub gives ({why}); download it and give the "
            "folder"
        ) from failure
