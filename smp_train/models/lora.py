"""Low-rank adapters (LoRA, Hu et al. 2021) by the peft package: small matrices are trained beside frozen weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from smp_train.errors import ConfigError, install, one_line
from smp_train.models.hub_names import canonical_name, named_once
from smp_train.models.recording import PROGRAMS, construct_on_meta

ALL_LINEAR = "all-linear"
"""Every linear layer but the head."""
_ADAPTER = re.compile(r"\.lora_[A-Z]")


@dataclass(frozen=True)
class Lora:
    """Settings of the adapters: ``weight + alpha / rank * B @ A``, with A ``[rank, in]`` and B ``[out, rank]``.

    Attributes:
        rank: of A and B.
        alpha: scale of the product, before its division by the rank.
        target_modules: names of modules, or their last parts, that get adapters; `ALL_LINEAR` for all of them.
        dropout: of the input of A, in training.
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
        """Return the settings that ``meta.json`` holds; KeyError and TypeError for others."""
        targets = tuple(map(str, fields["target_modules"]))
        return Lora(int(fields["rank"]), float(fields["alpha"]), targets, float(fields["dropout"]))

    def config(self, base: str | None = None) -> Any:
        """Return peft's configuration, for the weights at ``base``."""
        try:
            from peft import LoraConfig
        except ImportError:
            raise ConfigError(f"--lora_rank needs the package peft; {install('lora')}") from None
        targets = ALL_LINEAR if ALL_LINEAR in self.target_modules else list(self.target_modules)
        alpha: Any = self.alpha  # a float, too
        return LoraConfig(
            r=self.rank, lora_alpha=alpha, target_modules=targets, lora_dropout=self.dropout, bias="none",
            task_type="CAUSAL_LM", base_model_name_or_path=base,
        )  # fmt: skip


def is_adapter(name: str) -> bool:
    """Return whether a parameter, by its name, is an adapter's."""
    return bool(_ADAPTER.search(name))


def is_adapted(model: nn.Module) -> bool:
    """Return whether a model has adapters."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def inject(model: nn.Module, lora: Lora) -> None:
    """Give a model on meta, made by `construct_on_meta`, its adapters, and freeze all else.

    The adapters' initialization is recorded like the model's own. Raises `ConfigError` for a name that no module has.
    """
    from peft import inject_adapter_in_model

    config = lora.config()
    names = [name for name, _ in model.named_modules()]
    for target in lora.target_modules:
        if target != ALL_LINEAR and not any(f".{name}".endswith(f".{target}") for name in names):
            linear = sorted({name.rpartition(".")[2] for name, each in model.named_modules() if _has_weight(each)})
            raise ConfigError(f"--lora_target_modules {target}: no module has that name; there are {', '.join(linear)}")
    before = model.__dict__[PROGRAMS]
    try:
        construct_on_meta(lambda: inject_adapter_in_model(config, model))
    except ValueError as failure:
        raise ConfigError(f"--lora_target_modules {' '.join(lora.target_modules)}: {one_line(failure)}") from None
    added = {canonical_name(name): program for name, program in model.__dict__[PROGRAMS].items()}
    model.__dict__[PROGRAMS] = {name: before.get(name) or program for name, program in added.items()}


def merged(model: nn.Module) -> dict[str, Tensor]:
    """Add the adapters of a materialised model into its weights, and return these by their names."""
    for module in model.modules():
        if hasattr(module, "lora_A") and hasattr(module, "merge"):
            merge: Any = module.merge
            merge()
    return {name: value for name, value in named_once(model).items() if not is_adapter(name)}


def _has_weight(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)
