"""Data in whole runs: each sample exactly once per epoch on any ranks, data that fails, rows with nothing to learn."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest

from smp_train.data import tokenizer as tokenizers
from smp_train.data.audit import audit
from tests import harness
from tests.chats import write_lines
from tests.system.command import write_shard
from tests.tiers import slow
from tests.training import audits, flags, records, same, saved, steps, train

ROWS = 48


def order(folder: Path, *, micro_batch: int) -> list[str]:
    """Return the samples of a run in the order of the global batches."""
    names: list[str] = []
    for step in audits(folder).values():
        ranks = [step[rank] for rank in sorted(step)]
        for start in range(0, len(ranks[0]), micro_batch):  # micro-batch by micro-batch, each rank in turn
            names += itertools.chain(*(samples[start : start + micro_batch] for samples in ranks))
    return names


def used(folder: Path) -> list[list[str]]:
    """Return the samples of each step, on all ranks."""
    return [sorted(itertools.chain(*step.values())) for step in audits(folder).values()]


def losses(folder: Path, event: str | None = None) -> list[float]:
    """Return the losses of the steps, or of the validations."""
    return [record["loss"] for record in records(folder) if record.get("event") == event and "loss" in record]


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
    assert losses(many) == pytest.approx(losses(one), rel=1e-5)
    assert steps(one)[-1]["lr"] == 1e-5, "the schedule ends with the run"
    assert steps(one)[-1]["tokens"] == 2 * 11 * 15, "the first token of a row is no target"


def write_text(folder: Path) -> Path:
    """Write a tokenizer, and text enough for two streams."""
    folder.mkdir(exist_ok=True)
    words = [" ".join(f"w{n * k % 97}" for k in range(40)) for n in range(13_000)]
    for name, part in (("a", words[:6000]), ("b", words[6000:]), ("../held_out/v", words[:9])):
        write_lines(folder / f"{name}.jsonl", [{"text": text} for text in part])
    tokenizer = tokenizers.train(words[:100], 258)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


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
    halfway = used(parts)
    resume = {"resume_from_checkpoint": parts / "checkpoints", "train_batch_size": 2, "gradient_accumulation_steps": 2}
    harness.run(train, 1, flags(parts, **{**common, **resume}))
    assert halfway == used(whole)[:3]
    assert list(audits(parts).values())[3:] == list(audits(whole).values())[3:]
    for event in (None, "evaluate"):
        assert losses(parts, event) == pytest.approx(losses(whole, event), rel=1e-5)
    assert [len(losses(whole, event)) for event in (None, "evaluate")] == [6, 2]
    state = json.loads((parts / "checkpoints" / "run" / "llama_v2-6steps" / "meta.json").read_text())["data"]
    assert len(state["cursors"]) == 2
    assert audit(whole / "run") == 0
    assert "no token twice, no record left in its middle" in capsys.readouterr().out


def test_epochs_of_streams_end_the_run_when_all_ranks_have_ended(tmp_path: Path) -> None:
    """The rank whose streams end first goes on with blank batches; a resume finds nothing left to do."""
    rows = [{"input_ids": list(range(3 + number * 7 % 38))} for number in range(16)]
    write_lines(tmp_path / "data" / "a.jsonl", rows)
    common = {"use_synthetic_data": None, "training_dir": tmp_path / "data", "streaming": 1, "data_audit": 1}
    common |= {"epochs": 2, "max_steps": 100, "lr_decay_iters": 20}
    harness.run(train, 2, flags(tmp_path, **common))
    names = list(itertools.chain(*used(tmp_path)))
    assert len(names) == len(set(names)) == 2 * len(rows)
    first = [name for name in names if "@" not in name]
    assert sorted(name.replace("@1", "") for name in names if "@" in name) == sorted(first)
    assert (tmp_path / "run" / "DONE").exists()
    done = steps(tmp_path)[-1]["step"]
    assert len(rows) <= done < 100
    harness.run(train, 2, flags(tmp_path, **common, resume_from_checkpoint=tmp_path / "checkpoints"))
    assert steps(tmp_path)[-1]["step"] == done
    with pytest.raises(harness.RankFailed, match=r"ConfigError: .*--epochs 2: the length of streamed data"):
        harness.run(train, 1, flags(tmp_path / "other", **{**common, "max_steps": None, "lr_decay_iters": None}))


def fails(folder: Path, world: int, **changes: object) -> str:
    """Run until the data fails, and return the message of rank 0's error."""
    with pytest.raises(harness.RankFailed) as failed:
        harness.run(train, world, flags(folder, **changes))
    return str(failed.value)


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
    third = cut / "checkpoints" / "run" / "llama_v2-3steps"
    assert (third / "COMMITTED").exists()
    assert json.loads((third / "meta.json").read_text())["data"]["consumed"] == 3 * rows
    assert [path.name for path in (cut / "checkpoints" / "run").glob("*steps")] == [third.name]
    assert not (cut / "run" / "DONE").exists()

    tok.write_bytes(good)
    harness.run(train, 2, flags(cut, **common, resume_from_checkpoint=cut / "checkpoints"))
    assert losses(cut) == losses(whole)
    same(saved(cut, 6), saved(whole, 6))


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


