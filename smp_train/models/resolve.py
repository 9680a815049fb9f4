"""The model that the flags describe: a preset, widths alone, or a Hugging Face model, with flags applied to it."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train.errors import CheckpointError, ConfigError, one_line
from smp_train.models.configuration import SHAPES, configuration, following_heads, overlay, with_flags
from smp_train.models.families import FAMILIES, MODEL_FLAGS, SYNONYMS, Family, other_family
from smp_train.models.hugging_face import CONFIG_FILE, OUR_MARK, OUR_META, open_configuration, trust_code
from smp_train.storage.paths import Place, place

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from smp_train.models.lora import Lora

PRESETS = Path(__file__).parent / "presets"
# Default sequence length of training in tokens, as in the original system; a model with fewer positions takes those.
DEFAULT_CONTEXT = 2048
# Default widths, those of the original system.
DEFAULT_WIDTHS = {"hidden_width": 768, "num_layers": 12, "num_heads": 12, "max_context_width": DEFAULT_CONTEXT}


@dataclass(frozen=True)
class ModelSpec:
    """The model to build and its initial weights."""

    name: str
    """``llama_v2-7b``, ``llama_v2`` when built from widths, or the Hugging Face name."""
    model_type: str
    """Family name, used in the names of checkpoint folders."""
    config: PretrainedConfig
    pretrained: str | None = None
    """Folder or file of the weights to start from, None for random initial weights."""
    lora: Lora | None = None
    """Adapters that are trained in place of the weights."""
    generation: Mapping[str, Any] | None = None
    """Contents of the generation_config.json that lies beside the weights."""


@dataclass(frozen=True)
class Preset:
    """One published (or ladder) model: a data file under ``presets/``."""

    model_type: str
    """A key of `FAMILIES`."""
    model_size: str
    """Lower case."""
    hf_model_type: str
    hub_name: str | None
    """None for models of ours."""
    parameters: int
    """Tied ones once."""
    source: str
    """Where the number of parameters is published."""
    config: dict[str, Any]
    """In the names of transformers 4."""
    note: str = ""

    @property
    def name(self) -> str:
        """Family and size."""
        return f"{self.model_type}-{self.model_size}"


@cache
def presets() -> dict[tuple[str, str], Preset]:
    """Return all presets by (model_type, model_size)."""
    found = [Preset(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(PRESETS.glob("*.json"))]
    return {(preset.model_type, preset.model_size): preset for preset in found}


def resolve(args: Any) -> ModelSpec:
    """Return the model that the flags describe.

    ``args`` has the model flags as attributes; None means not given. In order of precedence:
    ``hf_pretrained_model_name_or_dir`` or, with ``finetune``, ``pretrained_model_name`` (folder, config.json or hub
    name) or the configuration beside ``pretrained_checkpoint_file``; ``model_type`` and ``model_size`` (preset);
    ``model_type`` and widths (default: 768 wide, 12 layers, 12 heads). ``model_type`` defaults to gpt_neox, with
    ``model_size`` to the from-scratch ladder. All other given flags are applied to the result.

    Raises:
        ConfigError: unknown family or preset (with the nearest name), a flag that the family does not have,
            inconsistent widths, or a folder without a usable configuration.
    """
    trust_code(bool(getattr(args, "trust_remote_code", False)))
    given = _given(args)
    location, weights = _configuration_and_weights(args, given)
    if location:
        try:
            name, config, weights, generation = open_configuration(location, weights)
        except ConfigError as failure:
            if location != getattr(args, "hf_pretrained_model_name_or_dir", None):
                raise
            raise ConfigError(f"--hf_pretrained_model_name_or_dir: {failure}") from None
        laid = with_flags(config, given, weights, location)
        return ModelSpec(name or config.model_type, _our_name(config), laid, weights, _lora(args, weights), generation)
    if weights is not None and not _by_flags(args, given):
        raise ConfigError(
            f"{weights} has no {CONFIG_FILE} beside it; say which model it is by --pretrained_model_name, or by "
            "--model_type and its widths"
        )
    family_name, family, name, fields, _ = _fields(args, given)
    return ModelSpec(name, family_name, configuration(family, fields, name), weights, _lora(args, weights))


def _lora(args: Any, weights: str | None) -> Lora | None:
    """Return the adapters that the flags ask for. Raises `ConfigError` where there are no ``weights`` to adapt."""
    rank = getattr(args, "lora_rank", None)
    if rank is None:
        return None
    from smp_train.models.lora import Lora

    if weights is None:
        raise ConfigError(
            f"--lora_rank {rank} needs weights to adapt; give --hf_pretrained_model_name_or_dir or --finetune 1"
        )
    alpha = args.lora_alpha if args.lora_alpha is not None else 2.0 * rank
    return Lora(rank, alpha, tuple(args.lora_target_modules), args.lora_dropout)


def names_model(args: Any) -> bool:
    """Return whether any flag says which model it is, or gives it a width."""
    sources = ("model_type", "model_size", "hf_pretrained_model_name_or_dir", "finetune")
    return any(getattr(args, flag, None) for flag in sources) or any(flag in SHAPES for flag in _given(args))


def resolve_saved(
    config: PretrainedConfig, model_type: str, location: str, meta: Mapping[str, Any], args: Any = None
) -> ModelSpec:
    """Return the model of a checkpoint at ``location``, with those flags of ``args`` applied that change no shape.

    ``meta`` is its ``meta.json``, which names the weights that its adapters belong to. Adapters of ``args`` take the
    place of its own, so that `smp_train.resume.check_model` finds a difference.
    """
    config = config if args is None else with_flags(config, _given(args), location, location)
    adapter, generation = meta.get("adapter"), meta.get("generation_config")
    if adapter is None:
        return ModelSpec(model_type, model_type, config, lora=_lora(args, location), generation=generation)
    from smp_train.models.lora import Lora

    try:
        lora, base = _lora(args, location) or Lora.of_json(adapter), str(adapter["base"])
        return ModelSpec(model_type, model_type, config, base, lora, generation)
    except (KeyError, TypeError, ValueError) as failure:
        raise CheckpointError(f"{location}: its adapters cannot be read from meta.json ({one_line(failure)})") from None


def _given(args: Any) -> dict[str, Any]:
    return {flag: value for flag in MODEL_FLAGS if (value := getattr(args, flag, None)) is not None}


def _configuration_and_weights(args: Any, given: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return the locations of the configuration (None: the flags) and of the weights (None: beside the former)."""
    location = getattr(args, "hf_pretrained_model_name_or_dir", None)
    if not getattr(args, "finetune", False):
        return location, None
    name, folder, file = args.pretrained_model_name, args.finetune_checkpoint_load_dir, args.pretrained_checkpoint_file
    for flag, given_place in (("finetune_checkpoint_load_dir", folder), ("pretrained_checkpoint_file", file)):
        if given_place is not None and not place(given_place).exists():
            raise ConfigError(f"{given_place} does not exist (--{flag})")
    if folder is not None:
        # Clusters without access to the hub keep models in one folder, under their names.
        own = place(folder)
        elsewhere = name is None or place(name).exists()
        own = own if elsewhere or not (own / name).is_dir() else own / name
        here = not elsewhere and (own / CONFIG_FILE).is_file()
        return location or (str(own / CONFIG_FILE) if here else name), str(own)
    if file is not None:
        path = place(file)
        return location or name or (None if _by_flags(args, given) else beside(path)), str(path)
    return location or name, None


