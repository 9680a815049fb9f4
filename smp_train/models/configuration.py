"""A model's transformers configuration: flags applied to its fields, the widths checked, and two of them compared."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from smp_train.errors import CheckpointError, ConfigError, one_line
from smp_train.models.families import FAMILIES, ROPE_SCALING, Family, other_family
from smp_train.models.hugging_face import transformers4_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("smp_train.models")

# Flags that launch scripts of the original systems give to every family: ignored with a log line by a family that has
# no such setting.
EVERYWHERE_GIVEN = ("rotary_pct", "resid_pdrop", "embd_pdrop", "attn_pdrop")
# Flags that change the shape of a weight: with pretrained weights they must equal the configuration's values.
SHAPES = (
    "vocab_size", "hidden_width", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size",
    "num_local_experts", "tie_word_embeddings",
)  # fmt: skip

# Flags whose values must be positive.
SIZES = (*SHAPES[:-1], "max_context_width", "num_experts_per_tok", "sliding_window")

SETTINGS_OF_A_RUN = re.compile(
    r"dropout|pdrop|token_id|initializer|max_position|^n_positions|^n_ctx|use_cache|router_aux|output_router|jitter|"
    r"summary_|pretraining_tp|^rope_parameters|scale_init"
)
"""Configuration fields that do not change the function that given weights compute, only their training."""


def overlay(fields: dict[str, Any], family: Family, name: str, given: dict[str, Any]) -> None:
    """Write the given flags into the configuration fields; a flag without a field is logged or refused."""
    heads = given.get("num_heads", fields.get(family.fields.get("num_heads", "")))
    for flag, value in (following_heads(family, fields, given) | given).items():
        target = family.fields.get(flag)
        if flag in ROPE_SCALING and target:
            continue
        if target is None:
            harmless = (
                (flag.endswith("_pdrop") and value == 0)
                or (flag == "num_key_value_heads" and value == heads)
                or flag == "max_context_width"  # also the length of a row, whatever the model's positions
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
        # Falcon 7B's layer has one key-value head, Falcon 40B's several.
        fields["new_decoder_architecture"] = given["num_key_value_heads"] > 1


def following_heads(family: Family, fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return key-value heads equal to the given ``num_heads`` where the model's two numbers of heads are equal."""
    heads, key_value = (fields.get(family.fields.get(flag, "")) for flag in ("num_heads", "num_key_value_heads"))
    followed = "num_heads" in given and key_value is not None and key_value == heads
    return {"num_key_value_heads": given["num_heads"]} if followed else {}


def _overlay_rope(fields: dict[str, Any], family: Family, given: dict[str, Any]) -> None:
    scaling = {ROPE_SCALING[flag]: value for flag, value in given.items() if flag in ROPE_SCALING}
    if not scaling or "rope_scaling_type" not in family.fields:
        return
    kind = scaling.get("rope_type", (fields.get("rope_scaling") or {}).get("rope_type", "default"))
    if kind == "default":
        fields.pop("rope_scaling", None)
    elif kind == "llama3":
        base = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        base |= {"original_max_position_embeddings": 8192}
        fields["rope_scaling"] = base | (fields.get("rope_scaling") or {}) | scaling | {"rope_type": kind}
    else:
        raise ConfigError(f"--rope_scaling_type {kind} is not known; known: default, llama3")


def changes(saved: dict[str, Any], config: PretrainedConfig) -> list[str]:
    """Return the fields in which a checkpoint's model differs from ``config``, as "--num_heads 4 there, 8 here".

    ``saved`` is its configuration as a dictionary, written by any version of transformers: a field that a version does
    not know has that version's default. Settings of a run (dropout, lengths, special tokens, precision) may differ.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    kind = config.model_type
    if saved.get("model_type") != kind:
        return [f"--model_type: {saved.get('model_type')} there, {kind} here"]
    flags = {target: flag for flag, target in _family_of(kind).fields.items()}
    flags["rope_scaling"] = "rope_scaling_type"
    fields = [
        transformers4_names(type(config).from_dict(transformers4_names(each, kind)).to_dict(), kind)
        for each in (saved, config.to_dict())
    ]
    own = transformers4_names(CONFIG_MAPPING[kind]().to_dict(), kind).keys() - PretrainedConfig().to_dict().keys()
    own |= {"tie_word_embeddings", *flags}
    different = [
        (key, *(each.get(key) for each in fields))
        for key in sorted(own, key=lambda key: (key not in flags, key))
        if fields[0].get(key) != fields[1].get(key) and not SETTINGS_OF_A_RUN.search(key)
    ]
    return [
        f"{'--' + flags[key] if key in flags else key}: {there} there, {here} here" for key, there, here in different
    ]


def changes_from(meta: dict[str, Any], config: PretrainedConfig) -> list[str]:
    """Return the `changes` from the model that a checkpoint's ``meta`` describes; none where it describes none.

    Raises `CheckpointError` where transformers refuses the configuration there.
    """
    saved = meta.get("model_config", with_sample_flags(meta.get("imported", {}), config))
    try:
        return changes(saved, config) if isinstance(saved, dict) else []
    except Exception as failure:  # transformers' validation raises classes of several libraries
        raise CheckpointError(f"the configuration in the checkpoint is not valid: {one_line(failure)}") from failure


def with_sample_flags(recorded: dict[str, Any], config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the fields of ``config`` with those flags of SMP's sample that change no shape but the model's function.

    ``recorded`` are the values that a checkpoint of the sample holds beside its tensors. For Mistral and Mixtral the
    sample has no flag for the rotary base. None where it has none of these flags, or the model was pretrained.
    """
    if "cli_args.hf_pretrained_model_name_or_dir" in recorded:
        return None
    flags = ["num_heads", *["rotary_emb_base", "rotary_pct"] * (config.model_type in ("llama", "gpt_neox"))]
    family = _family_of(config.model_type)
    values = {family.fields[flag]: recorded.get(f"cli_args.{flag}") for flag in flags if flag in family.fields}
    there = {field: value for field, value in values.items() if isinstance(value, int | float)}
    return transformers4_names(config.to_dict(), config.model_type) | there if there else None


