"""The rule of resuming: what a start is called, and which checkpoint it goes on from. One process; no training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from smp_train.arguments import parse, validate
from smp_train.checkpoints import owner as owner_module
from smp_train.checkpoints.folder import open_folder
from smp_train.checkpoints.owner import claims_in, owner_of
from smp_train.distributed import detect
from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.resolve import resolve
from smp_train.run.resume import changed_settings, find_checkpoint, model_to_resume
from smp_train.run.start import Start, choose_start
from smp_train.run.start_log import how_to_resume, nothing_to_resume_line, start_line
from tests.checkpoint_files import committed, contents, harm, manager, names, state
from tests.training import TINY

MODEL = {name: value for name, value in TINY.items() if name != "run_name"}
OURS = "llama_v2-31.9k"
"""The name of a run of that model: its type and parameters."""
BARE = dict.fromkeys(name for name in MODEL if name not in ("use_synthetic_data", "max_steps"))
"""No flags of the model."""
RANKS = detect()
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x"}


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def parent(request: Any, tmp_path: Path, monkeypatch: Any) -> str:
    """Return what --checkpoint_dir names: the folder of all runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(owner_module, "STALE_SECONDS", 1.0)
    if request.param == "folder":
        return str(tmp_path / "checkpoints")
    return f"{request.getfixturevalue('s3_place')}/checkpoints"


class Began(NamedTuple):
    """What a start goes on from: its name, the step and the path below the parent, and whether these are its own."""

    name: str
    step: int = 0
    checkpoint: str = ""
    own: bool = True


STARTS: list[Start] = []


def settled(parent: str, environment: dict[str, str] | None = None, **changes: Any) -> tuple[Any, Start]:
    """Return the settings and the start of a run of the tiny model; its process lives on until `ended`."""
    values = {**MODEL, "checkpoint_dir": parent, **changes}
    words = [f"--{name}={value}" for name, value in values.items() if value is not None and name != "checkpoint_dir"]
    folders = [values["checkpoint_dir"]] if isinstance(values["checkpoint_dir"], str) else values["checkpoint_dir"]
    words += ["--checkpoint_dir", *folders, "--checkpoint_freq", *["1"] * len(folders)]
    words += ["--num_kept_checkpoints", *["9"] * len(folders)]
    resolved = parse(words, {})
    validate(resolved.args, 1)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in (environment or {}).items():
            patched.setenv(name, value)
        resolved, start = choose_start(resolved, RANKS)
    STARTS.append(start)
    return resolved, start


def start(parent: str, environment: dict[str, str] | None = None, **changes: Any) -> Start:
    return settled(parent, environment, **changes)[1]


def began(parent: str, environment: dict[str, str] | None = None, *, saves: int = 0, **changes: Any) -> Began:
    """Start a run, save the step ``saves``, if that is given, end, and return what it went on from."""
    resolved, begun = settled(parent, environment, **changes)
    try:
        found, begun = find_checkpoint(resolved.args, spec(resolved.args, begun), begun, {})
        if saves:
            save(parent, begun, saves)
    finally:
        ended(begun)
    if found is None:
        return Began(begun.name)
    return Began(begun.name, found.step, found.path.removeprefix(f"{parent}/"), begun.is_own)


def save(parent: str, begun: Start, *steps: int) -> None:
    """Save steps of a start."""
    saver = manager(f"{parent}/{begun.name}", 1, 9, owner=begun.owner, generation=begun.generation)
    for step in steps:
        saver.save(step, state(step), {"tokens": step * 10, "model_config": config()})


def spec(args: Any, begun: Start) -> Any:
    """Return the model of a start."""
    return model_to_resume(args, begun) or resolve(args)


def config() -> dict[str, Any]:
    """Return the configuration of the tiny model."""
    return dict(resolve(parse([f"--{name}={value}" for name, value in MODEL.items()], {}).args).config.to_dict())


def ended(begun: Start) -> None:
    """End a start in order."""
    if begun.owner is not None:
        begun.owner.release()


@contextlib.contextmanager
def killed() -> Iterator[None]:
    """Let the starts in the body, once it has ended, have died on another machine a moment ago."""
    before = len(STARTS)
    yield
    for begun in STARTS[before:]:
        owner = begun.owner
        assert owner is not None
        owner._ended.set()
        for folder in owner.folders:
            claim = owner_of([folder])
            assert claim is not None
            elsewhere = replace(claim, process="elsewhere 99 1", job=replace(claim.job, process="elsewhere 99 1"))
            folder.storage.put(claim.file, elsewhere.to_bytes())


