"""One job at a time writes a run's checkpoints: who is refused, who takes over, what an overtaken job can still do."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from smp_train.checkpoints import owner
from smp_train.checkpoints.find import open_verified
from smp_train.checkpoints.folder import RunFolder, open_folder
from smp_train.checkpoints.owner import Claim, Ownership, claims_in, owner_of
from smp_train.distributed.environment import LAUNCH
from smp_train.distributed.job import Job, identity
from smp_train.errors import CheckpointError
from tests.checkpoint_files import committed, files, keys, listed, manager, names, owning, resumed
from tests.checkpoint_files import owner as acquired

STATE = {"model": {"w": torch.ones(3)}}
SLURM = Job("Slurm job 4711")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_folder(tmp_path)


def owned_elsewhere(folder: RunFolder, job: Job = SLURM, generation: int = 1) -> Claim:
    """Let a job on another machine be the owner."""
    claim = dataclasses.replace(Claim.fresh(generation, job, generation), host="node-7", process="other 99 1")
    folder.storage.put(claim.file, claim.to_bytes())
    return claim


def waits(monkeypatch, folder: RunFolder, on_wait=lambda number: None) -> list[float]:
    """Let the clock move only while a start waits, which makes the claims there look older; return the waits."""
    asked: list[float] = []

    def wait(seconds: float) -> None:
        asked.append(seconds)
        for path in Path(folder.location).glob(".owner-*"):
            seen = path.stat().st_mtime - seconds
            os.utime(path, (seen, seen))
        on_wait(len(asked))
        assert len(asked) < 100

    monkeypatch.setattr(time, "sleep", wait)
    return asked


@pytest.fixture(autouse=True)
def at_once(monkeypatch) -> None:
    """Fail a start that waits without `waits`."""
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("there is nothing to wait for"))


# --- one owner


OWNS = """
import os, sys
from smp_train.checkpoints.folder import open_folder
from smp_train.checkpoints.owner import Ownership
Ownership([open_folder(sys.argv[1])]).acquire()
if os.fork() == 0:
    sys.stdin.read()  # a child outlives it
    os._exit(0)
print("owns", flush=True)
sys.stdin.read()
"""


def test_a_process_of_this_machine_owns_the_run_as_long_as_it_lives(folder, caplog):
    """Killed, it owns nothing, whatever its children do and whoever gets its process id."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNS, folder.location], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"owns\n"
        with pytest.raises(CheckpointError, match=rf"in use by .*process {process.pid},"):
            Ownership([folder]).acquire()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its exit code
        taken = acquired(folder.location)
        assert "took over from a job on" in caplog.text
        assert taken.generation == 2
        taken.release()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("before", ["nothing", "dead"])
@pytest.mark.parametrize("reached", ["claims_in", "look_at_owner", "owner_of", "put_if_absent"])
def test_a_job_that_is_overtaken_while_it_starts_does_not_rob_the_other(place, monkeypatch, before, reached):
    """At each point of its start; the other one's claim may have been followed by further ones."""
    folder = open_folder(place)
    if before == "dead":
        acquired(place).release()
    others: list[Ownership] = []

    def meanwhile(function):
        def first(*args, **options):
            answer = function(*args, **options) if reached == "look_at_owner" else None
            if not others:
                others.append(Ownership([open_folder(place)], Job()))
                others[0].acquire()
                others[0].advance()
            return answer or function(*args, **options)

        return first

    late = Ownership([folder], Job())
    with monkeypatch.context() as patched:
        if reached == "put_if_absent":
            patched.setattr(folder.storage, reached, meanwhile(folder.storage.put_if_absent))
        else:
            patched.setattr(owner, reached, meanwhile(getattr(owner, reached)))
        with pytest.raises(CheckpointError, match="in use by a job"):
            late.acquire()
    others[0].check()
    assert claims_in(folder) == [others[0].generation]
    others[0].release()


# --- owners on other machines, and clocks


