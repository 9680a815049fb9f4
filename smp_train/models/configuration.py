"""A model's transformers configuration: changes by flags, checks of widths, comparison with a checkpoint's model."""

from __future__ import annotations

import logging
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from smp_train.distributed import ALL_RANKS
from smp_train.errors import CheckpointError, ConfigError, one_line
from smp_train.models.families import ROPE_SCALING, Family, family_of
from smp_train.models.hugging_face import transformers4_names

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger("smp_train.models")

IGNORED_WITHOUT_FIELD = ("rotary_pct", "resid_pdrop", "embd_pdrop", "attn_pdrop")
"""Flags that launch scripts of the original systems pass for every family, even if the family lacks the setting."""
SHAPES = (
    "vocab_size", "hidden_width", "num_layers", "num_heads", "num_key_value_heads", "intermediate_size",
    "num_local_experts", "tie_word_embeddings",
)  # fmt: skip
"""Flags that change the shape of a weight. With pretrained weights they must equal the configuration's values."""
LLAMA3_SCALING = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip

TRAINING_SETTINGS = re.compile(
    r"dropout|pdrop|token_id|initializer|max_position|^n_positions|^n_ctx|use_cache|router_aux|output_router|jitter|"
    r"summary_|pretraining_tp|^rope_parameters|scale_init"
)
"""Configuration fields that change how weights are trained, but not the function that given weights compute."""


def apply_flags(fields: dict[str, Any], family: Family, name: str, flags: dict[str, Any]) -> None:
    """Write flags into configuration fields; ``name`` is the model's, for messages.

    Raises `ConfigError` for a flag without a field, except flags without effect and flags that scripts always pass.
    """
    heads = flags.get("num_heads", fields.get(family.fields.get("num_heads", "")))
    for flag, value in (following_heads(family, fields, flags) | flags).items():
        target = family.fields.get(flag)
        if target is None:
            no_change = (
                (flag.endswith("_pdrop") and value == 0)
                or (flag == "num_key_value_heads" and value == heads)
                or flag == "max_context_width"  # it also sets the length of rows, for any model
            )
            if flag not in IGNORED_WITHOUT_FIELD and not no_change:
                raise ConfigError(f"--{flag} {value}: {name} has no such setting; leave it out")
            if not no_change:
                logger.info("--%s %s has no effect: %s has no such setting", flag, value, name)
        elif flag == "max_context_width":
            fields[target] = max(int(value), fields.get(target) or 0)
        elif flag not in ROPE_SCALING:
            fields[target] = bool(value) if flag == "tie_word_embeddings" else value
    _apply_rope_scaling(fields, flags)
    if family.hf_model_type == "falcon" and "num_key_value_heads" in flags:
        # The decoder layer of Falcon 7B has one key-value head; Falcon 40B has several.
        fields["new_decoder_architecture"] = flags["num_key_value_heads"] > 1


