"""Construction of a model on the meta device, its decoder layers, and allocation of its memory once it is sharded."""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from smp_train.errors import ConfigError, first_line
from smp_train.models import lora
from smp_train.models.hub_names import attach_hub_names
from smp_train.models.hugging_face import ModelSpec, model_of, transformers_major
from smp_train.models.meta import CONSTRUCT, construct_on_meta

logger = logging.getLogger("smp_train.models")


def build_meta(
    spec: ModelSpec, *, dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa"
) -> nn.Module:
    """Return the Hugging Face causal LM of ``spec`` in training mode, parameters on meta, buffers on the CPU.

    A model of 400 B parameters takes seconds and no memory. The model carries a function that builds another, for
    `initialise`, and the table of its parameters' names on the hub (`smp_train.models.hub_names`).

    Raises:
        ConfigError: transformers refuses the configuration or the attention implementation.
    """
    spec.config.use_cache = False
    attn_implementation = _available_attention(spec, attn_implementation)
    options: dict[str, Any] = {"attn_implementation": attn_implementation}
    options["dtype" if transformers_major() >= 5 else "torch_dtype"] = dtype
    try:
        config = copy.deepcopy(spec.config)  # the model's own may change, and the other's must not change that
        model = construct_on_meta(partial(model_of, spec.config, **options))
        model.__dict__[CONSTRUCT] = partial(model_of, config, **options)
    except (ValueError, ImportError, KeyError) as failure:
        raise ConfigError(
            f"cannot build {spec.name} with --attn_implementation {attn_implementation}: {first_line(failure)}"
            + "; install it, or use sdpa" * attn_implementation.startswith("flash")
        ) from failure
    attach_hub_names(model)
    if spec.lora is not None:
        lora.inject(model, spec.lora)
    on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if on_meta:
        raise ConfigError(f"cannot build {spec.name}: its buffer {on_meta[0]} is computed from parameters")
    return model.train()


def _available_attention(spec: ModelSpec, attn_implementation: str) -> str:
    """Return ``attn_implementation``, or eager instead of sdpa for a model that transformers has no sdpa for."""
    from transformers import AutoModelForCausalLM

    model_class = AutoModelForCausalLM._model_mapping.get(type(spec.config), None)
    # Some releases allow sdpa for models with soft caps, which it leaves out.
    has_caps = getattr(spec.config, "attn_logit_softcapping", None)
    if attn_implementation != "sdpa" or (getattr(model_class, "_supports_sdpa", True) and not has_caps):
        return attn_implementation
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
    candidates = [entry for entry in lists if len(entry[1]) == depth] or lists
    if not candidates:
        raise ConfigError(f"{type(model).__name__} has no list of decoder layers")
    # A layer's experts can be a list, too, of the same length. The outermost list has the most parameters.
    name, layers = max(candidates, key=lambda entry: sum(p.numel() for p in entry[1].parameters()))
    return [(f"{name}.{key}" if name else key, layer) for key, layer in layers.named_children()]


def materialise(
    model: nn.Module, device: torch.device | str, *, parameters: torch.device | str | None = None
) -> None:
    """Allocate every meta parameter (plain or DTensor), uninitialized, and move everything else to ``device``.

    Meta parameters are allocated on the device ``parameters`` if given (the host, for offloaded parameters). Tied
    parameters stay tied. Call this after sharding: then only this rank's part is allocated.
    """
    device = torch.device(device)
    parameter_device = device if parameters is None else torch.device(parameters)
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for key, param in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(param), []).append((module, key))

    def allocate(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=parameter_device) if tensor.is_meta else tensor.to(device)

    model._apply(allocate)
    # _apply has allocated a tied meta parameter once per name.
    for (first, key), *duplicates in owners.values():
        for module, name in duplicates:
            module._parameters[name] = first._parameters[key]
