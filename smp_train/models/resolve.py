"""From flags to a model: a preset, widths alone, or a Hugging Face model, with flags laid over it."""

from __future__ import annotations

import copy
import difflib
import json
import logging
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.families import FAMILIES, MODEL_FLAGS, ROPE_SCALING, SYNONYMS, Family
from smp_train.models.weight_files import weight_files
from smp_train.runtime.places import Place, S3Path, place

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("smp_train.models")

PRESETS = Path(__file__).parent / "presets"
CONFIG_FILE = "config.json"
# What a checkpoint of ours says of itself; the configuration is its "model_config".
OUR_META = "meta.json"
# Written last into a checkpoint of ours; where it was in S3 once, this tells in which sub-folder its files are.
OUR_MARK = "COMMITTED"
# Sequence length of training where none is given, in tokens, as in the original system; less for a shorter model.
DEFAULT_CONTEXT = 2048
# Widths of the original system where only some are given.
DEFAULT_WIDTHS = {"hidden_width": 768, "num_layers": 12, "num_heads": 12, "max_context_width": DEFAULT_CONTEXT}
# Flags that launch scripts of the original systems give to every family: answered, not refused, where one has no use.
EVERYWHERE_GIVEN = ("rotary_pct", "resid_pdrop", "embd_pdrop", "attn_pdrop")
# Flags that change the shape of a weight: with weights given they may only confirm what these say.
SHAPES = (
    "vocab_size", "hidden_width", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size",
    "num_local_experts", "tie_word_embeddings",
)  # fmt: skip


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
    given = {flag: value for flag in MODEL_FLAGS if (value := getattr(args, flag, None)) is not None}
    location, weights = _configuration_and_weights(args, given)
    if location:
        return _from_hugging_face(location, given, weights)
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
        return location or name or (None if described else _beside(path)), str(path)
    return location or name, None


def _beside(weights: Place) -> str:
    """Return the file with the configuration that lies beside the weights; flags would say more than none."""
    folder = weights if weights.is_dir() else weights.parent
    for name in (CONFIG_FILE, OUR_META):
        if (folder / name).is_file():
            return str(folder / name)
    if (folder / OUR_MARK).is_file():
        try:
            return str(folder / str(json.loads((folder / OUR_MARK).read_text(encoding="utf-8"))["root"]) / OUR_META)
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{folder / OUR_MARK} cannot be read; {weights} is no checkpoint to start from") from None
    raise ConfigError(
        f"{weights} has no {CONFIG_FILE} beside it; say which model it is by --pretrained_model_name, or by "
        "--model_type and its widths"
    )


def _from_flags(args: Any, given: dict[str, Any]) -> ModelSpec:
    """Return the model of a preset, or of widths."""
    family_name, family, name, fields = _begin_with(args)
    if not getattr(args, "model_size", None):
        given = DEFAULT_WIDTHS | given
        given = _derived_widths(family, given) | given
    _overlay(fields, family, family_name, given)
    _drop_outside_tokens(fields, family.hf_model_type)
    return ModelSpec(name, family_name, _configuration(family.hf_model_type, fields, name))


def _begin_with(args: Any) -> tuple[str, Family, str, dict[str, Any]]:
    """Return the family (its name and itself), the model's name, and the configuration fields that flags go over."""
    size = getattr(args, "model_size", None)
    family_name = _family_name(getattr(args, "model_type", None) or ("scratch" if size else "gpt_neox"))
    family = FAMILIES.get(family_name) or Family(family_name, _fields_of(family_name))
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

    Empty for a Hugging Face model, whose configuration is its own. Raises `ConfigError` for an unknown preset.
    """
    given = {flag: value for flag in MODEL_FLAGS if (value := getattr(args, flag, None)) is not None}
    if _configuration_and_weights(args, given)[0]:
        return {}
    _, family, name, fields = _begin_with(args)
    sized = bool(getattr(args, "model_size", None))
    settled: dict[str, tuple[Any, str]] = {}
    if not sized:
        widths = DEFAULT_WIDTHS | {f: v for f in MODEL_FLAGS if (v := getattr(args, f, None)) is not None}
        settled |= {flag: (value, "default") for flag, value in {**_derived_widths(family, widths), **widths}.items()}
    source = f"preset {name}" if sized else f"default of {name}"
    settled |= {flag: (fields[key], source) for flag, key in family.fields.items() if fields.get(key) is not None}
    given = {"num_heads": args.num_heads} if args.num_heads is not None else {}
    following = _following_heads(family, fields, given)
    settled |= {flag: (value, "follows from --num_heads") for flag, value in following.items()}
    longest = fields.get(family.fields.get("max_context_width", ""), DEFAULT_CONTEXT)
    settled["max_context_width"] = (min(DEFAULT_CONTEXT, longest), "default")
    return {flag: value for flag, value in settled.items() if getattr(args, flag, None) is None}


def _following_heads(family: Family, fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return key-value heads equal to the given heads where the model has as many of one as of the other."""
    heads, key_value = (fields.get(family.fields.get(flag, "")) for flag in ("num_heads", "num_key_value_heads"))
    followed = "num_heads" in given and key_value is not None and key_value == heads
    return {"num_key_value_heads": given["num_heads"]} if followed else {}


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


