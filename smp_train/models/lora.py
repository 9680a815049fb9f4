"""Low-rank adapters (LoRA, Hu et al. 2021), by the peft package: small trained matrices added to frozen weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from smp_train.errors import ConfigError, install, one_line
from smp_train.models.meta import construct_on_meta

ALL_LINEAR = "all-linear"
"""All linear layers except the head."""
_ADAPTER = re.compile(r"(?:^|\.)lora_[A-Z]")


@dataclass(frozen=True)
class Lora:
    """Settings of the adapters: ``weight + alpha / rank * B @ A``, with A ``[rank, in]`` and B ``[out, rank]``.

    Attributes:
        rank: Rank of A and B.
        alpha: Scale of the product, before it is divided by the rank.
        target_modules: Names of the modules that get adapters, or the names' last parts; or `ALL_LINEAR`.
        dropout: Dropout of A's input, in training.
    """

    rank: int
    alpha: float
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    dropout: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the settings for ``meta.json``."""
        return {**asdict(self), "target_modules": list(self.target_modules)}

    @staticmethod
    def of_json(fields: Mapping[str, Any]) -> Lora:
        """Return the settings in ``meta.json``. Raises KeyError and TypeError for invalid settings."""
        targets = tuple(map(str, fields["target_modules"]))
        return Lora(int(fields["rank"]), float(fields["alpha"]), targets, float(fields["dropout"]))

    def config(self, base: str | None = None) -> Any:
        """Return peft's configuration, for the weights at ``base``."""
        try:
            from peft import LoraConfig
        except ImportError:
            raise ConfigError(f"--lora_rank needs the package peft; {install('lora')}") from None
        targets = ALL_LINEAR if ALL_LINEAR in self.target_modules else list(self.target_modules)
        alpha: Any = self.alpha  # peft takes floats, but declares an integer
        return LoraConfig(
            r=self.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=self.dropout, bias="none",
            task_type="CAUSAL_LM", base_model_name_or_path=base,
        )  # fmt: skip


def is_adapter(name: str) -> bool:
    """Return whether this is the name of an adapter's parameter."""
    return bool(_ADAPTER.search(name))


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model has adapters."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def inject(model: Any, lora: Lora) -> None:
    """Add adapters to a model on meta, and freeze all its other parameters.

    Raises `ConfigError` for targets that are not the names of linear layers, or for a tied head.
    """
    from peft import inject_adapter_in_model

    linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
    for target in set(lora.target_modules) - {ALL_LINEAR}:
        modules = [module for name, module in linear.items() if f".{name}".endswith(f".{target}")]
        if not modules:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ConfigError(f"--lora_target_modules {target}: no linear layer has that name; there are {known}")
        if model.config.tie_word_embeddings and model.get_output_embeddings() in modules:
            raise ConfigError(
                f"--lora_target_modules {target}: the head of this model is its embedding; leave it out"
            )
    config = lora.config()
    try:
        construct_on_meta(lambda: inject_adapter_in_model(config, model))
    except ValueError as failure:
        raise ConfigError(f"--lora_target_modules {' '.join(lora.target_modules)}: {one_line(failure)}") from None


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add the adapters of a materialised model, which is not sharded, to its weights, and remove them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapted = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    for _, module in adapted:
        module.merge()
    for name, module in adapted:
        parent, _, attribute = name.rpartition(".")
        if attribute != "base_layer":  # of a wrapper around a wrapper, the outer one is replaced
            setattr(model.get_submodule(parent), attribute, module.get_base_layer())


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)
