"""What a person sees who made a mistake: one line that says what, where and what to do, and an exit code."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chats import PLAIN, write_lines, write_tokenizer
from tests.system.command import Command, warm, write_shard
from tests.training import flags

pytestmark = pytest.mark.system

CONFIG, DATA, CHECKPOINT = 2, 3, 4
Mistake = Callable[[Path], dict[str, Any]]
"""Makes an input below a folder, and returns the flags that meet it."""
SECONDS = 300.0
"""In which a command with a mistake has ended, on a machine that others use too; by itself it takes one or two."""


def line_of(command: Command, code: int) -> str:
    """Return the one line that ``command`` left on stderr when it ended in time with ``code``."""
    with command:
        assert command.code(SECONDS) == code, command.err
        assert "Traceback" not in command.err + command.out
        lines = command.err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("smp-train: error: ")
        return lines[0]


def refused(folder: Path, changes: dict[str, Any], code: int) -> str:
    return line_of(warm(folder, "train", *flags(folder, **changes)), code)


LARGE = {"vocab_size": None, "hidden_width": None, "num_layers": None, "num_heads": None, "num_key_value_heads": None,
         "intermediate_size": None, "model_size": "70b"}  # fmt: skip


# --- refused once it is looked at ------------------------------------------------------------------


def shards(folder: Path) -> Path:
    """Write a folder with two good shards and return it."""
    data = folder / "data"
    for number in range(2):
        write_shard(data / f"part-{number}.jsonl", 8, first=8 * number)
    return data


def on(data: Path, **changes: Any) -> dict[str, Any]:
    return {"use_synthetic_data": None, "training_dir": data, **changes}


def damaged(name: str, text: str, mode: str = "w") -> Mistake:
    """Return a mistake: one of the shards has this text, or has it in addition."""

    def make(folder: Path) -> dict[str, Any]:
        data = shards(folder)
        with (data / name).open(mode) as file:
            file.write(text)
        return on(data)

    return make


def empty_folder(folder: Path) -> dict[str, Any]:
    (folder / "data").mkdir()
    return on(folder / "data")


def missing_shard(folder: Path) -> dict[str, Any]:
    data = shards(folder)
    listed = [{"name": path.name, "bytes": path.stat().st_size} for path in data.iterdir()]
    (folder / "_manifest.json").write_text(json.dumps({"seq_len": 16, "splits": {"data": {"shards": listed}}}))
    (data / "part-1.jsonl").unlink()
    return on(data)


def on_chats(template: str | None, *chat: dict[str, str]) -> Mistake:
    """Return a mistake: a chat, with a tokenizer that has a template or none."""

    def make(folder: Path) -> dict[str, Any]:
        write_tokenizer(folder / "tokenizer", template)
        place = write_lines(folder / "chats.jsonl", [{"messages": chat}])
        return {"use_synthetic_data": None, "dataset": place, "tokenizer": folder / "tokenizer", "vocab_size": 300}

    return make


def below_a_file(flag: str, name: str) -> Mistake:
    """Return a mistake: a folder where also root cannot write."""

    def make(folder: Path) -> dict[str, Any]:
        (folder / "file").touch()
        return {flag: folder / "file" / name}

    return make


broken_line = damaged("part-1.jsonl", '{"input_ids": [1, 2, 3], "attention_mask": [1, 1, \n', "a")
LOOKED_AT: dict[str, tuple[Mistake, int, str]] = {
    "missing folder": (
        lambda folder: on(folder / "nowhere"), DATA, r"FOLDER/nowhere: no such file or folder; check --training_dir",
    ),
    "empty folder": (empty_folder, DATA, r"FOLDER/data: no file that matches \*\.json "),
    "empty shard": (
        damaged("part-1.jsonl", ""), DATA,
        r"FOLDER/data/part-1\.jsonl: is empty \(0 bytes\); write it again or remove it",
    ),
    "blank shard": (
        damaged("part-1.jsonl", "\n\n"), DATA,
        r"FOLDER/data/part-1\.jsonl: empty shard \(no row in it\); write it again or remove it",
    ),
    "broken line": (
        broken_line, DATA, r"FOLDER/data/part-1\.jsonl:9: broken JSON .*; one whole object per line is needed",
    ),
    "foreign token": (
        damaged("part-0.jsonl", '{"input_ids": [1, 256], "attention_mask": [1, 1]}\n', "a"), DATA,
        r"FOLDER/data/part-0\.jsonl:9: token id 256 is outside the vocabulary \[0, 256\); .* --vocab_size",
    ),
    "missing shard": (missing_shard, DATA, r"FOLDER/data: .*part-1\.jsonl is missing"),
    "chats without a template": (
        on_chats(None), CONFIG, r"--tokenizer FOLDER/tokenizer: has no chat template.* --chat_template",
    ),
    "chat without an answer": (
        on_chats(PLAIN, {"role": "user", "content": "a"}), DATA,
        r"FOLDER/chats\.jsonl:1: no turn of the assistant: .* --bad_rows skip",
    ),
    "unwritable checkpoints": (
        below_a_file("checkpoint_dir", "checkpoints"), CHECKPOINT, r"FOLDER/file/checkpoints.* --checkpoint_dir",
    ),
    "unwritable run folder": (
        below_a_file("run_dir", "run"), CONFIG,
        r"FOLDER/file/run: cannot write the run folder \(Not a directory\); set --run_dir",
    ),
    "no such checkpoint": (
        lambda folder: {"resume_from_checkpoint": folder / "elsewhere"}, CHECKPOINT,
        r"FOLDER/elsewhere does not exist; give a folder of runs, .* or one checkpoint",
    ),
    "unknown family": (lambda folder: {"model_type": "lama_v2"}, CONFIG, r"lama_v2.*did you mean llama_v2"),
    "unknown size": (lambda folder: {"model_size": "7c"}, CONFIG, r"7c.*7b"),
    "heads": (lambda folder: {"num_heads": 5}, CONFIG, r"--hidden_width 32 is not a multiple of --num_heads 5"),
    "no such model": (
        lambda folder: {"hf_pretrained_model_name_or_dir": "./nowhere"}, CONFIG, r"\./nowhere does not exist",
    ),
    # Before anything of it is allocated, and before the data is looked at: the numbers, and what to change.
    "a model larger than the memory": (
        lambda folder: LARGE | on(folder / "nowhere"), CONFIG,
        r"llama_v2-70b \(68\.98 B parameters\) take 1027\.8 GiB .* which has [\d.]+ GiB.* --memory_check 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", LOOKED_AT)
def test_looked_at(mistake: str, tmp_path: Path) -> None:
    make, code, message = LOOKED_AT[mistake]
    line = refused(tmp_path, make(tmp_path), code)
    assert re.search(message.replace("FOLDER", re.escape(str(tmp_path))), line), line
    assert not list(tmp_path.glob("checkpoints/**/*steps"))


# --- checkpoints -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("trained")
    with warm(folder, "train", *flags(folder, **on(shards(folder), max_steps=2, checkpoint_freq=1))) as command:
        assert command.code() == 0, command.err
    return folder


@pytest.fixture
def resuming(trained: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of it, and the flags that resume there."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    checkpoints = tmp_path / "checkpoints"
    return tmp_path, on(tmp_path / "data", max_steps=4, resume_from_checkpoint=checkpoints, lr_decay_iters=2)


def truncate_all(checkpoint: Path) -> None:
    for file in checkpoint.glob("*.distcp"):
        with file.open("r+b") as opened:
            opened.truncate(10)


def test_a_damaged_checkpoint_asked_for_by_name(resuming: tuple[Path, dict[str, Any]]) -> None:
    folder, changes = resuming
    newest = folder / "checkpoints" / "run" / "llama_v2-2steps"
    truncate_all(newest)
    line = refused(folder, {**changes, "resume_from_checkpoint": newest}, CHECKPOINT)
    assert f"checkpoint {newest} is damaged" in line
    assert "complete ones in" in line
    assert "llama_v2-1steps" in line


def test_a_folder_of_damaged_checkpoints(resuming: tuple[Path, dict[str, Any]]) -> None:
    folder, changes = resuming
    for step in (1, 2):
        truncate_all(folder / "checkpoints" / "run" / f"llama_v2-{step}steps")
    line = refused(folder, changes, CHECKPOINT)
    assert "every checkpoint in" in line
    assert "give another --run_name or --checkpoint_dir, or move them away" in line


def test_an_incomplete_checkpoint(resuming: tuple[Path, dict[str, Any]]) -> None:
    folder, changes = resuming
    newest = folder / "checkpoints" / "run" / "llama_v2-2steps"
    (newest / "COMMITTED").unlink()
    line = refused(folder, {**changes, "resume_from_checkpoint": newest}, CHECKPOINT)
    assert f"{newest} is not a complete checkpoint" in line


@pytest.mark.parametrize(
    "other",
    [{"hidden_width": 64}, {"num_layers": 3}, {"model_type": "gpt2", "num_key_value_heads": None}],
    ids=["wider", "deeper", "another family"],
)
def test_a_checkpoint_of_another_model(other: dict[str, Any], resuming: tuple[Path, dict[str, Any]]) -> None:
    folder, changes = resuming
    line = refused(folder, {**changes, **other}, CHECKPOINT)
    assert "llama_v2-2steps" in line
    assert "another model" in line


def test_changed_data(resuming: tuple[Path, dict[str, Any]]) -> None:
    folder, changes = resuming
    write_shard(folder / "data" / "part-1.jsonl", 8, first=100)
    assert "the training data changed: fingerprint" in refused(folder, changes, DATA)
    write_shard(folder / "data" / "part-2.jsonl", 8, first=200)
    assert "the training data changed: samples 16 in the checkpoint, 24 now" in refused(folder, changes, DATA)


def test_a_changed_seed(resuming: tuple[Path, dict[str, Any]]) -> None:
    folder, changes = resuming
    line = refused(folder, {**changes, "seed": 1}, DATA)
    assert "--seed changed: 12345 in the checkpoint, 1 now; resume with the same, or start a new run" in line
