"""Models that the package does not know by name, sharded and split in every way: right, or refused by name."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.distributed.test_same_numbers import ROWS, WIDTH, train_cell
from tests.training import NO_MODEL, alike, flags, group, train

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "initializer_range": 0.1,
}  # fmt: skip
WINDOW = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {**WINDOW, "attn_logit_softcapping": None},
    "qwen2": {**WINDOW, "use_sliding_window": True, "tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "decoder_sparse_step": 2},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "olmoe": {**EXPERTS, "num_experts": 4},
    "bloom": {},  # no max_position_embeddings: its positions are biases of attention
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "layerdrop": 0.0},
    "gemma": {"num_key_value_heads": 1, "tie_word_embeddings": True},
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    # name: what splits it, its configuration, what the refusal says
    "glm4_moe": ("tensor", {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1},
                 "mlp of this glm4_moe has gate, shared_experts beside its experts"),
    "olmo2": ("tensor", {}, "self_attn.q_proj of this olmo2 is split as colwise_gather_output"),
    "phi3": ("tensor", {}, "self_attn.o_proj of this phi3 is split as rowwise_split_input"),
    "granitemoe": ("tensor", {"num_local_experts": 4}, "granitemoe"),
    "llama4_text": ("tensor", {"num_local_experts": 4, "intermediate_size_mlp": 48}, "llama4_text"),
    "bloom": ("tensor", {}, "no plan for splitting a bloom"),
    "gpt_oss": ("context", {"num_local_experts": 4}, "a gpt_oss is not known to have causal attention alone"),
    "qwen3": ("expert", {}, "this model has no experts"),
    "lfm2": ("context", {"layer_types": ["conv", "full_attention"]}, "a lfm2 is not known"),
}  # fmt: skip
DEGREES: dict[str, dict[str, Any]] = {
    "one": {}, "shards": {}, **{kind: {f"{kind}_parallel_degree": 2} for kind in ("tensor", "context", "expert")}
}  # fmt: skip
ON_FOUR: dict[str, dict[str, Any]] = {
    "expert 4": {"expert_parallel_degree": 4}, "expert and replicas": {"hybrid_shard_degree": 1},
    "expert and tensor": {"tensor_parallel_degree": 2}, "expert and context": {"context_parallel_degree": 2},
}  # fmt: skip
DEGREES |= {name: {"expert_parallel_degree": 2, **degrees} for name, degrees in ON_FOUR.items()}
SPLIT = [
    *((family, mesh) for family in ("gemma2", "qwen2", "qwen3", "qwen3_moe") for mesh in ("tensor", "context")),
    *((family, "expert") for family in ("qwen3_moe", "qwen2_moe", "olmoe")),
    *((family, "shards") for family in ("bloom", "opt", "qwen2", "gemma")),
]


def train_all(cells: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Return, per (model, what splits it), (global loss, gradient norm) of each step, or what the refusal says."""
    from transformers import AutoConfig

    from smp_train.errors import ConfigError

    found: dict[tuple[str, str], Any] = {}
    with group() as (ranks, device), tempfile.TemporaryDirectory() as folder:
        for family, mesh in cells:
            config = {**SIZES, **(MODELS.get(family) or REFUSED.get(family, ("", {}))[1])}
            AutoConfig.for_model(family, **config).save_pretrained(f"{folder}/{family}")
            degrees = DEGREES[mesh]
            split = degrees.get("tensor_parallel_degree", 1) * degrees.get("context_parallel_degree", 1)
            command_line = flags(
                Path("unused"), **NO_MODEL, hf_pretrained_model_name_or_dir=f"{folder}/{family}",
                max_context_width=WIDTH, train_batch_size=ROWS * split // ranks.world_size, **degrees,
            )  # fmt: skip
            try:
                found[family, mesh] = train_cell(command_line, ranks, device)
            except ConfigError as error:
                found[family, mesh] = str(error)
    return found


@cache
def whole() -> dict[tuple[str, str], Any]:
    return harness.run(train_all, 1, [(family, "one") for family in MODELS])[0]


@cache
def split() -> list[dict[tuple[str, str], Any]]:
    return harness.run(train_all, 2, [*SPLIT, *((family, mesh) for family, (mesh, *_) in REFUSED.items())])


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), SPLIT)
def test_a_split_model_equals_a_whole_one(family: str, mesh: str) -> None:
    for found in split():
        assert isinstance(found[family, mesh], list), found[family, mesh]
        alike(found[family, mesh], whole()[family, "one"])


@pytest.mark.slow
def test_qwen3_moe_on_four_ranks_with_experts_on_two_or_four() -> None:
    expected = whole()["qwen3_moe", "one"]
    for of_rank in harness.run(train_all, 4, [("qwen3_moe", mesh) for mesh in ON_FOUR]):
        for (_, mesh), found in of_rank.items():
            alike(found, expected, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(family: str) -> None:
    mesh, _, says = REFUSED[family]
    for found in split():
        refusal = str(found[family, mesh])
        assert re.search(f"--{mesh}_parallel_degree 2.*{re.escape(says)}", refusal), refusal


def test_refused_before_the_data_is_opened(tmp_path: Path) -> None:
    given = {"use_synthetic_data": None, "training_dir": tmp_path / "nowhere", "tensor_parallel_degree": 2}
    with pytest.raises(harness.RankFailed, match="the 1 key-value heads"):
        harness.run(train, 2, flags(tmp_path, num_key_value_heads=1, **given))
