"""What a person sees who made a mistake: one line that says what, where and what to do, and an exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.system.command import warm, write_shard
from tests.training import NO_MODEL, flags

pytestmark = pytest.mark.system

CONFIG, DATA, CHECKPOINT = 2, 3, 4
Mistake = Callable[[Path], dict[str, Any]]
"""Makes an input below a folder, and returns the flags that meet it."""
SECONDS = 300.0
"""In which a command with a mistake has ended, on a machine that others use too; by itself it takes one or two."""


def shards(folder: Path) -> Path:
    """Write a folder with two good shards and return it."""
    data = folder / "data"
    for number in range(2):
        write_shard(data / f"part-{number}.jsonl", 8, first=8 * number)
    return data


def on(data: Path, **changes: Any) -> dict[str, Any]:
    return {"use_synthetic_data": None, "training_dir": data, **changes}


def broken_line(folder: Path) -> dict[str, Any]:
    data = shards(folder)
    with (data / "part-1.jsonl").open("a") as file:
        file.write('{"input_ids": [1, 2, 3], "attention_mask": [1, 1, \n')
    return on(data)


def missing_shard(folder: Path) -> dict[str, Any]:
    data = shards(folder)
    listed = [{"name": path.name, "bytes": path.stat().st_size} for path in data.iterdir()]
    (folder / "_manifest.json").write_text(json.dumps({"seq_len": 16, "splits": {"data": {"shards": listed}}}))
    (data / "part-1.jsonl").unlink()
    return on(data)


def below_a_file(flag: str, name: str) -> Mistake:
    """Return a mistake: a folder where also root cannot write."""

    def make(folder: Path) -> dict[str, Any]:
        (folder / "file").touch()
        return {flag: folder / "file" / name}

    return make


LOOKED_AT: dict[str, tuple[Mistake, int, str]] = {
    "missing folder": (
        lambda folder: on(folder / "nowhere"), DATA, r"FOLDER/nowhere: no such file or folder; check --training_dir",
    ),
    "broken line": (
        broken_line, DATA, r"FOLDER/data/part-1\.jsonl:9: broken JSON .*; one whole object per line is needed",
    ),
    "missing shard": (missing_shard, DATA, r"FOLDER/data: .*part-1\.jsonl is missing"),
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
    "no such model": (
        lambda folder: {"hf_pretrained_model_name_or_dir": "./nowhere"}, CONFIG, r"\./nowhere does not exist",
    ),
    # Before anything of it is allocated, and before the data is looked at: the numbers, and what to change.
    "a model larger than the memory": (
        lambda folder: on(folder / "nowhere", **NO_MODEL | {"model_type": "llama_v2", "model_size": "70b"}), CONFIG,
        r"llama_v2-70b \(68\.98 B parameters\) take 1027\.8 GiB .* which has [\d.]+ GiB.* --memory_check 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", LOOKED_AT)
def test_a_mistake_ends_with_one_line(mistake: str, tmp_path: Path) -> None:
    make, code, message = LOOKED_AT[mistake]
    with warm(tmp_path, "train", *flags(tmp_path, **make(tmp_path))) as command:
        assert command.code(SECONDS) == code, command.err
        assert "Traceback" not in command.err + command.out
        (line,) = command.err.splitlines()
    assert line.startswith("smp-train: error: ")
    assert re.search(message.replace("FOLDER", re.escape(str(tmp_path))), line), line
    assert not list(tmp_path.glob("checkpoints/**/*steps"))
