"""Which run a start is and what it goes on from: the name decides, and the same command again goes on."""

from __future__ import annotations

import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.harness import as_torchrun
from tests.system.command import Command, Ranks, warm
from tests.training import TINY, read_checkpoint

pytestmark = [pytest.mark.system, pytest.mark.slow]

AGAIN = {"resume_from_checkpoint": "checkpoints"}
EVALUATION = {"evaluate_only": 1, "use_synthetic_data": 1, "training_dir": None}


def words(**changes: Any) -> list[str]:
    """Return a tiny training with the default folders, without a name."""
    values = {**TINY, "run_name": None, "num_layers": 1, "checkpoint_freq": 2, **changes}
    return ["train", *(f"--{name}={value}" for name, value in values.items() if value is not None)]


def trained(folder: Path, *, code: int = 0, **changes: Any) -> Command:
    """Train to the end, and check the exit code."""
    with warm(folder, *words(**changes)) as command:
        assert command.code() == code, command.err
        return command


def killed(folder: Path, step: int, **changes: Any) -> str:
    """Train until a checkpoint of ``step`` is committed, kill, and return the run's name."""
    with warm(folder, *words(max_steps=10**6, **changes)) as command:
        command.until(lambda: re.search(rf"Saved \S+-{step}steps", command.out), f"a checkpoint of step {step}")
        command.signal(signal.SIGKILL)
        command.code()
        return name_of(command)


def name_of(command: Command) -> str:
    (name,) = re.findall(r"Run (\S+) (?:is new|goes)", command.out)
    return str(name)


def saved(folder: Path) -> dict[str, list[int]]:
    """Return the steps of the committed checkpoints below ``folder``, by the name of their run."""
    steps: dict[str, list[int]] = {}
    for marker in (folder / "checkpoints").rglob("COMMITTED"):
        name = str(marker.parent.parent.relative_to(folder / "checkpoints"))
        steps.setdefault(name, []).append(json.loads(marker.read_text())["step"])
    return {name: sorted(found) for name, found in steps.items()}


def resumed_at(command: Command) -> list[int]:
    return [int(step) for step in re.findall(r"Resumed from \S+ at step (\d+)", command.out)]


def command_in(command: Command, before: str) -> dict[str, str]:
    """Return the flags of the command that a line of the log names after ``before``."""
    line = next(line for line in command.out.splitlines() if before in line)
    printed = shlex.split(line.partition(before)[2].partition(", to keep")[0])
    return {word.lstrip("-"): printed[at + 1] for at, word in enumerate(printed) if re.fullmatch(r"--\w+", word)}


# --- names


def test_two_that_start_together_are_two_runs_each_the_same_on_all_ranks(tmp_path: Path) -> None:
    with (
        Ranks(tmp_path, 2, *words(max_steps=2), launcher=as_torchrun) as one,
        Ranks(tmp_path, 2, *words(max_steps=2), launcher=as_torchrun) as two,
    ):
        assert one.codes() + two.codes() == [0] * 4, one.err + two.err
        names = {name_of(one[0]), name_of(two[0])}
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(names)
    assert len(names) == 2
    assert saved(tmp_path) == {name: [2] for name in names}


def test_a_second_job_of_a_run_is_refused_while_the_first_one_lives(tmp_path: Path) -> None:
    with warm(tmp_path, *words(max_steps=10**6, run_name="one")) as first:
        first.until(lambda: re.search(r"Saved \S+-4steps", first.out), "a checkpoint")
        (line,) = trained(tmp_path, code=4, max_steps=10, run_name="one", **AGAIN).complaints
        assert str(first.pid) in line
        assert "--run_name" in line
        first.signal(signal.SIGTERM)
        assert first.code() == 0, "the first one saves as if nothing had happened"


# --- going on


@pytest.mark.core
def test_the_command_that_is_printed_goes_on_with_the_run(tmp_path: Path) -> None:
    for suffix in ("", "-2"):  # the second one needs its name
        with warm(tmp_path, *words(max_steps=10**6)) as command:
            command.until(lambda: "Saved" in command.out, "a checkpoint")
            command.signal(signal.SIGTERM)
            assert command.code() == 0
        name = name_of(command)
        flags = command_in(command, "to go on: ")
        assert flags["resume_from_checkpoint"] == "checkpoints"
        assert ("run_name" in flags) == (suffix != "")
        assert flags.get("run_name", name) == name
        assert name.endswith(suffix or "k")
        last = max(saved(tmp_path)[name])
        going_on = trained(tmp_path, max_steps=last + 2, **flags)
        assert resumed_at(going_on) == [last]
        assert saved(tmp_path)[name][-1] == last + 2
        if not suffix:
            assert "run the same command again to go on" in going_on.out
    assert len(saved(tmp_path)) == len(list((tmp_path / "runs").iterdir())) == 2


@pytest.mark.core
def test_the_same_command_again_goes_on_from_step_0_to_the_end(tmp_path: Path) -> None:
    command: dict[str, Any] = {"run_name": "one", **AGAIN}
    killed(tmp_path, 2, **command)
    killed(tmp_path, max(saved(tmp_path)["one"]) + 2, **command)
    last = max(saved(tmp_path)["one"])
    assert resumed_at(trained(tmp_path, max_steps=last + 2, **command)) == [last]
    assert saved(tmp_path) == {"one": [last, last + 2]}


