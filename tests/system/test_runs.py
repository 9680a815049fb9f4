"""Several runs in one working folder, or with one folder of checkpoints: each keeps and resumes its own."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint_files import tree
from tests.harness import as_torchrun
from tests.system.command import Command, Ranks, warm
from tests.training import TINY

pytestmark = [pytest.mark.system, pytest.mark.slow]


def words(**changes: Any) -> list[str]:
    """Return a tiny training with the default folders."""
    values = {**TINY, "num_layers": 1, "checkpoint_freq": 2, **changes}
    return ["train", *(f"--{name}={value}" for name, value in values.items() if value is not None)]


def trained(folder: Path, expected: int = 0, **changes: Any) -> Command:
    """Train to the end, and check the exit code."""
    with warm(folder, *words(**changes)) as command:
        assert command.code() == expected, command.err
        return command


def killed(folder: Path, step: int, **changes: Any) -> str:
    """Train until a checkpoint of ``step`` is committed, kill, and return the run's name."""
    with warm(folder, *words(max_steps=10**6, **changes)) as command:
        command.until(lambda: re.search(rf"Saved \S+-{step}steps", command.out), f"a checkpoint of step {step}")
        command.signal(signal.SIGKILL)
        command.code()
        found = re.search(r"Run (\S+) \([0-9a-f]{8}\)", command.out)
        assert found, command.out
        return found[1]


def held(folder: Path) -> dict[str, list[int]]:
    """Return the steps of the committed checkpoints below ``folder``, by the name of their run."""
    found: dict[str, list[int]] = {}
    for marker in folder.rglob("[!.]*/COMMITTED"):
        meta = json.loads((tree(marker.parent) / "meta.json").read_text())
        found.setdefault(meta["run"]["name"], []).append(meta["step"])
    return {name: sorted(steps) for name, steps in found.items()}


def resumed_at(command: Command) -> list[int]:
    return [int(step) for step in re.findall(r"Resumed from \S+ at step (\d+)", command.out)]


@pytest.mark.parametrize("shared", [False, True], ids=["default folders", "one folder"])
def test_two_runs_keep_their_own_and_resume_their_own(tmp_path: Path, shared: bool) -> None:
    where = {"checkpoint_dir": "all"} if shared else {}

    def resume(name: str) -> dict[str, Any]:
        return {"run_name": name, "resume_from_checkpoint": "all" if shared else f"checkpoints/{name}"}

    trained(tmp_path, max_steps=4, run_name="first", **where)
    trained(tmp_path, max_steps=8, run_name="second", seed=99, **where)
    assert held(tmp_path) == {"first": [2, 4], "second": [6, 8]}
    first = trained(tmp_path, max_steps=6, **resume("first"), **where)
    assert resumed_at(first) == [4]
    assert held(tmp_path) == {"first": [4, 6], "second": [6, 8]}
    killed(tmp_path, 12, seed=99, **resume("second"), **where)
    killed(tmp_path, 10, **resume("first"), **where)
    again = trained(tmp_path, max_steps=12, **resume("first"), **where)
    steps = held(tmp_path)
    assert max(steps["first"]) == 12
    assert resumed_at(again)[0] >= 10
    assert max(steps["second"]) >= 12
    runs = {name: json.loads((tmp_path / "runs" / name / "run.json").read_text())["run"] for name in steps}
    assert {name: run["name"] for name, run in runs.items()} == {"first": "first", "second": "second"}


@pytest.mark.parametrize("shared", [False, True], ids=["default folders", "one folder"])
def test_runs_without_a_name_get_one_of_their_own(tmp_path: Path, shared: bool) -> None:
    where = {"checkpoint_dir": "all"} if shared else {}
    names = [killed(tmp_path, 4, **where), killed(tmp_path, 2, lr=1e-4, **where)]
    assert names[0] != names[1]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(names)
    before = held(tmp_path)
    for name, other in (names, names[::-1]):
        place = "all" if shared else f"checkpoints/{name}"
        command = trained(
            tmp_path, max_steps=max(before[name]) + 2, run_name=name, resume_from_checkpoint=place, **where
        )
        assert resumed_at(command) == [max(before[name])]
        assert held(tmp_path)[other] == before[other]
        before = held(tmp_path)


