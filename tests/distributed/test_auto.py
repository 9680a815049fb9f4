"""`--auto`: training uses the choice, and a resume keeps it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.training import flags, numbers, same, saved, train

CHOOSES = {"train_batch_size": None, "run_name": "chosen"}


def command(folder: Path, **changes: Any) -> list[str]:
    known = {**CHOOSES, "gradient_accumulation_steps": 2, "max_steps": 2, **changes}
    return flags(folder, **known, resume_from_checkpoint=folder / "checkpoints")


def choice(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "run" / "run.json").read_text())
    assert found["config"].items() >= found["auto"]["flags"].items()
    return found["auto"]


@pytest.mark.slow
def test_it_trains_with_the_flags_it_prints_and_a_resume_keeps_them(tmp_path: Path) -> None:
    harness.run(train, 2, command(tmp_path / "auto", auto="plan"))
    first = choice(tmp_path / "auto")
    assert first["rows"] == 8
    assert first["flags"]["activation_checkpointing"] == "none"
    assert "gradient_accumulation_steps" not in first["flags"]
    by_hand = {**first["flags"], "auto": None}
    harness.run(train, 2, command(tmp_path / "hand", **by_hand))
    assert numbers(tmp_path / "auto") == numbers(tmp_path / "hand")
    same(saved(tmp_path / "auto", 2), saved(tmp_path / "hand", 2))

    harness.run(train, 2, command(tmp_path / "auto", auto="plan", max_steps=3))
    again = choice(tmp_path / "auto")
    assert again.pop("kept") is True
    assert again == first
    # One process goes on with the same global batch.
    harness.run(train, 1, command(tmp_path / "auto", auto="plan", max_steps=4))
    alone = choice(tmp_path / "auto")
    assert "kept" not in alone
    assert (alone["devices"], alone["rows"], alone["flags"]["train_batch_size"]) == (1, 8, 4)
    assert len(numbers(tmp_path / "auto")) == 4


WORKERS = """
import sys
from smp_train.planning.search import workers
with workers() as pool:
    pool.submit(print, "began", flush=True).result()
    sys.stdin.read()
"""


@pytest.mark.slow
def test_nothing_is_left_of_a_search_that_is_killed() -> None:
    """Only the search and its workers have the other end of the pipe, so its end shows that all have ended."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", WORKERS], stdin=pipe, stdout=pipe, text=True) as search:
        assert search.stdout is not None
        assert search.stdout.readline() == "began\n"
        search.kill()
        assert search.communicate(timeout=300)[0] == ""


RANK = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-m", "smp_train.planning.best", str(os.getpid())])
print("began", flush=True)
sys.stdin.detach()
os.read(os.pipe()[0], 1)
"""


@pytest.mark.slow
def test_a_search_ends_with_its_rank(tmp_path: Path) -> None:
    """A search that went on would answer."""
    from smp_train import arguments
    from tests.unit.test_auto import request

    asks = request(arguments.parse(flags(tmp_path), {}), 2**40)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", RANK], stdin=pipe, stdout=pipe, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "began\n"
        rank.kill()
        assert rank.communicate(json.dumps(asks), timeout=300)[0] == ""