def run(parent: str, name: str, *steps: int) -> None:
    """Let there be a run of that name, which saved these steps and ended."""
    begun = start(parent, run_name=name)
    save(parent, begun, *steps)
    ended(begun)


# --- the name, without the flag


def test_a_run_is_called_by_its_model_and_begins_at_step_0(parent):
    resolved, begun = settled(parent)
    assert (begun.name, begun.continues, begun.newest, begun.generation) == (OURS, False, None, 1)
    assert (resolved.args.run_name, resolved.args.run_dir) == (OURS, f"runs/{OURS}")
    assert start_line(resolved.args, begun, None).startswith(f"Run {OURS} is new: it begins at step 0")
    assert f"--resume_from_checkpoint {parent} goes on with it" in start_line(resolved.args, begun, None)
    again = how_to_resume(resolved, begun, RANKS)
    assert f"--resume_from_checkpoint {parent}" in again
    assert "--run_name" not in again
    ended(begun)


def test_a_name_of_ours_that_is_taken_becomes_another_one(parent):
    assert began(parent, saves=4) == Began(OURS)
    resolved, second = settled(parent)
    assert (second.name, second.continues, second.taken_name) == (f"{OURS}-2", False, OURS)
    assert f"Run {OURS}-2 is new" in start_line(resolved.args, second, None)
    assert f"--resume_from_checkpoint {parent} goes on with that run" in start_line(resolved.args, second, None)
    again = how_to_resume(resolved, second, RANKS)
    assert f"--resume_from_checkpoint {parent}" in again
    assert f"--run_name {OURS}-2" in again, "without it the same command goes on with the first run"
    save(parent, second, 1)
    ended(second)
    assert began(parent, saves=1) == Began(f"{OURS}-3")
    assert committed(f"{parent}/{OURS}") == ["llama_v2-4steps"], "the first one's are as they were"


def test_a_name_is_taken_by_a_checkpoint_in_any_tier(parent, tmp_path):
    near, folders = tmp_path / "near", [f"local:{tmp_path}/near", parent]
    run(parent, OURS)  # claimed, but never saved
    assert began(parent, checkpoint_dir=folders) == Began(OURS)
    manager(near / OURS / "rank00000", keep=9).save(3, state(3), {"tokens": 30})
    assert began(parent, checkpoint_dir=folders) == Began(f"{OURS}-2")
    two = [parent, f"{parent}-rare"]
    assert began(parent, checkpoint_dir=two) == Began(OURS)
    manager(f"{parent}-rare/{OURS}", keep=9).save(3, state(3), {"tokens": 30})
    assert began(parent, checkpoint_dir=two) == Began(f"{OURS}-2")


def test_a_given_name_that_is_taken_is_refused_with_both_remedies(parent):
    run(parent, "mine", 3, 6)
    before = contents(f"{parent}/mine")
    with pytest.raises(ConfigError) as refused:
        start(parent, run_name="mine")
    message = str(refused.value)
    assert refused.value.exit_code == 2
    assert "\n" not in message
    remedies = f"add --resume_from_checkpoint {parent}", "another --run_name"
    assert all(part in message for part in ("--run_name mine", "step 6", f"{parent}/mine", *remedies))
    assert contents(f"{parent}/mine") == before
    assert claims_in(open_folder(f"{parent}/mine")) == [1]


@pytest.mark.parametrize("flag", ["hf_pretrained_model_name_or_dir", "pretrained_checkpoint_file"])
@pytest.mark.parametrize("name", ["best", "llama_v2-2steps", ""])
def test_a_checkpoint_to_finetune_is_named_as_anywhere(parent, flag, name):
    begun = start(parent, run_name="mine", validation_freq=1)
    saver = manager(f"{parent}/mine", 1, 9, owner=begun.owner, generation=begun.generation)
    for step in (2, 4):
        saver.save(step, state(step), {"tokens": 1, "model_config": config(), "best": {"step": 2, "loss": 1.0}})
    ended(begun)
    location = f"{parent}/mine/{name}".rstrip("/")
    flags = {flag: location, "finetune": 1 if flag == "pretrained_checkpoint_file" else None}
    resolved, tuned = settled(parent, run_name="tuned", **BARE, **flags)
    ended(tuned)
    args = resolved.args
    assert args.pretrained_checkpoint_file == f"{parent}/mine/llama_v2-{2 if name else 4}steps"
    assert (args.finetune, args.hf_pretrained_model_name_or_dir) == (True, None)
    assert resolve(args).pretrained == args.pretrained_checkpoint_file
    if name != "llama_v2-2steps":
        with pytest.raises(ConfigError, match="adapters belong to one"):
            start(parent, run_name="adapted", lora_rank=2, **BARE, **flags)