def _fields_of(hf_model_type: str) -> dict[str, str]:
    """Return which flags a transformers configuration has a field for, under the usual names."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[hf_model_type]()
    usual = FAMILIES["mixtral"].fields | FAMILIES["phi"].fields
    renamed = getattr(config, "attribute_map", {})
    return {
        flag: renamed.get(name, name)
        for flag, name in usual.items()
        if hasattr(config, name) or name == "rope_theta"
    }


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


def _overlay(fields: dict[str, Any], family: Family, name: str, given: dict[str, Any]) -> None:
    """Write the given flags into the configuration fields; none is dropped in silence."""
    heads = given.get("num_heads", fields.get(family.fields.get("num_heads", "")))
    for flag, value in (_following_heads(family, fields, given) | given).items():
        target = family.fields.get(flag)
        if flag in ROPE_SCALING and target:
            continue
        if target is None:
            harmless = (
                (flag.endswith("_pdrop") and value == 0)
                or (flag == "num_key_value_heads" and value == heads)
                or flag == "max_context_width"  # the length of a row too, which a model may leave open
            )
            if flag in EVERYWHERE_GIVEN and not harmless:
                logger.info("--%s %s has no effect: %s has no such setting", flag, value, name)
            elif not harmless:
                raise ConfigError(f"--{flag} {value}: {name} has no such setting; leave it out")
        elif flag == "max_context_width":
            fields[target] = max(int(value), fields.get(target) or 0)
        else:
            fields[target] = bool(value) if flag == "tie_word_embeddings" else value
    _overlay_rope(fields, family, given)
    if family.hf_model_type == "falcon" and "num_key_value_heads" in given:
        # One key-value head is Falcon 7B's layer, several are Falcon 40B's.
        fields["new_decoder_architecture"] = given["num_key_value_heads"] > 1


def _overlay_rope(fields: dict[str, Any], family: Family, given: dict[str, Any]) -> None:
    scaling = {ROPE_SCALING[flag]: value for flag, value in given.items() if flag in ROPE_SCALING}
    if not scaling or "rope_scaling_type" not in family.fields:
        return
    kind = scaling.get("rope_type", (fields.get("rope_scaling") or {}).get("rope_type", "default"))
    if kind == "default":
        fields.pop("rope_scaling", None)
    elif kind == "llama3":
        base = {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        fields["rope_scaling"] = base | (fields.get("rope_scaling") or {}) | scaling | {"rope_type": kind}
    else:
        raise ConfigError(f"--rope_scaling_type {kind} is not known; known: default, llama3")


def _drop_outside_tokens(fields: dict[str, Any], hf_model_type: str) -> None:
    # A vocabulary cut down by --vocab_size no longer holds the family's special tokens.
    from transformers import CONFIG_MAPPING

    defaults = CONFIG_MAPPING[hf_model_type]()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = fields.get(key, getattr(defaults, key, None))
        if isinstance(value, int) and value >= fields.get("vocab_size", value + 1):
            fields[key] = None


def _configuration(hf_model_type: str, fields: dict[str, Any], name: str) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING

    _check_widths(hf_model_type, fields, name)
    try:
        return CONFIG_MAPPING[hf_model_type](**fields)
    except Exception as failure:  # transformers' validation raises classes of several libraries.
        raise ConfigError(
            f"{name}: transformers refuses the configuration: {_one_line(failure)}"
        ) from failure


def _one_line(failure: BaseException) -> str:
    return " ".join(str(failure).split()) or type(failure).__name__


def _check_widths(hf_model_type: str, fields: dict[str, Any], name: str) -> None:
    """Raise `ConfigError` for widths that do not fit together, named by their flags."""

    def value(*names: str) -> int | None:
        return next((fields[key] for key in names if fields.get(key) is not None), None)

    hidden, heads = value("hidden_size", "n_embd"), value("num_attention_heads", "n_head")
    kv_heads = value("num_key_value_heads", "num_kv_heads")
    sizes = {
        "--hidden_width": hidden,
        "--num_heads": heads,
        "--num_layers": value("num_hidden_layers", "n_layer"),
        "--num_key_value_heads": kv_heads,
        "--intermediate_size": value("intermediate_size", "n_inner", "ffn_hidden_size"),
        "--vocab_size": value("vocab_size"),
        "--max_context_width": value("max_position_embeddings", "n_positions"),
        "--num_local_experts": value("num_local_experts"),
        "--num_experts_per_tok": value("num_experts_per_tok"),
        "--sliding_window": value("sliding_window"),
    }
    for flag, size in sizes.items():
        if size is not None and size <= 0:
            raise ConfigError(f"{name}: {flag} must be at least 1, not {size}")
    experts, used = sizes["--num_local_experts"], sizes["--num_experts_per_tok"]
    if experts and used and used > experts:
        raise ConfigError(f"{name}: --num_experts_per_tok {used} is more than --num_local_experts {experts}")
    if hidden is None or heads is None:
        return
    if kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{name}: --num_heads {heads} is not a multiple of --num_key_value_heads {kv_heads}"
        )
    if fields.get("head_dim"):
        return
    if hidden % heads:
        raise ConfigError(f"{name}: --hidden_width {hidden} is not a multiple of --num_heads {heads}")
    share = value("rotary_pct", "partial_rotary_factor")
    rotary = int(hidden // heads * (1.0 if share is None else share))
    if hf_model_type != "gpt2" and not fields.get("alibi") and (rotary % 2 or rotary == 0):
        raise ConfigError(
            f"{name}: rotary embeddings turn pairs of dimensions, but --hidden_width {hidden} with "
            f"--num_heads {heads} leaves {rotary} a head to turn"
        )


def _from_hugging_face(location: str, given: dict[str, Any], weights: str | None = None) -> ModelSpec:
    """Return the specification of a folder, of one config.json (random weights), or of a model on the hub.

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
    laid = _lay_over(config, given, weights, location)
    return ModelSpec(name or config.model_type, _our_name(config), laid, weights)


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
        raise ConfigError(f"transformers cannot read {path}: {_one_line(failure)}") from failure


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


