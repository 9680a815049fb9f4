"""Data that fails in mid-run: the last completed step is saved first, and a run on mended data goes on from there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import harness
from tests.distributed.test_text_training import audits, write_text
from tests.system.command import write_shard
from tests.tiers import slow
from tests.training import flags, read_checkpoint, steps, train


def fails(folder: Path, world: int, **changes: object) -> str:
    """Run until the data fails, and return the message of rank 0's error."""
    with pytest.raises(harness.RankFailed) as failed:
        harness.run(train, world, flags(folder, **changes))
    return str(failed.value)


def assert_equal(one: Path, other: Path) -> None:
    """Hold two checkpoints against each other, bit for bit."""
    left, right = read_checkpoint(one), read_checkpoint(other)
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert (value == right[name]).all() if hasattr(value, "all") else value == right[name], name


def damaged_token(folder: Path, place: int) -> tuple[Path, bytes]:
    """Damage one byte of the tokens of a data set; return their file, and what was in it."""
    (tok,) = (folder / ".smp_train_cache").glob("*.tok")
    good = tok.read_bytes()
    tok.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
    return tok, good


@pytest.mark.parametrize(
    "changes", slow([{}, {"checkpoint_type": "sharded", "gradient_accumulation_steps": 2}], bool)
)
def test_a_damaged_row_saves_the_step_before(tmp_path: Path, changes: dict) -> None:
    data = tmp_path / "data"
    write_shard(data / "0.jsonl", 48)
    common = {
        "use_synthetic_data": None, "training_dir": data, "max_steps": 6, "shuffle": "none", "lr_decay_iters": 6,
        "logging_freq": 1, **changes,
    }  # fmt: skip
    rows = 2 * changes.get("gradient_accumulation_steps", 1)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    harness.run(train, 2, flags(whole, **common))
    tok, good = damaged_token(data, (3 * rows + 1) * 32)  # the first row of rank 1 in step 4

    assert "DataError" in fails(cut, 2, **common)
    saved = cut / "checkpoints" / "run" / "llama_v2-3steps"
    assert (saved / "COMMITTED").exists()
    assert json.loads((saved / "meta.json").read_text())["data"]["consumed"] == 3 * rows
    assert [path.name for path in (cut / "checkpoints" / "run").glob("*steps")] == [saved.name]
    assert not (cut / "run" / "DONE").exists()

    tok.write_bytes(good)
    harness.run(train, 2, flags(cut, **common, resume_from_checkpoint=cut / "checkpoints"))
    assert [(r["step"], r["loss"]) for r in steps(cut)] == [(r["step"], r["loss"]) for r in steps(whole)]
    assert_equal(cut / "checkpoints" / "run" / "llama_v2-6steps", whole / "checkpoints" / "run" / "llama_v2-6steps")


def test_data_that_fails_before_a_step_and_in_validation(tmp_path: Path) -> None:
    for name in ("data", "test"):
        write_shard(tmp_path / name / "0.jsonl", 8)
    common = {"use_synthetic_data": None, "training_dir": tmp_path / "data", "max_steps": 2, "shuffle": "none"}
    run = {**common, "test_dir": tmp_path / "test", "validation_freq": 2, "val_batch_size": 1}
    harness.run(train, 2, flags(tmp_path / "a", **run))
    damaged_token(tmp_path / "test", 0)
    fails(tmp_path / "b", 2, **{**run, "max_steps": 4})
    assert (tmp_path / "b" / "checkpoints" / "run" / "llama_v2-2steps" / "COMMITTED").exists()
    fails(tmp_path / "c", 2, **run, evaluate_only=1)
    damaged_token(tmp_path / "data", 0)
    fails(tmp_path / "d", 2, **common)
    for name in ("c", "d"):
        assert not list((tmp_path / name / "checkpoints").rglob("*steps")), "no step was completed"


@pytest.mark.parametrize("steps", slow([4, 1], lambda steps: steps > 1))
def test_an_audit_that_cannot_be_written_ends_all_ranks_and_saves(tmp_path: Path, steps: int) -> None:
    audit = tmp_path / "run" / "data_audit-rank1.jsonl"
    audit.parent.mkdir()
    audit.symlink_to("/dev/full")
    message = fails(tmp_path, 2, data_audit=1, max_steps=steps)
    assert "rank 1" in message
    assert f"{audit}: cannot write the audit there (No space left on device)" in message
    assert (tmp_path / "checkpoints" / "run" / "llama_v2-1steps" / "COMMITTED").exists()
    assert not (tmp_path / "run" / "DONE").exists()


@pytest.mark.slow
def test_a_broken_line_of_streamed_text_saves_the_step_before(tmp_path: Path) -> None:
    """The peers have read ahead, and have been handed a step that is not made."""
    text = write_text(tmp_path / "text")
    common = {
        "use_synthetic_data": None, "dataset": text, "tokenizer": text, "vocab_size": 258, "max_steps": 6,
        "streaming": 1,
        "shuffle": "none", "logging_freq": 1, "max_context_width": 128, "data_audit": 1,
        "gradient_accumulation_steps": 64,
    }  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    harness.run(train, 2, flags(whole, **common))
    seen = [name for names in (audits(whole)[step] for step in (1, 2)) for name in names]
    last = max(int(number) for name in seen for number in re.findall(r"a\.jsonl:(\d+)", name))
    lines = (text / "a.jsonl").read_bytes().split(b"\n")
    first = last // 256 * 256 + 256  # of the next block of documents
    lines[first] = b"?" * len(lines[first])
    broken = b"\n".join(lines)
    mended = (text / "a.jsonl").read_bytes()
    (text / "a.jsonl").write_bytes(broken)
    message = fails(cut, 2, **common)
    assert "a.jsonl:" in message
    (saved,) = (cut / "checkpoints" / "run").glob("*steps")
    assert 2 <= json.loads((saved / "meta.json").read_text())["step"] < 6

    (text / "a.jsonl").write_bytes(mended)
    harness.run(train, 2, flags(cut, **common, resume_from_checkpoint=cut / "checkpoints"))
    assert audits(cut) == audits(whole)
    assert_equal(cut / "checkpoints" / "run" / "llama_v2-6steps", whole / "checkpoints" / "run" / "llama_v2-6steps")