@pytest.mark.core
def test_the_command_that_is_printed_goes_on_with_the_run(tmp_path: Path) -> None:
    with warm(tmp_path, *words(max_steps=10**6)) as command:
        command.until(lambda: "Saved" in command.out, "a checkpoint")
        command.signal(signal.SIGTERM)
        assert command.code() == 0
        line = next(line for line in command.out.splitlines() if "to go on: " in line)
    printed = shlex.split(line.partition("to go on: ")[2])
    name, folder = printed[printed.index("--run_name") + 1], printed[printed.index("--resume_from_checkpoint") + 1]
    last = max(held(tmp_path)[name])
    going_on = trained(tmp_path, max_steps=last + 2, run_name=name, resume_from_checkpoint=folder)
    assert resumed_at(going_on) == [last]
    assert held(tmp_path).keys() == {name}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [name]


def test_a_new_run_in_the_folder_of_another_says_so_with_the_command_that_goes_on(tmp_path: Path) -> None:
    trained(tmp_path, run_name="one", checkpoint_dir="elsewhere", max_steps=4)
    assert not re.search(r"W .*runs/two", trained(tmp_path, run_name="two", max_steps=2).out)
    line = next(line for line in trained(tmp_path, run_name="one", max_steps=2).out.splitlines() if " W " in line)
    printed = shlex.split(line.partition("of that one: ")[2])
    places = {flag: printed[printed.index(f"--{flag}") + 1] for flag in ("resume_from_checkpoint", "checkpoint_dir")}
    going_on = trained(tmp_path, run_name="one", max_steps=6, **places)
    assert resumed_at(going_on) == [4]
    assert not re.search(r"W .*runs/one", going_on.out), "it is the same run, though another was started in its folder"


@pytest.mark.core
def test_a_start_that_the_data_ends_leaves_no_folder(tmp_path: Path) -> None:
    mistaken = words(use_synthetic_data=None, training_dir="nowhere")
    with Ranks(tmp_path, 2, *mistaken, launcher=as_torchrun) as ranks:
        assert ranks.codes() == [3, 3], ranks.err
        assert "runs/llama_v2" in ranks[0].out
    assert not list(tmp_path.glob("runs/*")) + list(tmp_path.glob("checkpoints/*"))


def test_a_fresh_start_is_not_overtaken_by_what_it_left_behind(tmp_path: Path) -> None:
    where = {"checkpoint_dir": "all", "run_name": "one"}
    trained(tmp_path, max_steps=60, checkpoint_freq=30, **where)
    killed(tmp_path, 12, seed=5, **where)
    newest = max(step for step in held(tmp_path)["one"] if step < 30)
    command = trained(tmp_path, max_steps=newest + 2, seed=5, resume_from_checkpoint="all", **where)
    assert resumed_at(command) == [newest]
    assert held(tmp_path)["one"][-2:] == [30, 60]


def test_without_a_name_the_run_that_saved_last_goes_on(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=8, checkpoint_dir="all", run_name="long")
    killed(tmp_path, 2, checkpoint_dir="all", run_name="short", run_dir="runs/elsewhere")
    last = max(held(tmp_path)["short"])
    command = trained(tmp_path, max_steps=last + 2, checkpoint_dir="all", resume_from_checkpoint="all")
    assert resumed_at(command) == [last]
    assert held(tmp_path) == {"long": [6, 8], "short": [last, last + 2]}


def test_the_folder_of_all_runs_can_be_named(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=4, run_name="first")
    trained(tmp_path, max_steps=2, run_name="second")
    (tmp_path / "checkpoints" / "first" / "llama_v2-2steps").rename(tmp_path / "checkpoints" / "llama_v2-2steps")
    last = trained(tmp_path, max_steps=4, resume_from_checkpoint="checkpoints")
    first = trained(tmp_path, max_steps=6, resume_from_checkpoint="checkpoints", run_name="first")
    assert (resumed_at(last), resumed_at(first)) == ([2], [4])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "second"]


def test_another_model_type_in_the_folder_is_no_hindrance(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "num_key_value_heads": None}
    trained(tmp_path, max_steps=4, checkpoint_dir="all", run_name="llama")
    trained(tmp_path, max_steps=10, checkpoint_dir="all", run_name="gpt2", **gpt2)
    command = trained(tmp_path, max_steps=6, checkpoint_dir="all", resume_from_checkpoint="all")
    assert resumed_at(command) == [4]
    assert held(tmp_path) == {"llama": [4, 6], "gpt2": [8, 10]}


