"""The model that the flags describe: a preset, a family with widths, or a Hugging Face model, with flags applied."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smp_train.arguments.values import nearest
from smp_train.errors import CheckpointError, ConfigError, one_line
from smp_train.models.configuration import SHAPES, apply_flags, check_widths, checked, following_heads, with_flags
from smp_train.models.families import FAMILIES, MODEL_FLAGS, SYNONYMS, Family, family_of
from smp_train.models.hugging_face import CONFIG_FILE, OUR_META, ModelSpec, open_configuration, trust_code
from smp_train.storage.paths import Place, place

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from smp_train.arguments import Arguments
    from smp_train.models.lora import Lora

PRESETS = Path(__file__).parent / "presets"
DEFAULT_CONTEXT = 2048
"""Default length of training rows in tokens; a model with fewer positions takes its number of positions."""
DEFAULT_WIDTHS = {"hidden_width": 768, "num_layers": 12, "num_heads": 12, "max_context_width": DEFAULT_CONTEXT}


class Preset(NamedTuple):
    """A published model, or a model of the from-scratch ladder: one file in ``presets/``, with its source."""

    model_type: str
    model_size: str
    parameters: int
    """Tied parameters are counted once."""
    config: dict[str, Any]
    """Fields with their names in transformers 4."""

    @property
    def name(self) -> str:
        """Family and size."""
        return f"{self.model_type}-{self.model_size}"


@cache
def presets() -> dict[tuple[str, str], Preset]:
    """Return all presets by (model_type, model_size)."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(PRESETS.glob("*.json"))]
    every = [Preset(*(record[field] for field in Preset._fields)) for record in records]
    return {(preset.model_type, preset.model_size): preset for preset in every}


class ModelSource(NamedTuple):
    """Where the configuration and the initial weights of a model are."""

    config: str | None
    """Folder, file or hub name of the configuration; None: the flags describe it."""
    weights: str | None = None
    """Folder or file of the weights; None: next to the configuration, if it has any."""


def model_source(args: Arguments) -> ModelSource:
    """Return where the flags take the model from. Raises `ConfigError` for weights that do not exist."""
    if not args.finetune:
        return ModelSource(args.hf_pretrained_model_name_or_dir)
    config = args.hf_pretrained_model_name_or_dir or args.pretrained_model_name
    location = args.finetune_checkpoint_load_dir or args.pretrained_checkpoint_file
    if location is None:
        return ModelSource(config)
    weights = place(location)
    if not weights.exists():
        flag = "finetune_checkpoint_load_dir" if args.finetune_checkpoint_load_dir else "pretrained_checkpoint_file"
        raise ConfigError(f"{location} does not exist (--{flag})")
    if args.finetune_checkpoint_load_dir and config and not place(config).exists():
        # Clusters without access to the hub keep models in one folder, each in a sub-folder with the hub's name.
        weights = weights / config if (weights / config).is_dir() else weights
        config = str(weights / CONFIG_FILE) if (weights / CONFIG_FILE).is_file() else config
    if config is None and not _has_model_flags(args):
        config = configuration_next_to(weights)
    return ModelSource(config, str(weights))


def _has_model_flags(args: Arguments) -> bool:
    return any(getattr(args, flag) is not None for flag in ("model_type", "model_size", *SHAPES))


def names_model(args: Arguments) -> bool:
    """Return whether any flag selects the model or sets one of its shapes."""
    return _has_model_flags(args) or bool(args.hf_pretrained_model_name_or_dir or args.finetune)


def configuration_next_to(weights: Place) -> str | None:
    """Return the file with the configuration of weights or of a checkpoint; None if it does not exist."""
    folder = weights if weights.is_dir() else weights.parent
    return next((str(folder / name) for name in (CONFIG_FILE, OUR_META) if (folder / name).is_file()), None)