def _by_flags(args: Any, given: dict[str, Any]) -> bool:
    return bool(args.model_type or args.model_size or any(flag in given for flag in SHAPES))


def beside(weights: Place) -> str | None:
    """Return the file with the configuration beside the weights, None where there is none."""
    folder = weights if weights.is_dir() else weights.parent
    for name in (CONFIG_FILE, OUR_META):
        if (folder / name).is_file():
            return str(folder / name)
    if (folder / OUR_MARK).is_file():
        try:
            return str(folder / str(json.loads((folder / OUR_MARK).read_text(encoding="utf-8"))["root"]) / OUR_META)
        except (ValueError, RecursionError, KeyError, TypeError):
            raise ConfigError(f"{folder / OUR_MARK} cannot be read; {weights} is no checkpoint to start from") from None
    return None


def _fields(args: Any, given: dict[str, Any]) -> tuple[str, Family, str, dict[str, Any], dict[str, str]]:
    """Return the configuration fields of a preset, or of widths, with the given flags applied.

    The result is (family's name, family, model's name, fields, source of the value of each flag that has one).
    Imports transformers only for a family without an entry in `FAMILIES`.
    """
    size = getattr(args, "model_size", None)
    family_name = _family_name(getattr(args, "model_type", None) or ("scratch" if size else "gpt_neox"))
    family = FAMILIES.get(family_name) or other_family(family_name)
    if size:
        preset = _preset(family_name, str(size))
        # A copy, as transformers modifies its input.
        name, fields, source = preset.name, copy.deepcopy(preset.config), f"preset {preset.name}"
    else:
        name, fields, source = family_name, dict(family.defaults), f"default of {family_name}"
    sources = {flag: source for flag, key in family.fields.items() if fields.get(key) is not None}
    sources |= dict.fromkeys(following_heads(family, fields, given), "follows from --num_heads")
    if not size:
        widths = DEFAULT_WIDTHS | given
        given = _derived_widths(family, widths) | widths
    overlay(fields, family, family_name, given)
    found = [flag for flag, key in family.fields.items() if fields.get(key) is not None]
    return family_name, family, name, fields, {flag: sources.get(flag, "default") for flag in found}


