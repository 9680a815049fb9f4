"""Each sample of an epoch exactly once, through a stop and a change of the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

from smp_train.data.cli import audit
from tests import harness
from tests.system.command import write_shard
from tests.training import flags, train

ROWS = 48


def order(folder: Path, *, micro_batch: int) -> list[str]:
    """Return the samples of a run in the order of the global batches, from the audits of all ranks."""
    last: dict[int, dict[int, list[str]]] = {}
    for path in sorted(folder.glob("run/data_audit-rank*.jsonl")):
        rank = int(path.stem.rpartition("rank")[2])
        for line in path.read_text().splitlines():
            record = json.loads(line)
            last.setdefault(record["step"], {})[rank] = record["samples"]
    names = []
    for step in sorted(last):
        ranks = [last[step][rank] for rank in sorted(last[step])]
        for start in range(0, len(ranks[0]), micro_batch):  # micro-batch by micro-batch, each rank in turn
            for samples in ranks:
                names += samples[start : start + micro_batch]
    return names


def test_every_sample_once_whatever_the_number_of_ranks(tmp_path: Path) -> None:
    for shard in range(3):
        write_shard(tmp_path / "data" / f"{shard}.jsonl", ROWS // 3, first=shard * ROWS // 3)
    common = {"use_synthetic_data": None, "training_dir": tmp_path / "data", "data_audit": 1, "lr_decay_iters": 24}
    one, moved = tmp_path / "one", tmp_path / "moved"
    harness.run(train, 1, flags(one, **common, train_batch_size=4, max_steps=24))
    resume = {"resume_from_checkpoint": moved / "checkpoints"}
    harness.run(train, 2, flags(moved, **common, **resume, gradient_accumulation_steps=2, max_steps=5))
    harness.run(train, 4, flags(moved, **common, **resume, max_steps=24))

    expected = order(one, micro_batch=4)
    assert order(moved, micro_batch=1) == expected
    assert len(expected) == 2 * ROWS
    first, second = expected[:ROWS], expected[ROWS:]
    assert len(set(first)) == len(set(second)) == ROWS
    assert first != second
    assert "0.jsonl:1" in first
    assert json.loads((moved / "run" / "run.json").read_text())["samples"] == {"": ROWS}
    assert audit(moved / "run") == 0
