"""From flags to a model: a preset, widths alone, or a Hugging Face model, with flags laid over it."""

from __future__ import annotations

import copy
import difflib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train.errors import ConfigError
from smp_train.models.configuration import SHAPES, configuration, following_heads, lay_over, overlay
from smp_train.models.families import FAMILIES, MODEL_FLAGS, SYNONYMS, Family, other_family
from smp_train.models.hugging_face import CONFIG_FILE, OUR_MARK, OUR_META, open_configuration, trust_code
from smp_train.storage.paths import Place, place

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PRESETS = Path(__file__).parent / "presets"
# Sequence length of training where none is given, in tokens, as in the original system; less for a shorter model.
DEFAULT_CONTEXT = 2048
# Widths of the original system where only some are given.
DEFAULT_WIDTHS = {"hidden_width": 768, "num_layers": 12, "num_heads": 12, "max_context_width": DEFAULT_CONTEXT}


@dataclass(frozen=True)
class ModelSpec:
    """What to build and what to start it from.

    Attributes:
        name: "llama_v2-7b", "llama_v2" when built from widths, or the Hugging Face name.
        model_type: family name, used in the names of checkpoint folders.
        config: transformers configuration.
        pretrained: where the weights to start from are (folder or file), or None for random initial weights.
    """

    name: str
    model_type: str
    config: PretrainedConfig
    pretrained: str | None = None


@dataclass(frozen=True)
class Preset:
    """One published (or ladder) model: a data file under ``presets/``.

    Attributes:
        model_type: family, a key of `FAMILIES`.
        model_size: size within the family, lower case.
        hf_model_type: transformers configuration type.
        hub_name: name on the Hugging Face hub, None for models of ours.
        parameters: number of parameters (tied ones once).
        source: where the number is published.
        note: what the name does not say.
        config: configuration fields, in the names of transformers 4.
    """

    model_type: str
    model_size: str
    hf_model_type: str
    hub_name: str | None
    parameters: int
    source: str
    config: dict[str, Any]
    note: str = ""

    @property
    def name(self) -> str:
        """Family and size."""
        return f"{self.model_type}-{self.model_size}"