def _derived_widths(family: Family, given: dict[str, Any]) -> dict[str, Any]:
    widths: dict[str, Any] = {}
    if "intermediate_size" in family.fields:
        widths["intermediate_size"] = family.width(given["hidden_width"])
    if "num_key_value_heads" in family.fields and family.hf_model_type != "falcon":
        widths["num_key_value_heads"] = given["num_heads"]
    return widths


def settled_flags(args: Any) -> dict[str, tuple[Any, str]]:
    """Return the value of each model flag that was not given, with its source, without building a model.

    For a Hugging Face model they are those of its ``config.json``, none where that is not in a local folder; none where
    a checkpoint to resume from says which model it is.
    Raises `ConfigError` as `resolve` does for flags.
    """
    if getattr(args, "resume_from_checkpoint", None) and not names_model(args):
        return {}
    given = _given(args)
    location, weights = _configuration_and_weights(args, given)
    if weights is not None and location is None and not _by_flags(args, given):
        return {}  # of a folder of checkpoints
    if location:
        settled = _of_config_file(Path(location))
    else:
        _, family, _, fields, sources = _fields(args, given)
        settled = {flag: (fields[family.fields[flag]], source) for flag, source in sources.items()}
    length, source = settled.get("max_context_width", (DEFAULT_CONTEXT, "default"))
    if settled:  # the default length of rows, not the model's positions
        settled["max_context_width"] = (min(DEFAULT_CONTEXT, length), source if location else "default")
    return {flag: value for flag, value in settled.items() if flag not in given}


def _of_config_file(location: Path) -> dict[str, tuple[Any, str]]:
    """Return the model flags of a Hugging Face folder's configuration and their source, without transformers."""
    file = location / CONFIG_FILE if location.is_dir() else location
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        family = next(family for family in FAMILIES.values() if family.hf_model_type == fields["model_type"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError, StopIteration):
        return {}  # remote, damaged (`resolve` reports it), or a family without an entry
    found = {flag: fields[key] for flag, key in family.fields.items() if isinstance(fields.get(key), int | float)}
    return {flag: (value, str(file)) for flag, value in found.items()}


def _suggest(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else "."


def _family_name(model_type: str) -> str:
    name = model_type.lower().replace("-", "_")
    name = SYNONYMS.get(name, name)
    if name in FAMILIES:
        return name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return model_type
    known = sorted(FAMILIES)
    raise ConfigError(
        f"--model_type {model_type} is not known{_suggest(name, known)} "
        f"Known: {', '.join(known)}, or any causal LM type of transformers"
    )


def _preset(family: str, size: str) -> Preset:
    wanted = size.lower().removeprefix(f"{family}-")
    preset = presets().get((family, wanted))
    if preset:
        return preset
    sizes = [known for name, known in presets() if name == family]
    if not sizes:
        raise ConfigError(f"--model_type {family} has no presets; give --hidden_width, --num_layers, --num_heads")
    having = [name for name, known in presets() if known == wanted]
    hint = _suggest(wanted, sizes) + (f" --model_type {' or '.join(having)} has {wanted}." if having else "")
    raise ConfigError(f"--model_size {size} is not known for {family}{hint} Sizes: {', '.join(sizes)}")


def _our_name(config: PretrainedConfig) -> str:
    """Return our family name for a transformers configuration, or its type where there is none."""
    if config.model_type == "llama":
        return "llama_v3" if config.vocab_size >= 100_000 else "llama_v2"
    return config.model_type


def row_length(args: Any, spec: ModelSpec) -> int:
    """Return the tokens of a row: --max_context_width, else what the model has positions for, at most the default."""
    return args.max_context_width or min(
        DEFAULT_CONTEXT, getattr(spec.config, "max_position_embeddings", DEFAULT_CONTEXT)
    )