def resolve(args: Arguments, *, needs_weights: bool = True) -> ModelSpec:
    """Return the model that the flags describe.

    In order of precedence: ``hf_pretrained_model_name_or_dir`` or, with ``finetune``, ``pretrained_model_name`` or the
    configuration next to ``pretrained_checkpoint_file``; ``model_type`` with ``model_size`` (a preset); ``model_type``
    with widths. ``model_type`` defaults to gpt_neox, or with ``model_size`` to the from-scratch ladder. All other model
    flags are applied to the result. Without ``needs_weights``, for a plan, adapters need no weights.

    Raises:
        ConfigError: an unknown family or preset, a flag that the family does not have, contradicting widths, or a
            location without a usable configuration.
    """
    trust_code(bool(args.trust_remote_code))
    source, flags = model_source(args), _model_flags(args)
    if source.config is not None:
        try:
            spec = open_configuration(source.config, source.weights)
        except ConfigError as problem:
            flags_of_models = "hf_pretrained_model_name_or_dir", "pretrained_model_name"
            flag = next((flag for flag in flags_of_models if getattr(args, flag) == source.config), None)
            raise ConfigError(f"--{flag}: {problem}" if flag else str(problem)) from problem
        config = with_flags(spec.config, flags, spec.pretrained, source.config)
        return replace(spec, config=config, lora=_lora(args, spec.pretrained, needs_weights))
    if source.weights is not None and not _has_model_flags(args):
        raise ConfigError(
            f"{source.weights} has no {CONFIG_FILE} beside it; say which model it is by --pretrained_model_name, or by "
            "--model_type and its widths"
        )
    family_name, family, name, fields, _ = _described(args, flags)
    lora = _lora(args, source.weights, needs_weights)
    return ModelSpec(name, family_name, checked(fields, family, name), source.weights, lora)


def resolve_saved(
    config: PretrainedConfig, model_type: str, location: str, meta: Mapping[str, Any], args: Arguments | None = None
) -> ModelSpec:
    """Return the model of a checkpoint at ``location`` with the flags of ``args`` applied, which may change no shape.

    ``meta`` is the checkpoint's ``meta.json``; it names the weights that the checkpoint's adapters belong to. Adapters
    that the flags ask for replace the checkpoint's, so that `smp_train.run.resume.check_model` finds a difference.
    """
    lora = None
    if args is not None:
        config, lora = with_flags(config, _model_flags(args), location, location), _lora(args, location)
    adapter, weights = meta.get("adapter"), None
    if adapter is not None:
        from smp_train.models.lora import Lora

        try:
            lora, weights = lora or Lora.of_json(adapter), str(adapter["base"])
        except (KeyError, TypeError, ValueError) as failure:
            raise CheckpointError(
                f"{location}: its adapters cannot be read from meta.json ({one_line(failure)})"
            ) from None
    return ModelSpec(model_type, model_type, config, weights, lora, meta.get("generation_config"))


def settled_flags(args: Arguments) -> dict[str, tuple[Any, str]]:
    """Return the value and the value's source of each model flag that was not given; needs neither model nor torch.

    A Hugging Face model's values are known if its ``config.json`` is in a local folder. The result is empty for other
    Hugging Face models, and if the model is in a checkpoint. Raises `ConfigError` as `resolve` does for flags.
    """
    if args.resume_from_checkpoint and not names_model(args):
        return {}
    source, flags = model_source(args), _model_flags(args)
    if source.config is not None:
        settled = _values_in_file(Path(source.config))
    elif source.weights is not None and not _has_model_flags(args):
        return {}
    else:
        _, family, _, fields, sources = _described(args, flags)
        values = {flag: fields.get(target) for flag, target in family.fields.items()}
        settled = {flag: (v, sources.get(flag, "default")) for flag, v in values.items() if v is not None}
    positions, origin = settled.get("max_context_width", (DEFAULT_CONTEXT, "default"))
    if settled:  # the length of rows, which is not the model's number of positions
        origin = origin if source.config is not None else "default"
        settled["max_context_width"] = (min(DEFAULT_CONTEXT, positions), origin)
    return {flag: value for flag, value in settled.items() if flag not in flags}


def row_length(args: Arguments, spec: ModelSpec) -> int:
    """Return the tokens of a row: --max_context_width, else the model's positions, at most the default."""
    return args.max_context_width or min(
        DEFAULT_CONTEXT, getattr(spec.config, "max_position_embeddings", DEFAULT_CONTEXT)
    )


