"""A run on a blend: resumed on other ranks it reads what one process reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import harness
from tests.training import flags, steps, train

LENGTHS = [3, 9, 30, 5, 12, 4, 7, 21, 6, 11, 40, 3, 8, 10, 5, 17]


def put(folder: Path, name: str, step: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [[(step * n * n + k * (n + 3)) % 256 for k in range(size)] for n, size in enumerate(LENGTHS)]
    half = len(rows) // 2
    for number, part in enumerate((rows[:half], rows[half:])):
        lines = "".join(json.dumps({"input_ids": row}) + "\n" for row in part)
        (folder / f"{name}-{number}.json").write_text(lines)
    return folder


@pytest.mark.slow
def test_a_blend_resumes_on_other_ranks(tmp_path: Path) -> None:
    """Audited: what is trained on after a resume with another world size is what one uninterrupted process sees."""
    a, b = put(tmp_path / "a", "a", 3), put(tmp_path / "b", "b", 5)
    common = {
        "use_synthetic_data": None, "short": "concat", "data_audit": 1, "max_steps": 6,
        "training_dir": None,
    }  # fmt: skip
    places = ["--training_dir", f"{a}:0.7", f"{b}:0.3"]
    harness.run(train, 1, flags(tmp_path / "whole", **common, train_batch_size=4) + places)
    halves = tmp_path / "halves"
    harness.run(train, 2, flags(halves, **{**common, "max_steps": 3}, train_batch_size=2, checkpoint_freq=3) + places)
    saved = halves / "checkpoints"
    resumed = {"resume_from_checkpoint": saved, "train_batch_size": 1, "gradient_accumulation_steps": 4}
    harness.run(train, 1, flags(halves, **common, **resumed) + places)

    def audit(folder: Path) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for path in sorted((folder / "run").glob("data_audit-rank*.jsonl")):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                found[record["step"]] = found.get(record["step"], []) + record["samples"]
        return found

    assert audit(halves) == audit(tmp_path / "whole")
    assert sorted(audit(halves)) == [1, 2, 3, 4, 5, 6]


def test_epochs_of_streams_end_the_run_when_all_ranks_have_ended(tmp_path: Path) -> None:
    """The rank whose streams end first goes on with blank batches; a resume finds nothing left to do."""
    put(tmp_path / "data", "a", 3)
    common = {"use_synthetic_data": None, "training_dir": tmp_path / "data", "streaming": 1, "data_audit": 1}
    common |= {"epochs": 2, "max_steps": 100, "lr_decay_iters": 20}
    harness.run(train, 2, flags(tmp_path, **common))
    names = [name for path in (tmp_path / "run").glob("data_audit-rank*.jsonl")
             for line in path.read_text().splitlines() for name in json.loads(line)["samples"]]  # fmt: skip
    assert len(names) == len(set(names)) == 2 * len(LENGTHS)
    first = [name for name in names if "@" not in name]
    assert sorted(name.replace("@1", "") for name in names if "@" in name) == sorted(first)
    assert (tmp_path / "run" / "DONE").exists()
    done = steps(tmp_path)[-1]["step"]
    assert len(LENGTHS) <= done < 100
    harness.run(train, 2, flags(tmp_path, **common, resume_from_checkpoint=tmp_path / "checkpoints"))
    assert steps(tmp_path)[-1]["step"] == done
    with pytest.raises(harness.RankFailed, match=r"ConfigError: .*--epochs 2: the length of streamed data"):
        harness.run(train, 1, flags(tmp_path / "other", **{**common, "max_steps": None, "lr_decay_iters": None}))