def test_a_given_name_that_was_only_reserved_is_free(parent):
    run(parent, "mine")
    assert began(parent, run_name="mine") == Began("mine")
    first = start(parent, run_name="mine")
    with pytest.raises(CheckpointError, match=r"mine is in use by a job on .*--break_checkpoint_lock 1"):
        start(parent, run_name="mine")
    forced = start(parent, run_name="mine", break_checkpoint_lock=1)
    assert forced.generation == first.generation + 1
    ended(forced)


# --- with the flag


def test_the_same_command_with_the_flag_starts_and_goes_on(parent):
    command: dict[str, Any] = {"resume_from_checkpoint": parent}
    assert began(parent, **command) == Began(OURS)
    assert began(parent, **command, saves=4) == Began(OURS)
    assert began(parent, **command, saves=6) == Began(OURS, 4, f"{OURS}/llama_v2-4steps")
    resolved, begun = settled(parent, **command)
    assert begun.newest is not None
    assert (begun.newest.step, begun.generation) == (6, 4)
    assert how_to_resume(resolved, begun, RANKS) == "run the same command again to go on"
    ended(begun)


def test_a_folder_of_other_runs_names_them_and_the_run_begins_at_step_0(parent):
    run(parent, "one", 3)
    run(parent, "two", 5)
    resolved, begun = settled(parent, run_name="three", resume_from_checkpoint=parent)
    assert (begun.newest, begun.other_runs) == (None, ("one", "two"))
    line = nothing_to_resume_line(resolved.args, begun)
    assert all(part in line for part in ("Run three", parent, "step 0", "one, two", "--run_name"))
    ended(begun)
    assert began(parent, run_name="three", resume_from_checkpoint=parent, saves=1) == Began("three", own=True)
    assert began(parent, run_name="two", resume_from_checkpoint=parent) == Began("two", 5, "two/llama_v2-5steps")


@pytest.mark.parametrize("kind", ["run", "runs", "checkpoint"])
def test_a_run_begins_from_another_one_and_goes_on_from_its_own(parent, kind):
    """FOLDER is another run's folder, a folder elsewhere with a run of this name, or another run's checkpoint."""
    other = f"{parent}-old/other"
    source = {"run": other, "runs": f"{parent}-old", "checkpoint": f"{other}/llama_v2-60steps"}
    run(f"{parent}-old", "mine" if kind == "runs" else "other", 60, 62)
    command: dict[str, Any] = {"run_name": "mine", "resume_from_checkpoint": source[kind]}
    step, path = (60 if kind == "checkpoint" else 62), f"{parent}-old/{'mine' if kind == 'runs' else 'other'}"
    before = contents(path)
    from_other = Began("mine", step, f"{path}/llama_v2-{step}steps", own=False)
    assert began(parent, **command) == from_other
    assert began(parent, **command) == from_other, "it has saved nothing"
    assert began(parent, **command, saves=3) == from_other
    assert began(parent, **command) == Began("mine", 3, "mine/llama_v2-3steps")
    run(f"{parent}-old", "third", 99)
    assert began(parent, **command) == Began("mine", 3, "mine/llama_v2-3steps")
    assert contents(path) == before, "the other run's folder is read only"
    assert claims_in(open_folder(path)) == [1]


def test_a_damaged_checkpoint_of_another_run_is_passed_over_and_not_marked(parent):
    run(parent, "other", 60, 62)
    harm(f"{parent}/other", "llama_v2-62steps", ".distcp", lambda data: data[:-1])
    before = contents(f"{parent}/other")
    assert began(parent, run_name="mine", resume_from_checkpoint=f"{parent}/other").step == 60
    assert contents(f"{parent}/other") == before


def test_a_checkpoint_that_is_not_committed_is_refused(parent):
    run(parent, OURS, 3, 6)
    open_folder(f"{parent}/{OURS}").withdraw("llama_v2-6steps")
    for name in (OURS, "other"):
        with pytest.raises(CheckpointError, match=r"6steps is not a complete checkpoint: it has no COMMITTED"):
            start(parent, run_name=name, resume_from_checkpoint=f"{parent}/{OURS}/llama_v2-6steps")


