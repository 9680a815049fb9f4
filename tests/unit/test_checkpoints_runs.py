"""Several runs in one folder of checkpoints, in a folder and in S3: each replaces, deletes and sweeps its own alone."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
from smp_train.checkpoints.commit import open_folder
from smp_train.checkpoints.runs import committed, origin

from smp_train.arguments import parse, validate
from smp_train.checkpoints import CheckpointManager, RunId, find
from smp_train.checkpoints.cli import main
from smp_train.checkpoints.owner import Owner
from smp_train.errors import CheckpointError, ConfigError
from smp_train.naming import Start
from smp_train.resume import look_for_checkpoint
from smp_train.storage import is_s3
from tests.checkpoint_files import Stop, manager, state, stop_at

FIRST, SECOND = RunId("first", "11111111"), RunId("second", "22222222")


def saver(place: str, run: RunId, keep: int = 2, model_type: str = "m", **more) -> CheckpointManager:
    return manager(place, keep=keep, model_type=model_type, run=run, **more)


def save(place: str, run: RunId, *steps: int, **more) -> None:
    writes = saver(place, run, **more)
    for step in steps:
        writes.save(step, state(step), {"by": run.name})


def steps(place: str, run: RunId) -> list[int]:
    return [entry.step for entry in committed(open_folder(place), run)]


def goes_on_from(place: str, name: str = "", own: bool = True, model_type: str = "m") -> RunId | None:
    found = origin([place], name=name, own=[place] if own else [], near=[], model_type=lambda: model_type)
    return None if found is None else found.run


def test_each_keeps_its_newest_whatever_the_other_does(place):
    one, two = saver(place, FIRST), saver(place, SECOND)
    for step in range(1, 5):
        one.save(step, state(step), {"by": "first"})
        two.save(2 * step, state(10 * step), {"by": "second"})
    assert steps(place, FIRST) == [4, 3]
    assert steps(place, SECOND) == [8, 6]
    assert find(place, run=RunId.fresh("second")) is None, "another life of that name"
    assert find(place).meta["by"] == "second"
    for run, step, value in ((FIRST, 4, 4), (SECOND, 8, 40)):
        found = find(place, run=run)
        assert (found.step, found.meta["by"], found.meta["run"]) == (step, run.name, run.to_json())
        target = state(-1)
        found.load(target)
        assert target["model"]["w"][0, 0] == value


def test_the_same_step_of_another_run_is_not_replaced(place):
    save(place, FIRST, 3)
    save(place, SECOND, 3, 3)
    names = {entry.name: entry.run for entry in committed(open_folder(place))}
    assert names == {"m-3steps": FIRST, f"m-3steps-{SECOND.id}": SECOND}
    assert find(place, run=FIRST).meta["by"] == "first"
    assert find(f"{place}/m-3steps-{SECOND.id}").meta["by"] == "second"
    assert find(place, run=FIRST).verify() == find(place, run=SECOND).verify() == []


@pytest.mark.parametrize("stage", ["write", "publish"])
def test_two_that_save_a_step_at_the_same_time_both_have_it(place, stage):
    """The second one begins and ends its save while the first one is in the midst of its own."""

    def meanwhile(reached: str) -> None:
        if reached == stage:
            save(place, SECOND, 4)

    saver(place, FIRST, on_stage=meanwhile).save(4, state(), {"by": "first"})
    for run in (FIRST, SECOND):
        found = find(place, run=run)
        assert (found.step, found.meta["by"], found.verify()) == (4, run.name, [])


@pytest.mark.parametrize("readable", [True, False])
def test_a_save_goes_on_while_what_was_set_aside_of_its_step_is_pruned(place, readable):
    save(place, FIRST, 3, 4)
    there = open_folder(place, FIRST)
    if not readable:
        there.put("m-4steps", "COMMITTED", b"{")
    there.set_aside("m-4steps")

    def meanwhile(stage: str) -> None:
        if stage == "publish":
            assert main(["prune", place, "--keep", "9", "--damaged", "1"]) == 0

    job = saver(place, FIRST, on_stage=meanwhile)
    job.lock()
    job.save(4, state(), {"by": "first"})
    job.close()
    found = find(place, run=FIRST)
    assert (found.step, found.verify(), there.aside()) == (4, [], [])
    if readable:
        assert {file.partition("/")[0] for file in there.sizes("m-4steps")} == {"COMMITTED", found.committed.root}


def test_what_counts_stays_where_setting_it_aside_was_cut_short(place):
    """In S3 a name is changed by a copy and a deletion; between them both are there."""
    save(place, FIRST, 3, 4)
    there = open_folder(place, FIRST)
    there.put("m-4steps", "COMMITTED.abandoned", there.read("m-4steps", "COMMITTED"))
    assert main(["prune", place, "--keep", "9", "--abandoned", "1"]) == 0
    found = find(place, run=FIRST)
    assert (found.step, found.verify(), there.aside("abandoned")) == (4, [], [])


def test_another_run_that_begins_the_step_outlives_its_deletion(place):
    """It claims the name for a moment, to see whether it is free."""
    save(place, FIRST, 4)
    there, claim = open_folder(place, FIRST), f"0123abcd-{SECOND.key}/.run"
    there.storage.put(f"m-4steps/{claim}", b"theirs")
    there.delete("m-4steps")
    assert list(there.sizes("m-4steps")) == [claim]


def test_what_another_program_wrote_stays(place, tmp_path):
    """AWS's sample names its folders alike, and its trees have no COMMITTED."""
    storage = open_folder(place)
    storage.put("m-2steps/tp0_ep0", "__0_0.distcp", b"theirs")
    save(place, FIRST, 1, 2, 3, keep=1)
    save(place, FIRST, 2, keep=9)
    assert storage.read("m-2steps/tp0_ep0", "__0_0.distcp") == b"theirs"
    assert list(storage.sizes("m-2steps")) == ["tp0_ep0/__0_0.distcp"]
    assert {entry.name for entry in committed(storage)} == {"m-3steps", f"m-2steps-{FIRST.id}"}


