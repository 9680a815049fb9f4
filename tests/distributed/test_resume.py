"""Straight through equals stop, new process, and on: bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import harness
from tests.training import flags, read_checkpoint, records, steps, train

COMMON = {"train_batch_size": 1, "attn_pdrop": 0.1, "checkpoint_freq": 3, "num_kept_checkpoints": 10, "data_audit": 1}


def checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"llama_v2-{step}steps"


def audits(folder: Path, world: int) -> list[list[str]]:
    return [(folder / "run" / f"data_audit-rank{rank}.jsonl").read_text().splitlines() for rank in range(world)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "changes"), [(1, {}), (2, {}), (4, {"hybrid_shard_degree": 2})], ids=["1", "2", "2x2"]
)
def test_resume_is_bit_exact(world: int, changes: dict, tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    options = {**COMMON, **changes, "lr_decay_iters": 6}
    harness.run(train, world, flags(straight, **options, max_steps=6))
    for last in (3, 6):  # the very same command twice, but for where it ends
        resumable = {"resume_from_checkpoint": broken / "checkpoints", "max_steps": last}
        harness.run(train, world, flags(broken, **options, **resumable))

    ours, theirs = read_checkpoint(checkpoint(broken, 6)), read_checkpoint(checkpoint(straight, 6))
    assert ours.keys() == theirs.keys()
    assert any("exp_avg_sq" in name for name in ours)
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, name
    exact = ("step", "loss", "grad_norm", "lr", "tokens", "consumed")
    assert [[r[k] for k in exact] for r in steps(broken)] == [[r[k] for k in exact] for r in steps(straight)]
    assert audits(broken, world) == audits(straight, world)
    assert [r["event"] for r in records(broken) if "event" in r].count("resume") == 1
