"""Checkpoints of the SMP v2 sample, written on the stand-in, resumed natively on another mesh, on SMP, and imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import harness, smp_trees
from tests.smp import DATA, MIXTRAL, NATIVE, NEOX, alike, numbers, smp, train_on_smp
from tests.training import flags, train

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not NATIVE, reason="the native backend needs torch 2.6")]

SHARED: dict[str, Any] = {"lr_decay_iters": 4, "max_steps": 2, "train_batch_size": 2}
TENSOR: dict[str, Any] = {"tensor_parallel_degree": 2, "train_batch_size": 4}
WRITTEN: dict[str, tuple[int, dict[str, Any], str, str]] = {
    "hybrid llama": (4, {"hybrid_shard_degree": 2, "train_batch_size": 1}, "sharded", ""),
    "tied llama": (2, {"tie_word_embeddings": 1}, "sharded", ""),
    "tp2 llama": (4, TENSOR | {"train_batch_size": 2}, "sharded", "tp{tp}_ep{ep}"),
    "tp2 llama, earlier names": (4, TENSOR | {"train_batch_size": 2}, "sharded", "tp{tps}-{tp}"),
    "tp2 mistral, local": (4, TENSOR | {"train_batch_size": 2, "model_type": "mistral"}, "local", "tp{tp}_ep{ep}"),
    "local llama": (2, {}, "local", "tp{tp}_ep{ep}"),
    "own llama": (2, {"use_smp_implementation": 1}, "sharded", "tp{tp}_ep{ep}"),
    "tp2 gpt-neox": (4, NEOX | TENSOR | {"train_batch_size": 2}, "sharded", "tp{tp}_ep{ep}"),
    "ep2 mixtral": (2, MIXTRAL | {"expert_parallel_degree": 2}, "sharded", "tp{tp}_ep{ep}"),
    "tp2 mixtral": (4, MIXTRAL | TENSOR | {"train_batch_size": 2}, "sharded", "tp{tp}_ep{ep}"),
}


FOR_BOTH = {*MIXTRAL, *NEOX, "tie_word_embeddings"} - {"moe"}


def written(tmp_path: Path, name: str) -> tuple[list[str], Path, smp_trees.State]:
    world, changes, kind, form = WRITTEN[name]
    line = smp(tmp_path / "theirs", **{**SHARED, **changes})
    family = changes.get("model_type", "llama_v2")
    folder = tmp_path / "aws" / f"{family}-2steps"
    return line, folder, harness.run(smp_trees.write, world, line, str(folder), kind, form)[0]


def same(one: smp_trees.State, two: smp_trees.State) -> None:
    lacking = {name for name in set(one) ^ set(two) if not name.endswith("lm_head.weight")}
    assert not lacking
    assert any(name.startswith("exp_avg_sq.") for name in two)
    assert [name for name in two if not torch.equal(one[name], two[name])] == []
    assert any(value.abs().max() > 0 for name, value in two.items() if name.startswith("exp_avg."))


@pytest.mark.parametrize("name", WRITTEN)
def test_resumes_natively_on_another_mesh(name: str, tmp_path: Path) -> None:
    world, changes, _, _ = WRITTEN[name]
    _, folder, saved = written(tmp_path, name)
    before = smp_trees.contents(folder)
    batch = changes.get("train_batch_size", 2) * world // changes.get("tensor_parallel_degree", 1)
    model = {key: value for key, value in changes.items() if key in FOR_BOTH}
    ours = {**SHARED, **model, "max_steps": 4, "train_batch_size": batch // 2, "resume_from_checkpoint": folder.parent}
    line = flags(tmp_path / "native", **DATA, **ours)
    step, consumed, found = harness.run(smp_trees.take_up, 2, line)[0]
    assert (step, consumed) == (2, 2 * batch)
    same(saved, found)
    harness.run(train, 2, line)
    # The run on SMP, from its own checkpoint of the same step.
    straight = {**SHARED, **changes, "max_steps": 4, "resume_from_checkpoint": tmp_path / "theirs" / "checkpoints"}
    harness.run(train_on_smp, world, smp(tmp_path / "straight", **straight))
    alike(numbers(tmp_path / "native"), numbers(tmp_path / "straight"))
    assert smp_trees.contents(folder) == before
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]
