"""Straight through equals stop, new process, and on: bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.releases import need
from tests.training import alike, audits, exact, flags, numbers, records, same, saved, steps, train

COMMON = {"train_batch_size": 1, "attn_pdrop": 0.1, "checkpoint_freq": 3, "num_kept_checkpoints": 10, "data_audit": 1}


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / "run" / f"llama_v2-{step}steps"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "changes"),
    [
        pytest.param(1, {}, marks=pytest.mark.core),
        (2, {}),
        (4, {"hybrid_shard_degree": 2}),
        # Of four ranks, two hold no expert.
        (4, {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}),
        (4, {"model_type": "mixtral", "num_local_experts": 2, "expert_parallel_degree": 2}),
    ],
    ids=["1", "2", "2x2", "experts", "ep2-fsdp2"],
)
def test_resume_is_bit_exact(world: int, changes: dict, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = {**COMMON, **changes, "lr_decay_iters": 6}
    harness.run(train, world, flags(straight, **options, max_steps=6))
    for last in (3, 6):  # the very same command twice, but for where it ends
        resumable = {"resume_from_checkpoint": broken / "checkpoints", "max_steps": last}
        harness.run(train, world, flags(broken, **options, **resumable))

    assert any("exp_avg_sq" in name for name in saved(broken, 6))
    same(saved(broken, 6), saved(straight, 6))
    assert exact(broken) == exact(straight)
    assert audits(broken) == audits(straight)
    assert [r["event"] for r in records(broken) if "event" in r].count("resume") == 1
    if world == 1:  # back to step 3: what follows that is the run, and step 6 stays and is never its newest
        for place, last in ((checkpoint(broken, 3), 4), (broken / "checkpoints", 5)):
            harness.run(train, world, flags(broken, **options, resume_from_checkpoint=place, max_steps=last))
        assert [r["step"] for r in records(broken) if r.get("event") == "resume"] == [3, 3, 4]
        kept = sorted(path.parent.name for path in (broken / "checkpoints" / "run").glob("*/COMMITTED"))
        assert kept == [f"llama_v2-{step}steps" for step in (3, 4, 5, 6)]


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {"train_batch_size": 4}),
    "fsdp4": (4, {"train_batch_size": 1}),
    "tp2-fsdp2": (4, {"tensor_parallel_degree": 2, "train_batch_size": 2}),
    "cp2-fsdp2": (4, {"context_parallel_degree": 2, "train_batch_size": 2}),
    "ep4": (4, {"expert_parallel_degree": 4, "train_batch_size": 1}),
    "ep2-tp2": (4, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2, "train_batch_size": 2}),
}
MOVED = {"lr_decay_iters": 6, "checkpoint_freq": 3, "num_kept_checkpoints": 10, "data_audit": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("tp2-fsdp2", "fsdp4"), ("fsdp4", "tp2-fsdp2"), pytest.param("cp2-fsdp2", "one", marks=pytest.mark.core),
        ("ep2-tp2", "ep4"), ("ep4", "one"),
    ],
)  # fmt: skip
def test_resume_on_another_mesh(first: str, second: str, tmp_path: Path) -> None:
    need(first, second)
    model = {"model_type": "mixtral", "num_local_experts": 4, "attn_pdrop": 0} if first.startswith("ep") else {}
    undisturbed = tmp_path / "undisturbed"
    for folder, name, last in ((undisturbed, "one", 6), (tmp_path, first, 3), (tmp_path, second, 6)):
        world, changes = MESHES[name]
        resumable = {"resume_from_checkpoint": folder / "checkpoints", "max_steps": last}
        harness.run(train, world, flags(folder, **MOVED, **model, **changes, **resumable))
    ours, theirs = ([(r["step"], r["consumed"]) for r in steps(folder)] for folder in (tmp_path, undisturbed))
    assert ours == theirs
    alike(numbers(tmp_path), numbers(undisturbed))