def preset_of(args: Arguments) -> Preset | None:
    """Return the preset that the flags select and whose number of parameters they do not change."""
    changes = (getattr(args, flag) is not None for flag in SHAPES if flag not in ("num_heads", "tie_word_embeddings"))
    if args.hf_pretrained_model_name_or_dir or any(changes):
        return None
    return presets().get(_family_and_size(args)) if args.model_size else None


def _model_flags(args: Arguments) -> dict[str, Any]:
    return {flag: value for flag in MODEL_FLAGS if (value := getattr(args, flag)) is not None}


def _lora(args: Arguments, weights: str | None, needs_weights: bool = True) -> Lora | None:
    """Return the adapters that the flags ask for. Raises `ConfigError` if they need ``weights`` and there are none."""
    rank = args.lora_rank
    if rank is None:
        return None
    from smp_train.models.lora import Lora

    if weights is None and needs_weights:
        raise ConfigError(
            f"--lora_rank {rank} needs weights to adapt; give --hf_pretrained_model_name_or_dir or --finetune 1"
        )
    alpha = args.lora_alpha if args.lora_alpha is not None else 2.0 * rank
    return Lora(rank, alpha, tuple(args.lora_target_modules), args.lora_dropout)


def _described(args: Arguments, flags: dict[str, Any]) -> tuple[str, Family, str, dict[str, Any], dict[str, str]]:
    """Return (family name, family, model name, configuration, source of each flag's value) of a preset or of widths.

    The flags are applied. Imports transformers only for a family outside `FAMILIES`.
    """
    family_name, size = _family_and_size(args)
    family = FAMILIES.get(family_name) or family_of(family_name)
    if size:
        preset = _preset(family_name, size)
        # Deep, because transformers modifies its input.
        name, fields, source = preset.name, copy.deepcopy(preset.config), f"preset {preset.name}"
    else:
        name, fields, source = family_name, dict(family.defaults), f"default of {family_name}"
    sources = {flag: source for flag, target in family.fields.items() if fields.get(target) is not None}
    sources |= dict.fromkeys(following_heads(family, fields, flags), "follows from --num_heads")
    if not size:
        flags = DEFAULT_WIDTHS | flags
        if "intermediate_size" in family.fields:
            flags = {"intermediate_size": family.feed_forward(flags["hidden_width"])} | flags
        if "num_key_value_heads" in family.fields and family.hf_model_type != "falcon":
            flags = {"num_key_value_heads": flags["num_heads"]} | flags
    apply_flags(fields, family, family_name, flags)
    check_widths(family, fields, name)
    return family_name, family, name, fields, sources


def _values_in_file(location: Path) -> dict[str, tuple[Any, str]]:
    """Return the model flags' values in a local ``config.json`` and its path as their source, without transformers."""
    file = location / CONFIG_FILE if location.is_dir() else location
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        family = next(family for family in FAMILIES.values() if family.hf_model_type == fields["model_type"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError, StopIteration):
        return {}  # not local, damaged (`resolve` reports it), or of a family outside `FAMILIES`
    targets = {flag: fields.get(target) for flag, target in family.fields.items()}
    return {flag: (value, str(file)) for flag, value in targets.items() if isinstance(value, int | float)}


def _family_and_size(args: Arguments) -> tuple[str, str]:
    """Return the family's name, or another model type of transformers, and the preset's size, empty without one."""
    size = args.model_size or ""
    model_type = args.model_type or ("scratch" if size else "gpt_neox")
    name = model_type.lower().replace("-", "_")
    name = SYNONYMS.get(name, name)
    if name in FAMILIES:
        return name, size.removeprefix(f"{name}-")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return model_type, size
    raise ConfigError(
        f"--model_type {model_type} is not known; known: {', '.join(sorted(FAMILIES))}, or any causal LM type of "
        f"transformers{nearest(name, FAMILIES)}"
    )


def _preset(family: str, size: str) -> Preset:
    preset = presets().get((family, size))
    if preset:
        return preset
    sizes = [known for name, known in presets() if name == family]
    if not sizes:
        raise ConfigError(f"--model_type {family} has no presets; give --hidden_width, --num_layers, --num_heads")
    others = "".join(f"; --model_type {name} has {size}" for name, known in presets() if known == size)
    raise ConfigError(f"--model_size {size} is not known for {family}; known: {', '.join(sizes)}{others}")