@pytest.mark.parametrize("wrong", [0, -3600, 3600, -1e6])
def test_an_owner_elsewhere_that_beats_is_alive_whatever_this_machines_clock_says(folder, monkeypatch, wrong):
    """By our clock the beat may be of next week, or of last year: its age is by the storage's own."""
    monkeypatch.setattr(owner, "STALE_SECONDS", 3600.0)  # of which the test itself may take some
    claim = owned_elsewhere(folder)
    now = time.time() + wrong
    monkeypatch.setattr(time, "time", lambda: now)
    beat = lambda number: folder.storage.put(claim.file, claim.to_bytes()) if number == 40 else None  # noqa: E731
    asked = waits(monkeypatch, folder, beat)
    with pytest.raises(CheckpointError, match=r"in use by Slurm job 4711 on node-7 \(process 99"):
        Ownership([folder]).acquire()
    assert len(asked) == 40


@pytest.mark.parametrize("ahead", [0, 20])
def test_an_owner_elsewhere_that_is_silent_is_dead(folder, caplog, monkeypatch, ahead):
    """Also where the storage's clock was put back after it died: it takes longer, and nothing else."""
    began = time.monotonic()
    claim = owned_elsewhere(folder)
    os.utime(Path(folder.location, claim.file), (time.time() + ahead, time.time() + ahead))
    taken, asked = Ownership([folder]), waits(monkeypatch, folder)
    taken.acquire()
    needed = owner.STALE_SECONDS + ahead  # of which the test itself has taken some
    assert needed - 2 - (time.monotonic() - began) <= sum(asked) <= needed + 2
    assert "waiting up to" in caplog.text
    assert listed(folder.location) == [".owner-2"]
    taken.release()


# --- restarts of the owner's job


RESTARTED = [
    (Job("Slurm job 7", 0), Job("Slurm job 7", 1)),
    (Job("training job x", agent="training job x"), Job("training job x", agent="training job x")),
    (Job("Kubernetes job ns/x", agent="Kubernetes job ns/x"), Job("Kubernetes job ns/x", agent="Kubernetes job ns/x")),
    (Job(agent="a:1"), Job(agent="a:1")),
    (Job("Slurm job 7", 0, "a:1"), Job("Slurm job 7", 0, "a:1")),
]
OTHERS = [
    (Job("Slurm job 7", 1), Job("Slurm job 7", 1)),  # two steps of one allocation
    (Job("Slurm job 7", 0, "a:1"), Job("Slurm job 7", 0, "a:2")),
    (Job("Slurm job 7", 2), Job("Slurm job 7", 1)),  # the earlier start woke up
    (Job("Slurm job 7", 0), Job("Slurm job 8", 1)),
    (Job(), Job()),
    (Job(agent="a:1"), Job(agent="b:1")),
]


@pytest.mark.parametrize(("before", "now"), RESTARTED)
def test_a_restart_of_the_owners_job_takes_over_at_once_on_any_machine(folder, before, now):
    owned_elsewhere(folder, before, 3)
    taken = acquired(folder.location, now)
    assert (taken.generation, taken.restarted, taken.began) == (4, True, 3)
    taken.release()
    again = acquired(folder.location, dataclasses.replace(now, restarts=9))
    assert (again.generation, again.began) == (5, 3)
    again.release()


@pytest.mark.parametrize(("before", "now"), OTHERS)
def test_another_job_does_not_take_over_from_one_that_beats(folder, monkeypatch, before, now):
    claim = owned_elsewhere(folder, before, 3)
    waits(monkeypatch, folder, lambda number: folder.storage.put(claim.file, claim.to_bytes()))
    with pytest.raises(CheckpointError, match="in use by"):
        Ownership([folder], now).acquire()
    assert owner_of([folder]) == claim


ENVIRONMENTS = [
    ({"SLURM_JOB_ID": "7"}, Job("Slurm job 7")),
    ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, Job("Slurm job 7", 2)),
    ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "x"}, Job("Slurm job 7")),
    ({"PBS_JOBID": "7.server"}, Job("PBS job 7.server")),
    ({"TRAINING_JOB_NAME": "x"}, Job("training job x", agent="training job x")),
    ({"SMP_TRAIN_JOB": "ns/x", "SLURM_JOB_ID": "7"}, Job("Kubernetes job ns/x", agent="Kubernetes job ns/x")),
    ({}, Job()),
]


