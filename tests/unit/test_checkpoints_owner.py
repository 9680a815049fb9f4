"""One job at a time on a folder of checkpoints: who is refused, who takes over, and what clocks have to do with it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from smp_train.checkpoints.commit import CheckpointFolder, open_folder

from smp_train.checkpoints import CheckpointManager, Policy, find, owner
from smp_train.checkpoints.owner import OWNER, Owner, Token
from smp_train.errors import CheckpointError
from tests.checkpoint_files import files, keys

STATE = {"model": {"w": torch.ones(3)}}
ELSEWHERE = {"host": "node-7", "job": "Slurm job 4711", "pid": 99}


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return open_folder(tmp_path)


def names(folder: CheckpointFolder) -> list[str]:
    return sorted(os.listdir(folder.location))


def owned_elsewhere(folder: CheckpointFolder) -> Token:
    """Let a job on another machine be the owner."""
    token = dataclasses.replace(Token.fresh(), **ELSEWHERE)
    folder.storage.put(OWNER, token.to_bytes())
    return token


def waits(folder: CheckpointFolder, on_wait=lambda number: None):
    """Return a clock that moves only when it is waited for: it makes what is there look older."""
    asked: list[float] = []

    def wait(seconds: float) -> None:
        asked.append(seconds)
        for path in Path(folder.location).glob(f"{OWNER}*"):
            seen = path.stat().st_mtime - seconds
            os.utime(path, (seen, seen))
        on_wait(len(asked))
        assert len(asked) < 100

    wait.asked = asked
    return wait


def at_once(seconds: float) -> None:
    pytest.fail("there is nothing to wait for")


def test_the_second_one_is_refused_at_once_and_told_who_owns_it(folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    first, second = Owner(folder), Owner(folder)
    first.acquire()
    with pytest.raises(CheckpointError) as refused:
        second.acquire(wait=at_once)
    said = rf"in use by Slurm job 4711 on \S+ \(process {os.getpid()}, since 2\d+-.*UTC\)"
    assert re.search(said, str(refused.value))
    assert "\n" not in str(refused.value)
    first.release()
    second.acquire()
    second.release()
    assert names(folder) == []


OWNS = """
import os, sys
from smp_train.checkpoints.commit import open_folder
from smp_train.checkpoints.owner import Owner
Owner(open_folder(sys.argv[1])).acquire()
if os.fork() == 0:
    sys.stdin.read()  # a child outlives it
    os._exit(0)
print("owns", flush=True)
sys.stdin.read()
"""


def test_a_process_of_this_machine_owns_it_as_long_as_it_lives(folder, caplog):
    """Killed, it owns nothing, whatever its children do and as whom its number is used again."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNS, folder.location], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout.readline() == b"owns\n"
        with pytest.raises(CheckpointError, match=rf"in use by .*process {process.pid},"):
            Owner(folder).acquire(wait=at_once)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # nobody has asked for its exit code
        taken = Owner(folder)
        taken.acquire(wait=at_once)
        assert "took over the lock of a job on" in caplog.text
        taken.release()
        assert names(folder) == []
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("wrong", [0, -1e6, 1e6])
def test_an_owner_elsewhere_that_beats_is_alive_whatever_this_machines_clock_says(folder, monkeypatch, wrong):
    """By our clock the beat may be of next week, or of last year: its age is by the storage's own."""
    monkeypatch.setattr(owner, "STALE_SECONDS", 3600.0)  # of which the test itself may take some
    beat = f"{OWNER}-{owned_elsewhere(folder).token}"
    now = time.time() + wrong
    monkeypatch.setattr(time, "time", lambda: now)
    wait = waits(folder, lambda number: folder.storage.put(beat, b"") if number == 40 else None)
    with pytest.raises(CheckpointError, match=r"in use by Slurm job 4711 on node-7 \(process 99"):
        Owner(folder).acquire(wait=wait)
    assert len(wait.asked) == 40


@pytest.mark.parametrize("ahead", [0, 20])
def test_an_owner_elsewhere_that_is_silent_is_dead(folder, caplog, ahead):
    """Also where the storage's clock was put back after it died: it takes longer, and nothing else."""
    began = time.monotonic()
    token = owned_elsewhere(folder)
    beat = f"{OWNER}-{token.token}"
    folder.storage.put(beat, b"")
    os.utime(Path(folder.location, beat), (time.time() + ahead, time.time() + ahead))
    taken, wait = Owner(folder), waits(folder)
    taken.acquire(wait=wait)
    needed = owner.STALE_SECONDS + ahead  # of which the test itself has taken some
    assert needed - 2 - (time.monotonic() - began) <= sum(wait.asked) <= needed + 2
    assert "waiting up to" in caplog.text
    assert names(folder) == [OWNER], "its last beat is gone"
    taken.release()


def test_of_two_that_take_over_one_can_commit(folder, monkeypatch):
    """The second one decides by what it saw before the first one took over."""
    old = owned_elsewhere(folder).to_bytes()
    os.utime(Path(folder.location, OWNER), (1, 1))
    first, second = Owner(folder), Owner(folder)
    read, seen = Owner._read, []

    def late(self: Owner) -> bytes | None:
        if self is second and not seen:
            seen.append(old)
            first.acquire()
            return old
        return read(self)

    monkeypatch.setattr(Owner, "_read", late)
    with pytest.raises(CheckpointError, match="in use by"):
        second.acquire(wait=lambda seconds: None)
    first.check()
    first.release()


@pytest.mark.parametrize("data", [b"?", b'{"host": "a", "token": "../../etc"}'])
def test_an_unreadable_owner_ages_too(folder, data):
    folder.storage.put(OWNER, data)
    taken = Owner(folder)
    taken.acquire(wait=waits(folder))
    taken.release()
    assert names(folder) == []