@pytest.mark.parametrize("stage", ["write", "publish"])
def test_only_leftovers_of_the_run_itself_are_swept(place, stage):
    def left(run: RunId) -> bool:
        return any(f"-{run.key}" in name for name in open_folder(place).storage.files())

    for run in (FIRST, SECOND):
        killed = saver(place, run, on_stage=stop_at(stage))
        killed._targets[0].folder.delete = lambda name: None  # as if it had been killed
        with pytest.raises((Stop, CheckpointError)):
            killed.save(5 if run == FIRST else 6, state(), {})
    assert left(FIRST)
    assert left(SECOND)
    again = saver(place, RunId.fresh("first"))
    again.lock()
    again.save(1, state(), {})
    assert not any("m-5steps" in name for name in open_folder(place).names())
    assert left(SECOND)
    again.close()


def test_two_jobs_of_one_run_are_refused_and_of_two_runs_not(place):
    first, second = (Owner(open_folder(place, run)) for run in (FIRST, SECOND))
    first.acquire()
    second.acquire()
    with pytest.raises(CheckpointError, match="first "):
        Owner(open_folder(place, RunId.fresh("first"))).acquire()
    first.release()
    Owner(open_folder(place, RunId.fresh("first"))).acquire()
    second.release()


@pytest.mark.core
def test_whose_checkpoints_a_start_goes_on_from(place):
    save(place, FIRST, 58, 60)
    again = RunId.fresh("first")
    save(place, again, 12)
    save(place, SECOND, 4)
    assert goes_on_from(place, "first") == again, "a fresh start is not overtaken by what it left behind"
    assert goes_on_from(place, "second") == SECOND
    assert goes_on_from(place) == SECOND, "it committed last"
    assert goes_on_from(place, "third") is None
    assert goes_on_from(place, "third", own=False) == SECOND
    assert goes_on_from(f"{place}/m-58steps", "third") == FIRST
    save(place, FIRST, 61)
    assert goes_on_from(place, "first") == goes_on_from(place) == FIRST
    save(place, RunId.fresh("neox"), 99, model_type="gpt_neox")
    assert goes_on_from(place) == FIRST, "of the model type that is trained"


def test_a_run_that_finds_others_alone_says_whose(place, caplog):
    def warned(name: str) -> list[str]:
        caplog.clear()
        args = parse([f"--resume_from_checkpoint={place}", f"--checkpoint_dir={place}"]).args
        config = SimpleNamespace(to_dict=dict)
        assert look_for_checkpoint(args, SimpleNamespace(config=config), Start(RunId.fresh(name), None), {}) is None
        return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

    if not is_s3(place):
        os.makedirs(place)
    assert warned("other") == []
    save(place, FIRST, 3, 4)
    save(place, SECOND, 5)
    (line,) = warned("other")
    assert all(word in line for word in ("'other'", place, "'first', 'second'", "step 0", "--run_name"))