# --- the best checkpoint


def test_best_is_a_name_for_the_checkpoint_of_the_lowest_validation_loss(tmp_path: Path) -> None:
    # Weights that do not change: the first validation stays the best.
    still = {"lr": 1e-30, "min_lr": 0, "weight_decay": 0, "validation_freq": 1, "keep_best": 1}
    trained(tmp_path, max_steps=6, run_name="one", **still)
    assert saved(tmp_path) == {"one": [1, 4, 6]}
    best = {"resume_from_checkpoint": "checkpoints/one/best"}
    assert resumed_at(trained(tmp_path, run_name="evaluated", **EVALUATION, **best)) == [1]
    assert resumed_at(trained(tmp_path, max_steps=3, run_name="two", **best)) == [1]
    assert resumed_at(trained(tmp_path, max_steps=3, run_name="one", **still, **best)) == [1]
    assert resumed_at(trained(tmp_path, max_steps=4, run_name="one", **still, **AGAIN)) == [3]
    assert not (tmp_path / "checkpoints/one/best").exists()
    (line,) = trained(tmp_path, code=4, run_name="three", resume_from_checkpoint="checkpoints/two/best").complaints
    assert "--validation_freq" in line


def test_a_run_can_end_with_its_best_model_whose_name_its_last_line_has(tmp_path: Path) -> None:
    rising = {"lr": 0.3, "lr_decay_style": "constant", "validation_freq": 1, "checkpoint_freq": 100, "run_name": "one"}
    ends = {"load_best_model_at_end": 1, "save_final_model": 1, "model_dir": "model"}
    command = trained(tmp_path, max_steps=4, **rising, **ends)
    best, last = saved(tmp_path)["one"][0], saved(tmp_path)["one"][-1]
    assert (best < 4, last) == (True, 4)
    assert f"best: checkpoints/one/best (step {best}, " in command.out.splitlines()[-1]
    written = load_file(tmp_path / "model/model.safetensors")
    kept, newest = (read_checkpoint(tmp_path / f"checkpoints/one/llama_v2-{step}steps") for step in (best, last))
    names = [name for name in kept if name.startswith("model.")]
    assert all(torch.equal(written[name.removeprefix("model.")], kept[name]) for name in names)
    assert not all(torch.equal(newest[name], kept[name]) for name in names)


# --- run folders


def test_a_new_run_in_the_folder_of_another_says_so_with_the_command_that_goes_on(tmp_path: Path) -> None:
    trained(tmp_path, run_name="one", max_steps=4)
    assert not re.search(r"W .*runs/two", trained(tmp_path, run_name="two", max_steps=2).out)
    mixed = trained(tmp_path, run_name="three", run_dir="runs/one", max_steps=2)
    (line,) = [line for line in mixed.out.splitlines() if " W " in line]
    assert "runs/one" in line
    flags = command_in(mixed, "to go on with that run give ")
    going_on = trained(tmp_path, max_steps=6, **flags)
    assert (name_of(going_on), resumed_at(going_on)) == ("one", [4])


def test_a_run_folder_that_is_given_again_names_the_run(tmp_path: Path) -> None:
    name = killed(tmp_path, 4, run_dir="out")
    last = max(saved(tmp_path)[name])
    trained(tmp_path, max_steps=2, lr=1e-4, run_dir="other")
    again = trained(tmp_path, max_steps=2, run_dir="other", **AGAIN)
    assert (name_of(again), resumed_at(again)) == (f"{name}-2", [2])
    going_on = trained(tmp_path, max_steps=last + 2, run_dir="out", **AGAIN)
    assert (name_of(going_on), resumed_at(going_on)) == (name, [last])


@pytest.mark.core
def test_a_start_that_the_data_ends_leaves_no_folder(tmp_path: Path) -> None:
    mistaken = words(use_synthetic_data=None, training_dir="nowhere")
    with Ranks(tmp_path, 2, *mistaken, launcher=as_torchrun) as ranks:
        assert ranks.codes() == [3, 3], ranks.err
        assert all("--training_dir nowhere: " in line for line in ranks.err.splitlines()), ranks.err
        assert "runs/llama_v2" in ranks[0].out
    assert not list(tmp_path.glob("runs/*")) + list(tmp_path.glob("checkpoints/*"))


# --- the model of a run


def test_another_model_of_the_same_shapes_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, max_steps=4, run_name="one")
    again = {"run_name": "one", "max_steps": 6, "rotary_emb_base": 500000, **AGAIN}
    with Ranks(tmp_path, 2, *words(**again), launcher=as_torchrun) as ranks:
        assert ranks.codes() == [4, 4]
        assert "--rotary_emb_base" in ranks.err
        assert "--allow_model_change" in ranks.err
    assert saved(tmp_path) == {"one": [2, 4]}
    allowed = trained(tmp_path, allow_model_change=1, **again)
    assert resumed_at(allowed) == [4]
