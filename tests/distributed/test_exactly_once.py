"""Each sample of an epoch exactly once, through a stop and a change of the number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from smp_train.data.audit import audit
from tests import harness
from tests.system.command import write_shard
from tests.training import flags, steps, train

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


@pytest.mark.slow
def test_epochs_use_every_row_so_many_times(tmp_path: Path) -> None:
    """11 rows, 6 a step, and other numbers after a resume: the last batch is filled up with rows that do not count."""
    write_shard(tmp_path / "data" / "0.jsonl", 5)
    write_shard(tmp_path / "data" / "1.jsonl", 6, first=5)
    common = {"use_synthetic_data": None, "training_dir": tmp_path / "data", "data_audit": 1, "max_steps": None}
    one, many, moved = tmp_path / "one", tmp_path / "many", tmp_path / "moved"
    whole = {**common, "epochs": 2, "logging_freq": 1}
    harness.run(train, 1, flags(one, **whole, train_batch_size=6))
    harness.run(train, 3, flags(many, **whole, gradient_accumulation_steps=2))
    resume = {"resume_from_checkpoint": moved / "checkpoints"}
    harness.run(train, 2, flags(moved, **{**whole, "max_steps": 2}, gradient_accumulation_steps=2))
    harness.run(train, 2, flags(moved, **whole, **resume, train_batch_size=5))

    for folder in (one, many, moved):
        uses = Counter(order(folder, micro_batch=99))
        assert len(uses) == 11
        assert set(uses.values()) == {2}
        assert steps(folder)[-1]["consumed"] == 22
        assert audit(folder / "run") == 0
    assert order(many, micro_batch=1) == order(one, micro_batch=6)
    assert [record["step"] for record in steps(one)] == [1, 2, 3, 4]
    assert [record["step"] for record in steps(moved)] == [1, 2, 3, 4]  # 4 and 4 samples, then 10 and 4
    for alone, split in zip(steps(one), steps(many), strict=True):
        assert split["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert split["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    assert steps(one)[-1]["lr"] == 1e-5, "the schedule ends with the run"
    assert steps(one)[-1]["tokens"] == 2 * tokens_of(tmp_path / "data")


def tokens_of(folder: Path) -> int:
    """Return the counted tokens of all rows: the first of a row is no target."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sum(len(json.loads(line)["input_ids"]) - 1 for line in lines)


def test_epochs_of_less_than_a_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_shard(tmp_path / "data" / "0.jsonl", 3)
    common = {"use_synthetic_data": None, "training_dir": tmp_path / "data", "data_audit": 1, "max_steps": None}
    harness.run(train, 2, flags(tmp_path / "a", **common, epochs=1, train_batch_size=8))
    assert sorted(order(tmp_path / "a", micro_batch=8)) == ["0.jsonl:1", "0.jsonl:2", "0.jsonl:3"]
    assert steps(tmp_path / "a")[-1]["consumed"] == 3
    assert audit(tmp_path / "a" / "run") == 0

    # Ended before: no fault, and said.
    harness.run(train, 1, flags(tmp_path / "b", **common, epochs=2, train_batch_size=2, steps_per_epoch=1))
    capsys.readouterr()
    assert audit(tmp_path / "b" / "run") == 0
    assert "2 of 3 samples" in capsys.readouterr().out
