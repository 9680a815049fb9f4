"""Checkpoints written on the stand-in for SMP, resumed there with other degrees, or in the other implementation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness, smp_trees
from tests.distributed.test_smp_trees import SHARED, same
from tests.smp import MIXTRAL, NATIVE, NEOX, smp

pytestmark = pytest.mark.slow

OWN: dict[str, Any] = {"use_smp_implementation": 1}
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2}
EXPERT: dict[str, Any] = {"expert_parallel_degree": 2}
MISTRAL: dict[str, Any] = {"model_type": "mistral"}
TREES = ("sharded", "tp{tp}_ep{ep}")
LOCAL = ("local" if NATIVE else "sharded", TREES[1])  # torch 2.5 refuses to write those of the stand-in
MOVED: dict[str, tuple[int, dict[str, Any], tuple[str, str], int, dict[str, Any]]] = {
    "tp2 to tp1": (2, TENSOR, TREES, 2, OWN), "tp1 to tp2": (2, OWN, TREES, 4, TENSOR),
    "tp2 to tp1, mistral, local": (4, MISTRAL | TENSOR, LOCAL, 1, MISTRAL | OWN),
    "tp2 shard2 to shard4": (4, TENSOR | {"hybrid_shard_degree": 2}, TREES, 4, OWN | {"hybrid_shard_degree": 4}),
    "tp1 to tp2 without shards, gpt-neox": (2, NEOX | OWN, TREES, 2, NEOX | TENSOR | {"hybrid_shard_degree": 1}),
    "tp2 to tp1, gpt-neox": (4, NEOX | TENSOR, TREES, 2, NEOX | OWN),
    "ep2 to ep1": (2, MIXTRAL | EXPERT, TREES, 2, MIXTRAL), "ep1 to ep2": (1, MIXTRAL, TREES, 4, MIXTRAL | EXPERT),
    "tp2 to ep2": (4, MIXTRAL | TENSOR, TREES, 2, MIXTRAL | EXPERT),
    "hugging face to tp2": (2, {}, ("sharded", ""), 4, TENSOR),
    "hugging face to tp2, rank files": (2, {}, ("files", ""), 2, TENSOR),
    "hugging face to own, tied": (2, {"tie_word_embeddings": 1}, TREES, 2, OWN | {"tie_word_embeddings": 1}),
    "tp2 to hugging face": (2, TENSOR, TREES, 2, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_resumes_with_other_degrees(name: str, tmp_path: Path) -> None:
    world, changes, form, other_world, others = MOVED[name]
    folder = tmp_path / "aws" / f"{changes.get('model_type', 'llama_v2')}-2steps"
    line = smp(tmp_path / "before", **{**SHARED, **changes})
    saved = harness.run(smp_trees.write, world, line, str(folder), *form)[0]
    for who, place in {"theirs": folder.parent, "ours": tmp_path / "before" / "checkpoints"}.items():
        line = smp(tmp_path / who, **{**SHARED, **others, "resume_from_checkpoint": place})
        for step, found in harness.run(smp_trees.take_up_on_smp, other_world, line):
            assert step == 2
            same(saved, found)