def following_heads(family: Family, fields: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Return ``num_key_value_heads`` equal to the ``num_heads`` flag if the two numbers are equal in ``fields``."""
    heads, key_value = (fields.get(family.fields.get(flag, "")) for flag in ("num_heads", "num_key_value_heads"))
    follows = "num_heads" in flags and key_value is not None and key_value == heads
    return {"num_key_value_heads": flags["num_heads"]} if follows else {}


def _apply_rope_scaling(fields: dict[str, Any], flags: dict[str, Any]) -> None:
    scaling = {ROPE_SCALING[flag]: value for flag, value in flags.items() if flag in ROPE_SCALING}
    if not scaling:
        return
    current = fields.get("rope_scaling") or {}
    kind = scaling.get("rope_type", current.get("rope_type", "default"))
    if kind == "default":
        fields.pop("rope_scaling", None)
    elif kind == "llama3":
        fields["rope_scaling"] = LLAMA3_SCALING | current | scaling | {"rope_type": kind}
    else:
        raise ConfigError(f"--rope_scaling_type {kind} is not known; known: default, llama3")


def with_flags(config: PretrainedConfig, flags: dict[str, Any], weights: str | None, location: str) -> PretrainedConfig:
    """Return the configuration read from ``location`` with flags applied.

    Raises `ConfigError` for a shape that differs from the pretrained ``weights``, and as `checked` does.
    """
    if not flags:
        return config
    family = family_of(config.model_type)
    original = transformers4_names(config.to_dict())
    fields = dict(original)
    apply_flags(fields, family, location, flags)
    if {"hidden_width", "num_heads"} & flags.keys() and not weights:
        fields.pop("head_dim", None)  # it was computed from the previous widths
    learned_positions = ("max_context_width",) * (family.hf_model_type == "gpt2")
    for flag in (*SHAPES, *learned_positions) if weights else ():
        target = family.fields.get(flag, "")
        if fields.get(target) != original.get(target):
            raise ConfigError(f"--{flag} {fields[target]}: the weights in {location} have {original.get(target)}")
    positions = family.fields.get("max_context_width", "")
    if weights and fields.get(positions, 0) > (original.get(positions) or sys.maxsize):
        _warn_of_positions(location, fields[positions], original[positions])
    return checked(fields, family, location, type(config))


@cache  # a start resolves its model more than once
def _warn_of_positions(location: str, positions: int, pretrained: int) -> None:
    logger.warning(
        "--max_context_width %d: the model in %s was trained on %d positions, and has to learn the further ones",
        positions, location, pretrained, extra=ALL_RANKS,
    )  # fmt: skip


def checked(fields: dict[str, Any], family: Family, name: str, config_class: Any = None) -> PretrainedConfig:
    """Return the configuration of ``fields``, by default of the family's class; ``name`` is the model's, for messages.

    Raises `ConfigError` if widths contradict each other or transformers rejects the fields.
    """
    from transformers import CONFIG_MAPPING

    config_class = config_class or CONFIG_MAPPING[family.hf_model_type]
    defaults = config_class()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = fields.get(key, getattr(defaults, key, None))
        if isinstance(token, int) and token >= fields.get("vocab_size", token + 1):
            fields[key] = None  # --vocab_size is too small for this token
    check_widths(family, fields, name)
    try:
        config: PretrainedConfig = config_class.from_dict(fields)
    except Exception as failure:  # transformers' validation raises exceptions of several libraries
        raise ConfigError(f"{name}: transformers refuses the configuration: {one_line(failure)}") from failure
    return config


def check_widths(family: Family, fields: dict[str, Any], name: str) -> None:
    """Raise `ConfigError` for widths that do not divide each other."""
    flags = ("hidden_width", "num_heads", "num_key_value_heads", "num_local_experts", "num_experts_per_tok")
    hidden, heads, key_value, experts, used = (fields.get(family.fields.get(flag, "")) for flag in flags)
    if experts and used and used > experts:
        raise ConfigError(f"{name}: --num_experts_per_tok {used} is more than --num_local_experts {experts}")
    if not hidden or not heads:
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


def changes(saved: dict[str, Any], config: PretrainedConfig) -> list[str]:
    """Return the fields in which a checkpoint's model differs from ``config``, as "--num_heads: 4 there, 8 here".

    ``saved`` is the checkpoint's configuration as any version of transformers wrote it; missing fields have the
    installed version's defaults. Fields that do not change the function of given weights are not compared.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    kind = config.model_type
    if saved.get("model_type") != kind:
        return [f"--model_type: {saved.get('model_type')} there, {kind} here"]
    flags = {target: flag for flag, target in family_of(kind).fields.items()} | {"rope_scaling": "rope_scaling_type"}
    saved_fields, current = (
        transformers4_names(type(config).from_dict(transformers4_names(fields)).to_dict())
        for fields in (saved, config.to_dict())
    )
    # Fields of the model's class, but not of every model.
    compared = transformers4_names(CONFIG_MAPPING[kind]().to_dict()).keys() - PretrainedConfig().to_dict().keys()
    compared |= {"tie_word_embeddings", *flags}
    return [
        f"{'--' + flags[key] if key in flags else key}: {saved_fields.get(key)} there, {current.get(key)} here"
        for key in sorted(compared, key=lambda key: (key not in flags, key))
        if saved_fields.get(key) != current.get(key) and not TRAINING_SETTINGS.search(key)
    ]


def changes_from(meta: dict[str, Any], config: PretrainedConfig) -> list[str]:
    """Return the `changes` from the model in a checkpoint's metadata, empty if the metadata has no configuration.

    Raises `CheckpointError` if transformers rejects the configuration there.
    """
    saved = meta.get("model_config", with_sample_flags(meta.get("imported", {}), config))
    try:
        return changes(saved, config) if isinstance(saved, dict) else []
    except Exception as failure:  # transformers' validation raises exceptions of several libraries
        raise CheckpointError(f"the configuration in the checkpoint is not valid: {one_line(failure)}") from failure


def with_sample_flags(recorded: dict[str, Any], config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the fields of ``config``, but with the flags that a checkpoint of SMP's sample recorded.

    Only flags that change the function of given weights are used. ``recorded`` are the checkpoint's values that are not
    tensors. Returns None without such flags, and for a pretrained model, whose own configuration the sample used.
    """
    if "cli_args.hf_pretrained_model_name_or_dir" in recorded:
        return None
    # The sample ignores its rotary flags for Mistral and Mixtral.
    rotary = ("rotary_emb_base", "rotary_pct") if config.model_type in ("llama", "gpt_neox") else ()
    targets = {flag: family_of(config.model_type).fields.get(flag) for flag in ("num_heads", *rotary)}
    values = {target: recorded.get(f"cli_args.{flag}") for flag, target in targets.items() if target}
    numbers = {target: value for target, value in values.items() if isinstance(value, int | float)}
    return transformers4_names(config.to_dict()) | numbers if numbers else None