def test_checkpoints_of_awss_sample_right_below_are_begun_from_and_never_ours(parent):
    aws = open_folder(parent)
    for step in (5, 10):
        aws.storage.put(f"llama_v2-{step}steps/tp0_ep0/.metadata", b"theirs")
    before = contents(parent)
    begun = start(parent, resume_from_checkpoint=parent)
    assert (begun.name, begun.without_candidate, begun.newest, begun.other_runs) == (OURS, parent, None, ())
    save(parent, begun, 11, 12)
    ended(begun)
    assert began(parent, resume_from_checkpoint=parent) == Began(OURS, 12, f"{OURS}/llama_v2-12steps")
    other = start(parent, run_name="other", resume_from_checkpoint=parent)
    assert (other.without_candidate, other.newest, other.other_runs) == (parent, None, (OURS,))
    ended(other)
    with_runs = contents(parent)
    assert {name: data for name, data in with_runs.items() if not name.startswith((OURS, "other"))} == before
    assert aws.committed() == []


def test_an_empty_folder_is_a_start_at_step_0_and_one_that_is_missing_elsewhere_is_refused(parent, tmp_path):
    """On SageMaker the first start and its restarts are given the same command."""
    (tmp_path / "empty").mkdir()
    for location in (parent, f"{parent}/{OURS}", tmp_path / "empty"):
        assert began(parent, resume_from_checkpoint=str(location)) == Began(OURS)
    with pytest.raises(CheckpointError, match="nowhere does not exist; give a folder of runs, a run's folder, or one"):
        start(parent, resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_without_flags_of_a_model_the_folder_tells_the_run(parent):
    run(parent, "one", 3)
    assert began(parent, resume_from_checkpoint=parent, **BARE) == Began("one", 3, "one/llama_v2-3steps")
    run(parent, "two", 5)
    with pytest.raises(ConfigError) as refused:
        start(parent, resume_from_checkpoint=parent, **BARE)
    message = str(refused.value)
    assert all(part in message for part in (parent, "holds 2 runs", "give --run_name", "one, two"))
    assert began(parent, run_name="two", resume_from_checkpoint=parent, **BARE).step == 5
    for location in (f"{parent}/one", f"{parent}/one/llama_v2-3steps"):
        from_one = began(parent, resume_from_checkpoint=location, **BARE)
        assert from_one == Began(OURS, 3, "one/llama_v2-3steps", own=False)


def test_an_evaluation_claims_nothing(parent):
    run(parent, "mine", 3)
    before = open_folder(f"{parent}/mine").storage.files()
    for options, name, step in (
        ({"run_name": "mine", "resume_from_checkpoint": parent}, "mine-evaluation", 3),
        ({"run_name": "other", "resume_from_checkpoint": f"{parent}/mine"}, "other", 3),
        ({"resume_from_checkpoint": f"{parent}/mine"}, f"{OURS}-evaluation", 3),
        ({}, f"{OURS}-evaluation", 0),
    ):
        begun = start(parent, evaluate_only=1, validation_freq=None, **options)
        assert (begun.name, begun.owner, begun.newest.step if begun.newest else 0) == (name, None, step)
    assert open_folder(f"{parent}/mine").storage.files() == before
    assert not open_folder(f"{parent}/{OURS}").storage.files()


def test_a_start_that_fails_leaves_no_folder_of_its_own(parent, tmp_path):
    begun = start(parent)
    begun.delete_new_folders(ConfigError, ConfigError("no data"), None)
    assert open_folder(parent).storage.level() == ({}, [])
    run(parent, OURS, 3)
    again = start(parent, resume_from_checkpoint=parent)
    again.delete_new_folders(ConfigError, ConfigError("no data"), None)
    assert owner_of(again.owner.folders).released, "the next start need not wait"
    assert began(parent, resume_from_checkpoint=parent) == Began(OURS, 3, f"{OURS}/llama_v2-3steps")


# --- restarts of the same job


RESTARTS = {
    "Slurm": (SLURM, {**SLURM, "SLURM_RESTART_COUNT": "1"}),
    "torchrun": ({"TORCHELASTIC_RUN_ID": "x"}, {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "1"}),
}
"""Which jobs are restarts of which: `test_checkpoints_owner.py`."""


@pytest.mark.parametrize("flagged", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("scheduler", RESTARTS)
def test_a_restart_of_the_same_job_resumes_its_run(parent, scheduler, given, flagged, caplog):
    """With the flag and without it, whatever the run is called, at once after its death elsewhere."""
    first, restarted = RESTARTS[scheduler]
    run(parent, OURS, 50)  # an older run has that name
    command: dict[str, Any] = {"run_name": "mine"} if given else {}
    name = "mine" if given else f"{OURS}-2"
    if flagged:
        command["resume_from_checkpoint"] = parent
        name = "mine" if given else OURS
    step = 50 if flagged and not given else 0
    with killed():
        begun = start(parent, first, **command)
        assert (begun.name, begun.newest.step if begun.newest else 0) == (name, step)
    with killed():  # before it has saved anything
        again = start(parent, restarted, **command)
        assert (again.name, again.newest.step if again.newest else 0) == (name, step)
        save(parent, again, 51)
    restarted = {key: "2" if "RESTART" in key else value for key, value in restarted.items()}
    with killed():
        third = start(parent, restarted, **command)
    assert (third.name, third.continues, third.newest.step) == (name, True, 51)
    assert [each.generation for each in (begun, again, third)] == [begun.generation + n for n in range(3)]
    assert "waiting up to" not in caplog.text


def test_another_job_without_the_flag_is_a_new_run(parent):
    other = {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}
    assert began(parent, SLURM, saves=4) == Began(OURS)
    assert began(parent, other) == Began(f"{OURS}-2")
    assert began(parent, SLURM, run_name="mine", saves=4) == Began("mine")
    with pytest.raises(ConfigError, match="is taken by a run at step 4"):
        start(parent, other, run_name="mine")


# --- going back


def test_an_own_older_checkpoint_opens_a_generation(parent):
    run(parent, OURS, 10, 20, 30)
    command: dict[str, Any] = {"resume_from_checkpoint": f"{parent}/{OURS}/llama_v2-10steps"}
    back = Began(OURS, 10, f"{OURS}/llama_v2-10steps")
    resolved, begun = settled(parent, **command)
    assert (begun.went_back, begun.is_own, begun.generation) == (True, True, 2)
    found, _ = find_checkpoint(resolved.args, spec(resolved.args, begun), begun, {})
    assert "goes back to its step 10" in start_line(resolved.args, begun, found)
    assert f"--resume_from_checkpoint {parent}" in how_to_resume(resolved, begun, RANKS), "not the checkpoint again"
    ended(begun)
    assert began(parent, resume_from_checkpoint=parent).step == 30, "nothing has been saved since"
    assert began(parent, **command, saves=12) == back
    assert began(parent, resume_from_checkpoint=parent) == Began(OURS, 12, f"{OURS}/llama_v2-12steps")
    assert began(parent, **command) == back, "another job that names it goes back again"
    assert committed(f"{parent}/{OURS}")[0] == "llama_v2-12steps"
    assert len(names(f"{parent}/{OURS}")) == 4, "nothing is deleted or renamed for it"
    with killed():
        save(parent, start(parent, SLURM, **command), 11)
        again = start(parent, {**SLURM, "SLURM_RESTART_COUNT": "1"}, **command)
    assert (again.went_back, again.newest.step) == (False, 11), "the restart of a job that went back goes on"


def test_two_starts_of_a_derived_name_at_once_have_two_runs_or_one_error(parent, monkeypatch):
    """The second one claims the name after the first one has found it free."""
    from smp_train.checkpoints.owner import Ownership

    acquire, others = Ownership.acquire, []

    def late(self: Ownership, **options: Any) -> None:
        if not others:
            others.append(None)
            others[0] = start(parent)
        acquire(self, **options)

    monkeypatch.setattr(Ownership, "acquire", late)
    second = start(parent)
    assert (others[0].name, second.name) == (OURS, f"{OURS}-2"), "a living job has reserved the name"
    ended(second)
    ended(others[0])
    assert began(parent) == Began(OURS), "neither has saved anything"


def test_a_resume_with_another_schedule_says_so(parent: str) -> None:
    began(parent, saves=3, run_name="a")
    resolved, begun = settled(parent, run_name="a", resume_from_checkpoint=parent, lr=0.01)
    found, _ = find_checkpoint(resolved.args, spec(resolved.args, begun), begun, {})
    assert found is not None
    found.meta["arguments"] = {"lr": 1e-4, "beta1": resolved.args.beta1}
    (changed,) = changed_settings(resolved.args, found)
    assert "--lr 0.01" in changed
    assert "0.0001" in changed