def test_an_audit_that_cannot_be_written_ends_all_ranks_and_saves(tmp_path: Path) -> None:
    audit = tmp_path / "run" / "data_audit-rank1.jsonl"
    audit.parent.mkdir()
    audit.symlink_to("/dev/full")
    message = fails(tmp_path, 2, data_audit=1, max_steps=1)
    assert "rank 1" in message
    assert f"{audit}: cannot write the audit there (No space left on device)" in message
    assert (tmp_path / "checkpoints" / "run" / "llama_v2-1steps" / "COMMITTED").exists()
    assert not (tmp_path / "run" / "DONE").exists()


def put(folder: Path, rows: list[dict[str, list[int]]]) -> Path:
    for shard in range(2):
        write_lines(folder / f"{shard}.jsonl", rows[shard * len(rows) // 2 : (shard + 1) * len(rows) // 2])
    return folder


def prompts(folder: Path) -> Path:
    """Write rows of 24 tokens, of which every fifth has its first target behind 16."""
    rows = [
        {"input_ids": list(range(1, 25)), "labels": [-100] * first + [9] * (24 - first)}
        for first in (18 if number % 5 == 3 else number % 15 for number in range(40))
    ]
    return put(folder, rows)


def test_rows_cut_to_nothing_stop_the_run_at_the_start(tmp_path: Path) -> None:
    place = prompts(tmp_path / "data")
    words = flags(tmp_path, use_synthetic_data=None, training_dir=place, shuffle="none")
    with pytest.raises(harness.RankFailed, match=r"DataError: .*\b0\.jsonl:4: "):
        harness.run(train, 2, words)
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not steps(tmp_path)
    # In the validation data alike.
    good = put(tmp_path / "good", [{"input_ids": list(range(1, 25))} for _ in range(4)])
    words = flags(tmp_path, use_synthetic_data=None, training_dir=good, test_dir=place, validation_freq=1)
    with pytest.raises(harness.RankFailed, match=r"DataError: .*\b0\.jsonl:4: "):
        harness.run(train, 2, words)


@pytest.mark.slow
def test_rows_cut_to_nothing_keep_their_positions_and_train_on_nothing(tmp_path: Path) -> None:
    place = prompts(tmp_path / "data")
    common = {
        "use_synthetic_data": None, "training_dir": place, "data_audit": 1, "bad_rows": "skip", "max_bad": 0.25,
        "epochs": 2, "lr_decay_iters": 20,
    }  # fmt: skip
    one, moved = tmp_path / "one", tmp_path / "moved"
    harness.run(train, 1, flags(one, **common, train_batch_size=4, max_steps=None))
    resume = {"resume_from_checkpoint": moved / "checkpoints"}
    harness.run(train, 2, flags(moved, **common, gradient_accumulation_steps=2, max_steps=5, checkpoint_freq=5))
    harness.run(train, 4, flags(moved, **common, **resume, max_steps=None))
    assert audit(one / "run") == audit(moved / "run") == 0
    assert used(moved) == used(one)
    assert len(used(one)) == 20
    rows = {f"{shard}.jsonl:{line}[0:16]" for shard in range(2) for line in range(1, 21)}
    assert set(itertools.chain(*used(one))) == rows
    learnt = sum(16 - max(first, 1) for first in (number % 15 for number in range(40) if number % 5 != 3))
    assert steps(one)[-1]["tokens"] == 2 * learnt
    assert losses(moved) == pytest.approx(losses(one), rel=1e-4)
    with pytest.raises(harness.RankFailed, match=r"DataError: .*--max_bad"):
        harness.run(train, 1, flags(tmp_path / "few", **{**common, "max_bad": 0.1}))
    with pytest.raises(harness.RankFailed, match=r"DataError: .*training data changed"):
        harness.run(train, 1, flags(moved, **common, **resume, max_context_width=20, train_batch_size=4))