def _family_of(kind: str) -> Family:
    known = next((family for family in FAMILIES.values() if family.hf_model_type == kind), None)
    return known or other_family(kind)


def configuration(family: Family, fields: dict[str, Any], name: str) -> PretrainedConfig:
    """Return the configuration of ``fields``; `ConfigError` where widths conflict or transformers rejects it."""
    from transformers import CONFIG_MAPPING

    return _made(lambda fields: CONFIG_MAPPING[family.hf_model_type](**fields), family, fields, name)


def with_flags(config: PretrainedConfig, given: dict[str, Any], weights: str | None, location: str) -> PretrainedConfig:
    """Return the configuration at ``location`` with the given flags applied.

    Raises:
        ConfigError: for a shape that the ``weights`` do not have, and as `overlay` and `configuration` do.
    """
    if not given:
        return config
    family = _family_of(config.model_type)
    before = transformers4_names(config.to_dict(), config.model_type)
    fields = dict(before)
    overlay(fields, family, location, given)
    if {"hidden_width", "num_heads"} & given.keys() and not weights:
        fields.pop("head_dim", None)  # it follows from the former widths
    shapes = {target: flag for flag in SHAPES if (target := family.fields.get(flag))}
    if family.hf_model_type == "gpt2":  # learned position embeddings
        shapes["n_positions"] = "max_context_width"
    for target, flag in shapes.items():
        if weights and fields.get(target) != before.get(target):
            raise ConfigError(f"--{flag} {fields[target]}: the weights in {location} have {before.get(target)}")
    return _made(type(config).from_dict, family, fields, location)


def _made(
    make: Callable[[dict[str, Any]], PretrainedConfig], family: Family, fields: dict[str, Any], name: str
) -> PretrainedConfig:
    """Check the fields and return ``make(fields)``; ``name`` is the model's, for messages."""
    from transformers import CONFIG_MAPPING

    defaults = CONFIG_MAPPING[family.hf_model_type]()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = fields.get(key, getattr(defaults, key, None))
        if isinstance(token, int) and token >= fields.get("vocab_size", token + 1):
            fields[key] = None  # outside of a vocabulary that --vocab_size reduced
    _check_widths(family, fields, name)
    try:
        return make(fields)
    except Exception as failure:  # transformers' validation raises exceptions of several libraries
        raise ConfigError(f"{name}: transformers refuses the configuration: {one_line(failure)}") from failure


def _check_widths(family: Family, fields: dict[str, Any], name: str) -> None:
    """Raise `ConfigError` for inconsistent widths, named by their flags."""
    sizes = {flag: fields.get(family.fields.get(flag, "")) for flag in SIZES}
    for flag, size in sizes.items():
        if size is not None and size <= 0:
            raise ConfigError(f"{name}: --{flag} must be at least 1, not {size}")
    hidden, heads, key_value = (sizes[flag] for flag in ("hidden_width", "num_heads", "num_key_value_heads"))
    experts, used = sizes["num_local_experts"], sizes["num_experts_per_tok"]
    if experts and used and used > experts:
        raise ConfigError(f"{name}: --num_experts_per_tok {used} is more than --num_local_experts {experts}")
    if hidden is None or heads is None:
        return
    if key_value and heads % key_value:
        raise ConfigError(f"{name}: --num_heads {heads} is not a multiple of --num_key_value_heads {key_value}")
    if fields.get("head_dim"):
        return
    if hidden % heads:
        raise ConfigError(f"{name}: --hidden_width {hidden} is not a multiple of --num_heads {heads}")
    shares = (fields.get("rotary_pct"), fields.get("partial_rotary_factor"), 1.0)
    rotary = int(hidden // heads * next(share for share in shares if share is not None))
    if family.hf_model_type != "gpt2" and not fields.get("alibi") and (rotary % 2 or rotary == 0):
        raise ConfigError(
            f"{name}: rotary embeddings rotate pairs of dimensions, but --hidden_width {hidden} with "
            f"--num_heads {heads} leaves {rotary} dimensions per head"
        )