def test_another_name_begins_a_new_run_from_the_old_ones_checkpoint(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=4, run_name="old")
    command = trained(tmp_path, max_steps=6, run_name="new", resume_from_checkpoint="checkpoints/old")
    assert resumed_at(command) == [4]
    assert held(tmp_path) == {"old": [2, 4], "new": [6]}
    again = trained(tmp_path, max_steps=8, run_name="new", resume_from_checkpoint="checkpoints/old")
    assert resumed_at(again) == [6]
    assert held(tmp_path) == {"old": [2, 4], "new": [6, 8]}


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/first", "checkpoints/first/llama_v2-4steps"])
def test_an_evaluation_is_no_start_of_the_run_that_it_evaluates(tmp_path: Path, place: str) -> None:
    trained(tmp_path, max_steps=4, run_name="first")
    files = [path for path in (tmp_path / "runs" / "first").rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    command = trained(tmp_path, evaluate_only=1, use_synthetic_data=1, training_dir=None, resume_from_checkpoint=place)
    assert resumed_at(command) == [4]
    assert {path: path.read_bytes() for path in files} == before
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert held(tmp_path) == {"first": [2, 4]}


def test_another_runs_damaged_checkpoint_is_passed_over_and_left_as_it_is(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=4, run_name="first")
    folder = tmp_path / "checkpoints" / "first"
    shard = tree(folder / "llama_v2-4steps") / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    begun = trained(tmp_path, max_steps=6, run_name="second", resume_from_checkpoint="checkpoints/first")
    assert resumed_at(begun) == [2]
    evaluation = {"evaluate_only": 1, "use_synthetic_data": 1, "training_dir": None}
    evaluated = trained(tmp_path, **evaluation, resume_from_checkpoint=folder)
    assert resumed_at(evaluated) == [2]
    assert sorted(path.name for path in folder.iterdir()) == ["llama_v2-2steps", "llama_v2-4steps"]
    assert resumed_at(trained(tmp_path, max_steps=4, run_name="first", resume_from_checkpoint=folder)) == [2]
    assert (folder / "llama_v2-4steps" / "COMMITTED.damaged").is_file()


def test_the_start_says_what_the_folder_holds(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=4, checkpoint_dir="all", run_name="first")
    (tmp_path / "all" / "llama_v2-6steps" / "tp0_ep0").mkdir(parents=True)
    command = trained(tmp_path, max_steps=6, checkpoint_dir="all", run_name="second", checkpoint_freq=6)
    (line,) = [line for line in command.out.splitlines() if "Checkpoints: " in line]
    for said in ("all holds", "first", "2, 4", "llama_v2-6steps", "second", "step 0"):
        assert said in line
    assert not list((tmp_path / "all" / "llama_v2-6steps" / "tp0_ep0").iterdir())
    assert held(tmp_path) == {"first": [2, 4], "second": [6]}


def test_two_that_start_together_are_two_runs_each_the_same_on_all_ranks(tmp_path: Path) -> None:
    with (
        Ranks(tmp_path, 2, *words(max_steps=2), launcher=as_torchrun) as one,
        Ranks(tmp_path, 2, *words(max_steps=2), launcher=as_torchrun) as two,
    ):
        assert one.codes() + two.codes() == [0] * 4, one.err + two.err
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 2
    assert held(tmp_path) == {name: [2] for name in names}


CHANGED = {
    "num_heads": {"num_heads": 8, "num_key_value_heads": 4},
    "rotary_emb_base": {"rotary_emb_base": 500000},
    "model_type": {"model_type": "mistral"},
}


@pytest.mark.parametrize("flag", CHANGED)
def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path, flag: str) -> None:
    trained(tmp_path, max_steps=4, run_name="one")
    again = {"run_name": "one", "resume_from_checkpoint": "checkpoints/one", "max_steps": 6}
    with Ranks(tmp_path, 2, *words(**again | CHANGED[flag]), launcher=as_torchrun) as ranks:
        assert ranks.codes() == [4, 4]
        assert f"--{flag}" in ranks.err
        assert "--allow_model_change" in ranks.err
    assert held(tmp_path) == {"one": [2, 4]}
    allowed = trained(tmp_path, allow_model_change=1, **again | CHANGED[flag])
    assert resumed_at(allowed) == [4]


def test_dropout_and_length_are_no_other_model(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=2, run_name="one")
    again = {"run_name": "one", "resume_from_checkpoint": "checkpoints/one", "max_steps": 4}
    shorter = {"attn_pdrop": 0.1, "max_context_width": 8, "allow_data_change": 1}
    assert resumed_at(trained(tmp_path, **shorter, **again)) == [2]