def test_a_run_with_damaged_checkpoints_only_does_not_begin_afresh(place):
    save(place, FIRST, 58, 60)
    storage = open_folder(place)
    for entry in committed(storage):
        storage.set_aside(entry.name)
    assert goes_on_from(place, "first") == goes_on_from(place) == FIRST
    with pytest.raises(CheckpointError, match="only damaged"):
        find(place, run=FIRST)
    assert goes_on_from(place, "second") is None
    save(place, SECOND, 4)
    assert goes_on_from(place, "first") == FIRST
    assert goes_on_from(place) == goes_on_from(place, "second") == SECOND


def test_a_run_that_began_elsewhere_goes_on_from_its_own(tmp_path):
    there, here = str(tmp_path / "there"), str(tmp_path / "here")

    def goes_on(name: str) -> tuple[str, RunId]:
        found = origin([there], name=name, own=[here], near=[], model_type=str)
        return found.place, found.run

    save(there, FIRST, 60)
    assert goes_on("second") == (there, FIRST), "a new run begins there"
    save(here, SECOND, 62)
    assert goes_on("second") == (here, SECOND)
    assert goes_on("first") == (there, FIRST)
    save(here, FIRST, 61)
    assert goes_on("first") == (here, FIRST)
    save(there, FIRST, 63)
    assert goes_on("first") == (there, FIRST)


def test_a_clock_that_went_back_changes_nothing(place, monkeypatch):
    save(place, FIRST, 60)
    monkeypatch.setattr("time.time", lambda: 1e9)
    again = RunId.fresh("first")
    save(place, again, 12)
    assert goes_on_from(place, "first") == again


def test_checkpoints_of_no_known_run_are_resumed_and_never_deleted(place):
    save(place, RunId(), 10, 20)
    assert goes_on_from(place) == RunId()
    assert goes_on_from(place, "first") == RunId()
    save(place, FIRST, 21, 22, 20, 23, keep=1)
    assert steps(place, RunId()) == [20, 10]
    assert steps(place, FIRST) == [23]
    assert goes_on_from(place) == FIRST


def test_what_a_version_without_runs_wrote_goes_by_the_name_in_its_meta(place):
    for step, name in ((5, "old"), (6, "../old")):
        saver(place, RunId(), keep=9).save(step, state(), {"arguments": {"run_name": name}})
    assert goes_on_from(place, "old") == RunId("old")
    assert find(place, run=RunId("old")).step == 5
    assert goes_on_from(place, "first") == RunId(), "a name that leads out of the folder is none"


@pytest.mark.parametrize("name", ["../up", "/abs", "a/../../b", "line\nbreak"])
def test_a_name_that_leads_elsewhere_is_not_believed(name):
    with pytest.raises(ValueError, match="does not identify a run"):
        RunId.parse({"name": name, "id": "11111111"})
    with pytest.raises(ConfigError, match="--run_name"):
        validate(parse(["--use_synthetic_data=1", f"--run_name={name}"], {}).args, 1)


def test_going_back_sets_only_the_runs_own_aside(place):
    save(place, FIRST, 10, 20, keep=9)
    save(place, SECOND, 30)
    back = saver(place, FIRST, keep=9)
    back.go_back(find(f"{place}/m-10steps"))
    back.save(11, state(), {})
    assert steps(place, FIRST) == [11, 10]
    assert steps(place, SECOND) == [30]


def test_the_command_line_knows_the_runs(place, capsys):
    save(place, FIRST, 1, 2, keep=9)
    save(place, SECOND, 2, 3, 4, keep=9)
    assert main(["ls", place]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "first" in listed["m-1steps"]
    assert "second" in listed[f"m-2steps-{SECOND.id}"]
    with pytest.raises(ConfigError, match=r"first \(11111111\), second \(22222222\)"):
        main(["prune", place, "--keep", "1"])
    main(["prune", place, "--keep", "1", "--run_name", "second"])
    assert (steps(place, FIRST), steps(place, SECOND)) == ([2, 1], [4])
    main(["prune", place, "--keep", "1", "--run_name", FIRST.id])
    assert (steps(place, FIRST), steps(place, SECOND)) == ([2], [4])
    assert main(["verify", place]) == 0
    capsys.readouterr()
    assert main(["show", place]) == 0
    assert "m-4steps" in capsys.readouterr().out


def test_another_runs_checkpoint_that_goes_while_it_is_looked_at_is_passed_over(tmp_path, monkeypatch):
    place = str(tmp_path)
    save(place, FIRST, 1)
    save(place, SECOND, 2)
    storage = open_folder(place)
    read = storage.read

    def late(name: str, file: str) -> bytes:
        if name == "m-1steps":
            open_folder(place, FIRST).delete(name)
        return read(name, file)

    monkeypatch.setattr(storage, "read", late)
    assert [entry.run for entry in committed(storage)] == [SECOND]
    assert not os.path.exists(tmp_path / "m-1steps")