def test_an_owner_of_versions_before_is_seen_by_its_stamps(folder, monkeypatch):
    content = b'{"host": "a", "pid": 1, "job": "", "since": "", "machine": "m", "began": "1", "token": "' + b"0" * 32
    folder.storage.put(OWNER, content + b'"}')
    path = Path(folder.location, OWNER)
    with pytest.raises(CheckpointError, match="in use by a job on a"):
        Owner(folder).acquire(wait=waits(folder, lambda number: path.touch() if number == 9 else None))


def test_it_beats_until_it_is_released(folder, monkeypatch):
    monkeypatch.setattr(owner, "BEAT_SECONDS", 0.01)
    begun, go = threading.Event(), threading.Event()
    put = folder.storage.put

    def slow(name: str, data: bytes) -> None:
        if "-" in name:
            begun.set()
            go.wait(60)
        put(name, data)

    monkeypatch.setattr(folder.storage, "put", slow)
    held = Owner(folder)
    held.acquire()
    assert begun.wait(60)
    monkeypatch.setattr(owner, "BEAT_SECONDS", 600.0)
    released = threading.Thread(target=held.release)
    released.start()
    released.join(0.2)
    go.set()
    released.join()
    assert names(folder) == [], "a beat that was on its way when it was released is gone too"


def manager(folder: Path | str, keep: int = 2, **more) -> CheckpointManager:
    return CheckpointManager([Policy(str(folder), 1, keep)], model_type="m", **more)


def save_locked(folder: Path) -> None:
    saver = manager(folder)
    saver.lock()
    saver.save(3, STATE, {})
    saver.close()


def test_who_was_forced_out_commits_nothing_more(tmp_path):
    first, second = manager(tmp_path), manager(tmp_path)
    first.lock()
    first.save(1, STATE, {})
    with pytest.raises(CheckpointError, match=r"cannot start: .*in use.*--break_checkpoint_lock 1"):
        second.lock()
    second.lock(force=True)
    with pytest.raises(CheckpointError, match=r"cannot save .*m-2steps: .* was taken over by a job on .*process"):
        first.save(2, STATE, {})
    second.save(3, STATE, {})
    first.close()
    assert (tmp_path / OWNER).exists(), "the first one's end does not unlock the second one's folder"
    second.close()
    with pytest.raises(CheckpointError, match="nothing is committed"):  # as a save that outlived a failing run
        second.save(4, STATE, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-1steps", "m-3steps"]
    assert find(tmp_path).step == 3


def test_who_was_forced_out_leaves_the_save_of_the_other_alone(tmp_path):
    """Its first save would sweep what it takes for a dead job's."""
    first = manager(tmp_path)
    first.lock()

    def meanwhile(stage: str) -> None:
        if stage == "publish":
            with pytest.raises(CheckpointError, match="was taken over"):
                first.save(2, STATE, {})

    second = manager(tmp_path, on_stage=meanwhile)
    second.lock(force=True)
    second.save(3, STATE, {})
    first.close()
    second.close()
    assert (find(tmp_path).step, find(tmp_path).verify()) == (3, [])


@pytest.mark.parametrize("ended", [False, True])
def test_a_late_commit_leaves_the_successors_checkpoint_alone(place, ended):
    """The first one stands still before it publishes: the second takes over and saves, and perhaps ends meanwhile."""
    second = manager(place)

    def meanwhile(stage: str) -> None:
        if stage == "publish":
            second.lock(force=True)
            second.save(2, {"model": {"w": torch.zeros(3)}}, {})
            if ended:
                second.close()

    first = manager(place, on_stage=meanwhile, keep=1)
    first.lock()
    with pytest.raises(CheckpointError, match=r"cannot save .*m-2steps: .*is not committed$") as late:
        first.save(2, STATE, {})
    first.close()
    second.close()
    assert ("taken over" in str(late.value)) is not ended
    found, state = find(place), {"model": {"w": torch.ones(3)}}
    found.load(state)
    assert (found.step, state["model"]["w"].tolist()) == (2, [0.0] * 3)
    assert keys(place) == files("m-2steps")


def test_a_file_system_that_loses_the_answer_to_a_first_try(folder, monkeypatch):
    """As NFS where a link is made, the answer is lost, and the second try finds it there."""
    put, asked = folder.storage.put_if_absent, iter("1")

    def lost(name: str, data: bytes) -> bool:
        next(asked)
        put(name, data)
        return False

    with monkeypatch.context() as patched:
        patched.setattr(folder.storage, "put_if_absent", lost)
        first = Owner(folder)
        first.acquire(wait=at_once)
    first.check()
    first.release()
    assert names(folder) == []


def test_what_is_left_goes_whatever_the_clock_says(tmp_path):
    """Under the lock, what is unfinished is a dead job's, also if it is stamped with a time that is still to come."""
    left = tmp_path / "m-2steps" / "0123abcd" / "__0_0.distcp"
    left.parent.mkdir(parents=True)
    (tmp_path / "m-1steps" / "0123abcd" / "tp0_ep0").mkdir(parents=True)
    left.touch()
    os.utime(left, (time.time() + 9e5, time.time() + 9e5))
    save_locked(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["m-3steps"]


def test_what_another_job_tries_its_folder_with_stays_for_a_moment(tmp_path):
    """It does so before it asks for the lock, or will not ask for it: an evaluation only reads."""
    probe = open_folder(tmp_path).put_probe()
    for there in (True, False):
        save_locked(tmp_path)
        assert (tmp_path / probe).exists() == there
        if there:
            long_ago = time.time() - 3600
            os.utime(tmp_path / probe, (long_ago, long_ago))
