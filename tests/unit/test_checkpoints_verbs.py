"""`smp-train checkpoint`: what list, show, verify and prune print and delete, and what each of them refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from smp_train import cli
from smp_train.checkpoints.cli import main
from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.folder import open_folder
from smp_train.errors import CheckpointError
from tests.checkpoint_files import (
    age,
    committed,
    contents,
    files,
    flipped,
    harm,
    keys,
    manager,
    names,
    owning,
    save,
    state,
    with_generation,
)

Capture = pytest.CaptureFixture[str]


def lines(capsys: Capture, *words: str) -> list[list[str]]:
    """Return the table of the verb ``list``, without its header, in cells."""
    assert main(["list", *words]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["name", "state", "size", "step"]
    return [re.split(r" {2,}", row) for row in rows]


def states(capsys: Capture, *words: str) -> dict[str, str]:
    return {name: state for name, state, *_ in lines(capsys, *words)}


def printed(capsys: Capture, *words: str) -> list[str]:
    assert main(list(words)) == 0
    return capsys.readouterr().out.splitlines()


def step(number: int) -> str:
    return f"llama_v2-{number}steps"


# --- list


@pytest.mark.core
def test_a_run_is_listed_verified_and_pruned(place: str, capsys: Capture) -> None:
    save(place, 3, 6, 9)
    assert states(capsys, place) == {step(number): "committed" for number in (3, 6, 9)}
    assert printed(capsys, "verify", place) == [f"{step(number)}: intact" for number in (9, 6, 3)]
    shown = "\n".join(printed(capsys, "show", f"{place}/{step(6)}"))
    assert re.search(rf"path: +{place}/{step(6)}", shown)
    assert re.search(r"(?s)step: +6\n.*tokens: +60", shown)
    assert re.search(r"model\.\*: +2 tensors", shown)
    harm(place, step(6), ".distcp", flipped)
    with pytest.raises(CheckpointError, match="1 of 3 damaged"):
        main(["verify", place])
    assert printed(capsys, "prune", place, "--keep", "1", "--dry_run", "1")[-2:] == [
        f"would delete {step(3)}", f"would delete {step(6)}",
    ]  # fmt: skip
    assert len(committed(place)) == 3
    assert main(["prune", place, "--keep", "1"]) == 0
    assert keys(place) == files(step(9))
    assert open_verified(place).step == 9


def test_states_of_checkpoints(tmp_path: Path, capsys: Capture) -> None:
    place = tmp_path / "runs" / "first"
    save(place, 1, 2, 3, 4)
    manager(place, keep=0).save(5, state(), {"best": {"step": 2, "loss": 1.0, "since": 3}})
    with_generation(place, step(5), 7)
    harm(place, step(1), ".distcp", lambda data: data[:-1])
    open_folder(place).put(step(3), "DAMAGED", b"it is damaged")
    (place / step(4) / "COMMITTED").write_text("{")
    for number in (6, 7):  # the seventh was swept
        (place / step(number)).mkdir()
        (place / step(number) / ".begun").write_text("{}")
    (place / step(6) / "__0_0.distcp").write_bytes(b"half")
    (place / "llama_v2-8steps" / "tp0_ep0").mkdir(parents=True)
    (place / "llama_v2-8steps" / "tp0_ep0" / ".metadata").write_bytes(b"theirs")
    expected = {
        step(1): "damaged", step(2): "committed, best", step(3): "damaged", step(4): "damaged", step(5): "committed",
        step(8): "SMP sample", step(6): "incomplete",
    }  # fmt: skip
    assert states(capsys, str(place)) == expected
    assert main(["ls", str(place), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert {name: row["state"] + ", best" * row["best"] for name, row in rows.items()} == expected
    newest = rows[step(5)]
    assert (newest["step"], newest["generation"], newest["run"], newest["files"]) == (5, 7, "first", 6)
    assert newest["path"] == str(place / step(5))
    assert newest["bytes"] == sum(path.stat().st_size for path in (place / step(5)).iterdir())
    assert newest["saved"].endswith("Z")
    assert rows[step(6)]["generation"] is None
    assert not [path for path in (place / step(1)).iterdir() if path.name == "DAMAGED"], "looking changes nothing"
    assert states(capsys, str(place / "best")) == {step(2): "committed, best"}
    assert states(capsys, str(place / step(1))) == {step(1): "damaged"}


def test_a_folder_of_runs_is_listed_and_pruned_by_name(place: str, capsys: Capture) -> None:
    save(f"{place}/first", 1, 2)
    save(f"{place}/second", 1, 3)
    open_folder(place).put("llama_v2-70steps", "0.pt", b"theirs")
    first = [f"first/{step(number)}" for number in (1, 2)]
    second = [f"second/{step(number)}" for number in (1, 3)]
    expected = dict.fromkeys((*first, *second), "committed") | {"llama_v2-70steps": "SMP sample"}
    assert states(capsys, place) == expected
    assert states(capsys, f"{place}/second") == {step(1): "committed", step(3): "committed"}
    assert printed(capsys, "verify", place) == [f"{name}: intact" for name in first[::-1] + second[::-1]]
    assert main(["prune", place, "--keep", "1", "--run_name", "second"]) == 0
    assert (committed(f"{place}/first"), committed(f"{place}/second")) == ([step(2), step(1)], [step(3)])
    assert main(["prune", f"{place}/first", "--keep", "1", "--run_name", "first"]) == 0
    assert committed(f"{place}/first") == [step(2)]


# --- prune


@pytest.mark.parametrize("harmed", ["distcp", "meta.json", "COMMITTED", "DAMAGED"])
@pytest.mark.parametrize("damaged", ["0", "1"])
def test_a_damaged_checkpoint_does_not_count(harmed: str, damaged: str, place: str, capsys: Capture) -> None:
    save(place, 3, 6, 9)
    if harmed == "DAMAGED":
        open_folder(place).put(step(9), "DAMAGED", b"it is damaged")
    else:
        harm(place, step(9), harmed, flipped if harmed == "distcp" else lambda data: data[:-3])
    first, second, *rest = printed(capsys, "prune", place, "--keep", "1", "--damaged", damaged)
    assert (first, rest) == (f"deleted {step(3)}", [])
    action = "deleted" if damaged == "1" else "kept"
    assert second.startswith(f"{action} {step(9)}, which is damaged: ")
    assert committed(place) == ([step(9)] if damaged == "0" else []) + [step(6)]
    assert open_verified(f"{place}/{step(6)}").step == 6


@pytest.mark.parametrize("damaged", ["0", "1"])
def test_nothing_is_deleted_where_nothing_is_intact(damaged: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    save(place, 3, 6)
    for number in (3, 6):
        harm(place, step(number), ".distcp", flipped)
    before = contents(place)
    with pytest.raises(CheckpointError, match="no checkpoint is intact, so nothing is deleted"):
        main(["prune", str(place), "--keep", "1", "--damaged", damaged])
    assert contents(place) == before


@pytest.mark.parametrize("keeps", [True, False])
def test_the_best_checkpoint_is_kept(keeps: bool, tmp_path: Path, capsys: Capture) -> None:
    place = tmp_path / "run"
    saver = manager(place, keep=0)
    for number in (1, 2, 3, 4):
        meta = {"best": {"step": 2, "loss": 1.0}, "arguments": {"keep_best": int(keeps)}, "tokens": number * 10}
        saver.save(number, state(number), meta)
    harm(place, step(4), ".distcp", flipped)  # the newest intact one names the best
    assert main(["prune", str(place), "--keep", "1"]) == 0
    assert committed(place) == [step(4), step(3), *[step(2)] * keeps]


def test_a_running_job_is_let_be(place: str, capsys: Capture) -> None:
    save(place, 3, 6, 9)
    with owning(place) as running:
        attempt = open_folder(place).begin("llama_v2", 12, running.generation)
        open_folder(place).put(attempt, "__0_0.distcp", b"half")
        printed_lines = printed(capsys, "prune", place, "--keep", "1")
        assert printed_lines[:2] == [f"deleted {step(3)}", f"deleted {step(6)}"]
        assert "is in use by a job on" in printed_lines[2]
        assert names(place) == [attempt, step(9)]
    if not place.startswith("s3:"):
        age(Path(place))
    assert printed(capsys, "prune", place, "--keep", "1", "--dry_run", "1") == []
    assert names(place) == [attempt, step(9)]
    assert printed(capsys, "prune", place, "--keep", "1") == [
        f"deleted the files of {attempt}, which an interrupted save or deletion left"
    ]
    assert keys(place) == files(step(9))


REFUSED = {
    "a wrong --run_name": ["runs", "--run_name", "typo"],
    "another run's name": ["runs/first", "--run_name", "second"],
    "an empty --run_name": ["runs", "--run_name", ""],
    "an empty --run_name for a run": ["runs/first", "--run_name", ""],
    "no --run_name": ["runs"],
    "an empty folder": ["empty"],
    "no folder": ["nowhere"],
    "a file": ["file"],
    "no location": [""],
    "a checkpoint": [f"runs/first/{step(3)}"],
    "a run without a checkpoint": ["none"],
    "AWS's folders": ["aws"],
    "AWS's checkpoint": ["aws/llama-3steps"],
    "--keep 0": ["runs/first", "--keep", "0"],
    "--keep -1": ["runs/first", "--keep", "-1"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_prune_refuses(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    for run in ("first", "second"):
        save(tmp_path / "runs" / run, 3, 6)
    with owning(tmp_path / "none"):
        pass
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for number in (3, 6):
        (tmp_path / "aws" / f"llama-{number}steps" / "tp0_ep0").mkdir(parents=True)
        (tmp_path / "aws" / f"llama-{number}steps" / "tp0_ep0" / ".metadata").write_bytes(b"theirs")
    before = contents(tmp_path)
    words = REFUSED[case]
    assert cli.main(["checkpoint", "prune", "--keep", "1", *words, "--damaged", "1"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1, errors
    assert contents(tmp_path) == before


def test_checkpoints_of_other_programs_are_never_touched(tmp_path: Path, capsys: Capture) -> None:
    place = tmp_path / "run"
    save(place, 3, 6)
    theirs = {}
    for name in ("llama_v2-1steps/tp0_ep0/.metadata", "llama_v2-9steps/0.pt", "notes.md", "llama_v2-2stepsnot/x"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(b"theirs")
        theirs[name] = b"theirs"
    age(place, 1e6)
    assert main(["prune", str(place), "--keep", "1", "--damaged", "1"]) == 0
    assert {name: data for name, data in contents(place).items() if data == b"theirs"} == theirs
    assert committed(place) == [step(6)]
