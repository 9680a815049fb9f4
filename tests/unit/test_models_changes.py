"""Which configurations compute the same of the same weights, in whatever version of transformers they were saved."""

from __future__ import annotations

from typing import Any

import pytest

from smp_train.arguments import Arguments
from smp_train.errors import CheckpointError
from smp_train.models.configuration import changes, changes_from, with_sample_flags
from smp_train.models.resolve import resolve
from tests.releases import TRANSFORMERS_5

WIDTHS = {
    "model_type": "llama_v2", "hidden_width": 64, "num_layers": 2, "num_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 512, "max_context_width": 64,
}  # fmt: skip
AS_VERSION_4 = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 64,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
    "attention_dropout": 0.0, "tie_word_embeddings": False, "torch_dtype": "float32", "max_length": 20, "top_k": 50,
    "transformers_version": "4.44.2", "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config(**flags: Any) -> Any:
    return resolve(Arguments(**WIDTHS | flags)).config


MISTRAL = {"model_type": "mistral"}
CHANGES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[str]]] = [
    # flags of the checkpoint, other fields of its configuration, flags of the run, what is named
    ({}, {}, {"num_heads": 8, "num_key_value_heads": 4}, ["--num_heads: 4 there, 8 here", "--num_key_value_heads: 2 "]),
    ({}, {}, {"rotary_emb_base": 500000}, ["--rotary_emb_base"]),
    ({}, {}, {"tie_word_embeddings": 1}, ["--tie_word_embeddings"]),
    ({}, {}, MISTRAL, ["--model_type: llama there, mistral here"]),
    (MISTRAL, {}, {**MISTRAL, "sliding_window": 32}, ["--sliding_window"]),
    ({}, {"hidden_act": "gelu"}, {}, ["hidden_act"]),
    ({}, {"rms_norm_eps": 1e-6}, {}, ["rms_norm_eps"]),
    ({}, {"attention_bias": True}, {}, ["attention_bias"]),
    ({}, AS_VERSION_4, {}, []),  # versions of transformers spell one model differently
    ({}, {**AS_VERSION_4, "rope_theta": 5e5}, {}, ["--rotary_emb_base"]),
    ({}, {**AS_VERSION_4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {}, ["--rope_scaling_type"]),
    # settings of training are no change, and every family's model is the same as itself
    *(({}, {}, flags, []) for flags in ({"attn_pdrop": 0.1}, {"max_context_width": 32}, {"initializer_range": 0.01})),
    *(({"model_type": kind, "num_key_value_heads": heads}, {}, {"model_type": kind, "num_key_value_heads": heads}, [])
      for kind, heads in (("mistral", 2), ("mixtral", 2), ("gpt_neox", 4), ("gpt2", 4), ("falcon", 1), ("phi", 2))),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "fields", "now", "named"), CHANGES)
def test_changes_of_the_function_are_named(saved: dict, fields: dict, now: dict, named: list[str]) -> None:
    before = AS_VERSION_4 if fields.keys() >= AS_VERSION_4.keys() else config(**saved).to_dict()
    found = changes({**before, **fields}, config(**now))
    assert len(found) >= len(named)
    assert all(line.startswith(expected) for line, expected in zip(found, named, strict=False)), found
    assert named or not found


@pytest.mark.parametrize(
    ("kind", "told", "named"),
    [
        ("llama_v3", {"num_heads": 4, "rotary_emb_base": 10000}, ["--rotary_emb_base"]),
        ("llama_v2", {"num_heads": 4, "rotary_emb_base": 10000}, []),
        ("gpt_neox", {"num_heads": 2, "rotary_emb_base": 500, "rotary_pct": 0.5},
         ["--num_heads", "--rotary_emb_base", "--rotary_pct"]),
        ("mixtral", {"num_heads": 8, "rotary_emb_base": 10000}, ["--num_heads"]),  # its base is no flag there
    ],
)  # fmt: skip
def test_flags_of_smps_sample_are_compared_if_it_uses_them(kind: str, told: dict, named: list[str]) -> None:
    made = config(model_type=kind, num_key_value_heads=4 if kind == "gpt_neox" else 2)
    saved = with_sample_flags({f"cli_args.{flag}": value for flag, value in told.items()}, made)
    assert saved is not None
    found = [line.partition(":")[0] for line in changes(saved, made)]
    # Two fields of GPT-NeoX have a second name in transformers 4.
    assert [name for name in found if TRANSFORMERS_5 or name.startswith("--")] == named


def test_checkpoints_that_cannot_be_compared() -> None:
    assert with_sample_flags({"total_steps": 2}, config()) is None
    pretrained = {"cli_args.num_heads": 8, "cli_args.hf_pretrained_model_name_or_dir": "there"}
    assert with_sample_flags(pretrained, config()) is None
    with pytest.raises(CheckpointError):
        changes_from({"model_config": config().to_dict() | {"rope_scaling": [1]}}, config())
