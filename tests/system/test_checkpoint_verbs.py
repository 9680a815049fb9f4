"""`smp-train checkpoint` and `bench checkpoint`, as a person types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.command import torchrun, warm
from tests.training import flags

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a run of three steps, all kept."""
    there = tmp_path_factory.mktemp("run")
    words = flags(there, run_name="first", checkpoint_freq=1, num_kept_checkpoints=0)
    with warm(there, "train", *words) as command:
        assert command.code() == 0, command.err
    return there / "checkpoints" / "first"


def said(folder: Path, *words: str) -> str:
    with warm(folder.parent.parent, "checkpoint", *words) as command:
        assert command.code() == 0, command.err
        return command.out


def test_all_are_kept_and_listed_as_json(folder: Path) -> None:
    rows = json.loads(said(folder, "ls", str(folder), "--json"))
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {row["state"] for row in rows} == {"committed"}
    assert {row["run"] for row in rows} == {"first"}
    assert {row["generation"] for row in rows} == {1}
    assert all(row["bytes"] > 0 and row["files"] > 2 and row["saved"].endswith("Z") for row in rows)
    assert all(Path(row["path"], "COMMITTED").is_file() for row in rows)


def test_one_checkpoint_is_listed(folder: Path) -> None:
    (row,) = json.loads(said(folder, "ls", "--json", str(folder / "llama_v2-2steps")))
    assert (row["step"], row["state"]) == (2, "committed")
    header, line = said(folder, "list", str(folder / "llama_v2-2steps")).splitlines()
    assert header.split() == ["name", "state", "size", "step"]
    assert line.startswith("llama_v2-2steps ")


def test_the_checkpoints_of_all_runs_are_listed(folder: Path) -> None:
    lines = said(folder, "list", str(folder.parent)).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [[f"first/llama_v2-{n}steps", "committed"] for n in (1, 2, 3)]


def test_show_names_model_run_and_time(folder: Path) -> None:
    facts = dict(line.split(":", 1) for line in said(folder, "show", str(folder)).splitlines())
    assert "llama_v2" in facts["model"]
    assert "first" in facts["run"]
    assert facts["saved"].strip().endswith("Z")


@pytest.mark.slow
def test_the_benchmark_says_where_it_is(tmp_path: Path) -> None:
    words = ("bench", "checkpoint", "--gigabytes", "0.001", "--rounds", "1", "--rows", "1")
    with torchrun(tmp_path, 1, *words) as command:
        assert command.code() == 0, command.err
        assert "round 1 of 2" in command.err