def _lay_over(
    config: PretrainedConfig, given: dict[str, Any], weights: str | None, location: str
) -> PretrainedConfig:
    if not given:
        return config
    known = next((family for family in FAMILIES.values() if family.hf_model_type == config.model_type), None)
    family = known or Family(config.model_type, _fields_of(config.model_type))
    before = _transformers4_names(config.to_dict(), config.model_type)
    fields = dict(before)
    _overlay(fields, family, location, given)
    if {"hidden_width", "num_heads"} & given.keys() and not weights:
        fields.pop("head_dim", None)  # It was written out for the widths of before.
    shapes = {target: flag for flag in SHAPES if (target := family.fields.get(flag))}
    if family.hf_model_type == "gpt2":  # Its positions are weights.
        shapes["n_positions"] = "max_context_width"
    for target, flag in shapes.items():
        if weights and fields.get(target) != before.get(target):
            raise ConfigError(
                f"--{flag} {fields[target]}: the weights in {location} have {before.get(target)}"
            )
    _drop_outside_tokens(fields, config.model_type)
    _check_widths(config.model_type, fields, location)
    try:
        return type(config).from_dict(fields)
    except Exception as failure:
        raise ConfigError(
            f"{location}: transformers refuses the configuration: {_one_line(failure)}"
        ) from failure


def _transformers4_names(fields: dict[str, Any], hf_model_type: str) -> dict[str, Any]:
    """Return configuration fields with the ``rope_parameters`` of transformers 5 under their former names."""
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


def _our_name(config: PretrainedConfig) -> str:
    """Return the family of ours for a transformers configuration, or its own type."""
    if config.model_type == "llama":
        return "llama_v3" if config.vocab_size >= 100_000 else "llama_v2"
    return config.model_type