@pytest.mark.parametrize(("environment", "job"), ENVIRONMENTS)
def test_the_job_of_a_process_is_in_its_environment(environment, job):
    assert Job.current(environment) == job
    for agent in ({"TORCHELASTIC_RUN_ID": "x"}, {"ROLE_NAME": LAUNCH}) if not job.agent else ():
        restarted = Job.current({**environment, **agent})
        assert restarted.agent.startswith(identity(os.getppid()))
        assert dataclasses.replace(restarted, agent="") == job
    assert Job.from_json(json.loads(json.dumps(dataclasses.asdict(job)))) == job


# --- what a job that was overtaken can still do


def test_a_job_that_was_forced_out_commits_nothing_more(tmp_path):
    first = manager(tmp_path, model_type="m", owner=acquired(tmp_path))
    first.save(1, STATE, {})
    with owning(tmp_path, force=True, model_type="m") as second:
        with pytest.raises(CheckpointError, match=r"cannot save .*m-2steps: .* was taken over by a job on .*process"):
            first.save(2, STATE, {})
        with pytest.raises(CheckpointError, match=r"cannot go back: .*taken over"):
            first.next_generation()
        second.save(3, STATE, {})
        first.close()
        assert not owner_of([open_folder(tmp_path)]).released, "the first one's end does not release the second's claim"
        second.save(4, STATE, {})
    with pytest.raises(CheckpointError, match="nothing is committed"):  # as a save that outlived a failing run
        second.save(5, STATE, {})
    assert committed(tmp_path) == ["m-4steps", "m-3steps"]
    assert names(tmp_path) == ["m-3steps", "m-4steps"]


STAGES = ("write", "checksum", "commit", "publish")


@pytest.mark.parametrize("sweeps", [True, False])
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_a_writer_that_stalls_does_not_count_and_touches_nothing_of_its_successor(place, stage, ended, sweeps):
    """The second job takes over, saves the same step and keeps one, while the first one stands still."""
    with owning(place, model_type="m") as before:
        before.save(1, {"model": {"w": torch.full((3,), 5.0)}}, {})
    successors: list = []

    def meanwhile(reached: str) -> None:
        if reached == stage and not successors:
            ownership = acquired(place, force=True)
            successors.append(manager(place, 1, 1, "m", owner=ownership, generation=ownership.generation))
            if sweeps:
                successors[0].save(2, {"model": {"w": torch.zeros(3)}}, {})
            if ended:
                successors[0].close()

    ownership = acquired(place)
    first = manager(place, 1, 1, "m", owner=ownership, generation=ownership.generation, on_stage=meanwhile)
    stays = stage == "publish" and not sweeps  # whole, of an older generation; its successor may have resumed from it
    with pytest.raises(CheckpointError, match=r"cannot save .*m-2steps: .*(taken over by|deleted this attempt)"):
        first.save(2, STATE, {})
    with pytest.raises(CheckpointError, match="taken over by"):
        first.save(3, STATE, {})
    first.close()
    (second,) = successors
    if not sweeps:
        kept = ["m-1steps", *["m-2steps"] * stays]
        assert keys(place) == files(*kept), "a late attempt is gone, and the older checkpoint is not"
        assert resumed(place).step == 1 + stays
        if ended:
            return
        second.save(2, {"model": {"w": torch.zeros(3)}}, {})
    second.close()
    (name,) = committed(place)
    assert name == ("m-2steps-2" if sweeps or stays else "m-2steps"), "a stalled writer's name is not used again"
    found, loaded = open_verified(place), {"model": {"w": torch.ones(3)}}
    found.load(loaded)
    assert (found.step, found.marker.generation, loaded["model"]["w"].tolist()) == (2, 3, [0.0] * 3)
    assert keys(place) == files(name)
