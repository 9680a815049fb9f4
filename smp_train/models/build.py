"""Construction of a model on the meta device, its decoder layers, and allocation of its memory once it is sharded."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor, nn

from smp_train.errors import ConfigError
from smp_train.models import hub_names, lora
from smp_train.models.hugging_face import model_of, transformers_major
from smp_train.models.recording import construct_on_meta
from smp_train.models.resolve import ModelSpec

logger = logging.getLogger("smp_train.models")


def build_meta(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa"
) -> nn.Module:
    """Return the Hugging Face causal LM of ``spec`` in training mode, parameters on meta, buffers on the CPU.

    Allocates no parameters; 400 B of them take seconds. The model carries the recorded initialization of its
    parameters, for `initialise`, and the table of their names on the Hugging Face hub (`smp_train.models.hub_names`).

    Raises:
        ConfigError: transformers refuses the configuration or the attention implementation.
    """
    kind = "dtype" if transformers_major() >= 5 else "torch_dtype"
    spec.config.use_cache = False
    attn_implementation = _available_attention(spec, attn_implementation)
    try:
        options: dict[str, Any] = {"attn_implementation": attn_implementation, kind: dtype}
        model = construct_on_meta(lambda: model_of(spec.config, **options))
    except (ValueError, ImportError, KeyError) as failure:
        reason = str(failure).splitlines()[0]
        raise ConfigError(
            f"cannot build {spec.name} with --attn_implementation {attn_implementation}: {reason}"
        ) from failure
    hub_names.note(model)
    if spec.lora is not None:
        lora.inject(model, spec.lora)
    stray = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if stray:
        raise ConfigError(f"cannot build {spec.name}: its buffer {stray[0]} is computed from parameters")
    return model.train()


def _available_attention(spec: ModelSpec, wanted: str) -> str:
    """Return ``wanted``, or eager in place of sdpa for models that sdpa would be wrong for or transformers refuses."""
    from transformers import AutoModelForCausalLM

    kind = AutoModelForCausalLM._model_mapping.get(type(spec.config), None)
    # Some releases let a model with soft caps take sdpa, which leaves them out.
    capped = getattr(spec.config, "attn_logit_softcapping", None)
    if wanted != "sdpa" or (getattr(kind, "_supports_sdpa", True) and not capped):
        return wanted
    logger.info("Attention: eager, as there is no right sdpa for this %s", spec.config.model_type)
    return "eager"


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the decoder layers of any Hugging Face causal LM as (qualified name, module), in order."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    config: Any = getattr(model, "config", None)
    depth = getattr(config, "num_hidden_layers", None)
    # The experts of a layer are a list too: the outermost list holds the most parameters.
    candidates = [entry for entry in lists if len(entry[1]) == depth] or lists
    if not candidates:
        raise ConfigError(f"{type(model).__name__} has no list of decoder layers")
    name, layers = max(candidates, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))
    return [(f"{name}.{key}" if name else key, layer) for key, layer in layers.named_children()]


FLASH_PACKAGES = {
    "flash_attention_2": ("flash_attn", "pip install flash-attn --no-build-isolation"),
    "flash_attention_3": (
        "flash_attn_interface",
        "pip install --no-build-isolation 'git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper'",
    ),
}
"""By attention implementation: the module it needs and the command that installs it."""


def check_attention(attn_implementation: str, device: torch.device) -> None:
    """Raise `ConfigError` where the attention kernel has no GPU or its package is missing."""
    package, install = FLASH_PACKAGES.get(attn_implementation, (None, ""))
    if package is None:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"--attn_implementation {attn_implementation} needs a GPU, and this run is on the CPU; use sdpa"
        )
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"--attn_implementation {attn_implementation} needs the package {package}, which is not installed here; "
            f"{install}, or use sdpa"
        )


def materialise(
    model: nn.Module, device: torch.device | str, *, parameters: torch.device | str | None = None
) -> None:
    """Allocate every meta parameter (plain or DTensor), uninitialized, and move everything else to ``device``.

    Parameters are allocated on ``parameters`` where that is given (the host, for offloaded ones). Tied parameters stay
    tied. Call it after sharding: only this rank's part is allocated.
    """
    device = torch.device(device)
    home = device if parameters is None else torch.device(parameters)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(param), []).append((module, key))

    def allocate(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=home) if tensor.is_meta else tensor.to(device)

    model._apply(allocate)
    # _apply allocates a tied meta parameter once per name.
    for (first, key), *others in owners.values():
        for module, name in others:
            module._parameters[name] = first._parameters[key]
