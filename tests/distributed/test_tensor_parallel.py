"""Tensor parallelism: the numbers of one process, for every family that can be split."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests import harness
from tests.training import SAMPLE, flags, steps, train

TOLERANCE = 1e-5  # relative, fp32: products and norms are summed in another order

FAMILIES = {
    "llama_v2": {},
    "llama_v3": {"tie_word_embeddings": 1},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4},
    "gpt_neox": {"num_key_value_heads": None},
    "phi": {"rotary_pct": 0.5},
}
MESHES = {
    "tp2": (2, {"tensor_parallel_degree": 2, "train_batch_size": 4}),
    "tp2-fsdp2": (4, {"tensor_parallel_degree": 2, "train_batch_size": 2}),
    "tp2-hsdp2x2": (8, {"tensor_parallel_degree": 2, "hybrid_shard_degree": 2, "train_batch_size": 1}),
    "tp2-full-logits": (2, {"tensor_parallel_degree": 2, "train_batch_size": 4, "chunked_loss": 0}),
}


def options(family: str) -> dict:
    return {
        "model_type": family, "use_synthetic_data": None, "training_dir": SAMPLE / "train", "vocab_size": 4096,
        "max_context_width": 64, "test_dir": SAMPLE / "test", "validation_freq": 3, "resid_pdrop": 0, "embd_pdrop": 0,
        "attn_pdrop": 0, **FAMILIES[family],
    } | ({"resid_pdrop": None, "embd_pdrop": None} if family not in ("gpt_neox", "phi", "gpt2") else {})  # fmt: skip


@cache
def reference(family: str, folder: Path) -> list[dict]:
    harness.run(train, 1, flags(folder / family, **options(family), train_batch_size=4))
    return steps(folder / family)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_split_model_trains_like_a_whole_one(
    family: str, mesh: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = reference(family, tmp_path_factory.getbasetemp())
    world, changes = MESHES[mesh]
    harness.run(train, world, flags(tmp_path, **options(family), **changes))
    for ours, theirs in zip(steps(tmp_path), expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)
        assert ours["tokens"] == theirs["tokens"]
