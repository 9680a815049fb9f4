"""Whole runs on text that is tokenised while they train: stopped, resumed on other ranks, validated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from smp_train.data import tokenizer as tokenizers
from smp_train.data.audit import audit as check_audit
from tests import harness
from tests.training import flags, records, steps, train


def write_text(folder: Path) -> Path:
    """Write a tokenizer, and text enough for two streams."""
    folder.mkdir(exist_ok=True)
    words = [" ".join(f"w{n * k % 97}" for k in range(40)) for n in range(13_000)]
    for name, part in (("a", words[:6000]), ("b", words[6000:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    (folder.parent / "held_out").mkdir()
    held_out = "".join(json.dumps({"text": text}) + "\n" for text in words[:9])
    (folder.parent / "held_out" / "v.jsonl").write_text(held_out)
    tokenizer = tokenizers.train(words[:100], 258)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def audits(folder: Path, rank: int | str = "*", after: int = 0) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for path in sorted((folder / "run").glob(f"data_audit-rank{rank}.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["step"] > after:
                found.setdefault(record["step"], []).extend(record["samples"])
    return found


@pytest.mark.slow
@pytest.mark.core
def test_streamed_text_resumes_exactly_on_other_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_text(tmp_path / "text")
    common = {
        "use_synthetic_data": None, "dataset": text, "tokenizer": text, "vocab_size": 258, "data_audit": 1,
        "max_steps": 6, "lr_decay_iters": 6, "test_dir": tmp_path / "held_out", "validation_freq": 3, "streaming": 1,
        "val_batch_size": 2, "validation_batches": 2,
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    harness.run(train, 1, flags(whole, **common, train_batch_size=4))
    first = {**common, "max_steps": 3, "train_batch_size": 2, "val_batch_size": 1, "checkpoint_freq": 3}
    harness.run(train, 2, flags(parts, **first))
    halfway = audits(parts)
    resume = {"resume_from_checkpoint": parts / "checkpoints", "train_batch_size": 2, "gradient_accumulation_steps": 2}
    harness.run(train, 1, flags(parts, **{**common, **resume}))

    assert {step: sorted(names) for step, names in halfway.items()} == {
        step: sorted(names) for step, names in audits(whole).items() if step <= 3
    }
    assert audits(parts, 0, after=3) == audits(whole, 0, after=3)
    assert [(r["step"], pytest.approx(r["loss"], rel=1e-5)) for r in steps(parts)] == [
        (r["step"], r["loss"]) for r in steps(whole)
    ]
    losses = [[r["loss"] for r in records(run) if r.get("event") == "evaluate"] for run in (parts, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert len(losses[0]) == 2
    state = json.loads((parts / "checkpoints" / "run" / "llama_v2-6steps" / "meta.json").read_text())["data"]
    assert len(state["cursors"]) == 2
    assert check_audit(whole / "run") == 0
    assert "no token twice, no record left in its middle" in capsys.readouterr().out
