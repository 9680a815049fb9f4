"""Every family trains from flags alone, and on every way of sharding as on one process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests import harness
from tests.training import SAMPLE, flags, steps, train

TOLERANCE = 1e-5

FAMILIES = {
    "llama_v2": {},
    "llama_v3": {"tie_word_embeddings": 1},
    "mistral": {"sliding_window": 24},
    "mixtral": {"num_local_experts": 4},
    "gpt_neox": {"num_key_value_heads": None, "resid_pdrop": 0},
    "gpt2": {"num_key_value_heads": None, "resid_pdrop": 0, "embd_pdrop": 0},
    "phi": {"rotary_pct": 0.5, "resid_pdrop": 0, "embd_pdrop": 0},
    "falcon": {"num_key_value_heads": 1, "resid_pdrop": 0},
}
MESHES = {
    "fsdp2": (2, {"train_batch_size": 2}),
    "hsdp2x2": (4, {"train_batch_size": 1, "hybrid_shard_degree": 2}),
}


def options(family: str) -> dict:
    return {
        "model_type": family, "use_synthetic_data": None, "training_dir": SAMPLE / "train", "vocab_size": 4096,
        "max_context_width": 64, "attn_pdrop": 0, **FAMILIES[family],
    }  # fmt: skip


@cache
def reference(family: str, folder: Path) -> list[dict]:
    harness.run(train, 1, flags(folder / family, **options(family), train_batch_size=4))
    return steps(folder / family)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_trains_like_one_process(
    family: str, mesh: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = reference(family, tmp_path_factory.getbasetemp())
    world, changes = MESHES[mesh]
    harness.run(train, world, flags(tmp_path, **options(family), **changes))
    for ours, theirs in zip(steps(tmp_path), expected, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=TOLERANCE)


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    harness.run(train, 2, flags(tmp_path / "half", bf16=1))
    harness.run(train, 2, flags(tmp_path / "full", bf16=0))
    half, full = steps(tmp_path / "half"), steps(tmp_path / "full")
    assert [r["loss"] for r in half] == pytest.approx([r["loss"] for r in full], rel=5e-3)
    assert [r["loss"] for r in half] != [r["loss"] for r in full]