@cache
def presets() -> dict[tuple[str, str], Preset]:
    """Return all presets by (model_type, model_size)."""
    found = [
        Preset(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(PRESETS.glob("*.json"))
    ]
    return {(preset.model_type, preset.model_size): preset for preset in found}


def resolve(args: Any) -> ModelSpec:
    """Return the model that the flags describe.

    ``args`` has the model flags as attributes; None stands for not given. In order of what decides:
    ``hf_pretrained_model_name_or_dir`` or, with ``finetune``, ``pretrained_model_name`` (folder, config.json or hub
    name) or what lies beside ``pretrained_checkpoint_file``, ``model_type`` and ``model_size``
    (preset), ``model_type`` and widths (missing widths: 768 wide, 12 layers, 12 heads; ``model_type``
    missing: gpt_neox, or the from-scratch ladder when a size is given). Other flags that are given are laid
    over it.

    Raises:
        ConfigError: unknown family or preset (nearest named), a flag the family has no use for, widths that do not
            fit together, or a folder without a usable configuration.
    """
    trust_code(bool(getattr(args, "trust_remote_code", False)))
    given = {flag: value for flag in MODEL_FLAGS if (value := getattr(args, flag, None)) is not None}
    location, weights = _configuration_and_weights(args, given)
    if location:
        name, config, weights = open_configuration(location, weights)
        laid = lay_over(config, given, weights, location)
        return ModelSpec(name or config.model_type, _our_name(config), laid, weights)
    return replace(_from_flags(args, given), pretrained=weights)


def _configuration_and_weights(args: Any, given: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return where the configuration comes from (None: the flags), and the weights (None: from beside it)."""
    location = getattr(args, "hf_pretrained_model_name_or_dir", None)
    if not getattr(args, "finetune", False):
        return location, None
    name, folder, file = args.pretrained_model_name, args.finetune_checkpoint_load_dir, args.pretrained_checkpoint_file
    for flag, given_place in (("finetune_checkpoint_load_dir", folder), ("pretrained_checkpoint_file", file)):
        if given_place is not None and not place(given_place).exists():
            raise ConfigError(f"{given_place} does not exist (--{flag})")
    if folder is not None:
        # Clusters without a way to the hub keep models in one folder, under their names.
        own = place(folder)
        elsewhere = name is None or place(name).exists()
        own = own if elsewhere or not (own / name).is_dir() else own / name
        here = not elsewhere and (own / CONFIG_FILE).is_file()
        return location or (str(own / CONFIG_FILE) if here else name), str(own)
    if file is not None:
        path = place(file)
        described = args.model_type or args.model_size or any(flag in given for flag in SHAPES)
        location = location or name or (None if described else beside(path))
        if location is None and not described:
            raise ConfigError(
                f"{path} has no {CONFIG_FILE} beside it; say which model it is by --pretrained_model_name, or by "
                "--model_type and its widths"
            )
        return location, str(path)
    return location or name, None


def beside(weights: Place) -> str | None:
    """Return the file with the configuration that lies beside the weights, if there is one."""
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


def _from_flags(args: Any, given: dict[str, Any]) -> ModelSpec:
    """Return the model of a preset, or of widths."""
    family_name, family, name, fields = _begin_with(args)
    if not getattr(args, "model_size", None):
        given = DEFAULT_WIDTHS | given
        given = _derived_widths(family, given) | given
    overlay(fields, family, family_name, given)
    return ModelSpec(name, family_name, configuration(family.hf_model_type, fields, name))


def _begin_with(args: Any) -> tuple[str, Family, str, dict[str, Any]]:
    """Return the family (its name and itself), the model's name, and the configuration fields that flags go over."""
    size = getattr(args, "model_size", None)
    family_name = _family_name(getattr(args, "model_type", None) or ("scratch" if size else "gpt_neox"))
    family = FAMILIES.get(family_name) or other_family(family_name)
    if size:
        preset = _preset(family_name, str(size))
        # A copy: transformers writes into what it is given.
        return family_name, family, preset.name, copy.deepcopy(preset.config)
    return family_name, family, family_name, dict(family.defaults)


def _derived_widths(family: Family, given: dict[str, Any]) -> dict[str, Any]:
    widths: dict[str, Any] = {}
    if "intermediate_size" in family.fields:
        widths["intermediate_size"] = family.width(given["hidden_width"])
    if "num_key_value_heads" in family.fields and family.hf_model_type != "falcon":
        widths["num_key_value_heads"] = given["num_heads"]
    return widths


def settled_flags(args: Any) -> dict[str, tuple[Any, str]]:
    """Return what the model flags that were not given come to, each with where that is from; builds nothing.

    Of a Hugging Face model: what its ``config.json`` says, and nothing where that is not in a folder here. Raises
    `ConfigError` for an unknown preset.
    """
    given = {flag: value for flag in MODEL_FLAGS if (value := getattr(args, flag, None)) is not None}
    location = _configuration_and_weights(args, given)[0]
    if location:
        described = _described(Path(location))
        return {flag: value for flag, value in described.items() if getattr(args, flag, None) is None}
    _, family, name, fields = _begin_with(args)
    sized = bool(getattr(args, "model_size", None))
    settled: dict[str, tuple[Any, str]] = {}
    if not sized:
        widths = DEFAULT_WIDTHS | {f: v for f in MODEL_FLAGS if (v := getattr(args, f, None)) is not None}
        settled |= {flag: (value, "default") for flag, value in {**_derived_widths(family, widths), **widths}.items()}
    source = f"preset {name}" if sized else f"default of {name}"
    settled |= {flag: (fields[key], source) for flag, key in family.fields.items() if fields.get(key) is not None}
    given = {"num_heads": args.num_heads} if args.num_heads is not None else {}
    following = following_heads(family, fields, given)
    settled |= {flag: (value, "follows from --num_heads") for flag, value in following.items()}
    longest = fields.get(family.fields.get("max_context_width", ""), DEFAULT_CONTEXT)
    settled["max_context_width"] = (min(DEFAULT_CONTEXT, longest), "default")
    return {flag: value for flag, value in settled.items() if getattr(args, flag, None) is None}


def _described(location: Path) -> dict[str, tuple[Any, str]]:
    """Return the model flags that a Hugging Face folder's configuration comes to; transformers is not asked."""
    file = location / CONFIG_FILE if location.is_dir() else location
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        family = next(family for family in FAMILIES.values() if family.hf_model_type == fields["model_type"])
    except (OSError, ValueError, RecursionError, KeyError, TypeError, StopIteration):
        return {}  # not here, or damaged, which `resolve` says, or a family without an entry
    found = {flag: fields[key] for flag, key in family.fields.items() if isinstance(fields.get(key), int | float)}
    found["max_context_width"] = min(DEFAULT_CONTEXT, found.get("max_context_width", DEFAULT_CONTEXT))
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
        raise ConfigError(
            f"--model_type {family} has no presets; give --hidden_width, --num_layers, --num_heads"
        )
    hint = _suggest(wanted, sizes)
    raise ConfigError(f"--model_size {size} is not known for {family}{hint} Sizes: {', '.join(sizes)}")


def _our_name(config: PretrainedConfig) -> str:
    """Return the family of ours for a transformers configuration, or its own type."""
    if config.model_type == "llama":
        return "llama_v3" if config.vocab_size >= 100_000 else "llama_v2"
    return config.model_type
