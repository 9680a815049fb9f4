"""One job at a time on a folder of checkpoints: who is refused, who takes over, and what clocks have to do with it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from smp_train.checkpoints import CheckpointManager, Policy, find, lock
from smp_train.checkpoints.lock import LOCK, Holder, Lock
from smp_train.checkpoints.storage import PROBE, LocalStorage
from smp_train.errors import CheckpointError

ELSEWHERE = {"host": "node-7", "machine": "another", "job": "Slurm job 4711", "pid": 99, "token": "other"}


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path))


def held_by(storage: LocalStorage, **changes: object) -> bytes:
    """Put a lock there whose holder is this process but for ``changes``."""
    data = dataclasses.replace(Holder.this_process(), **changes).to_bytes()
    storage.swap(LOCK, None, data)
    return data


def waits(storage: LocalStorage, on_wait=lambda number: None):
    """Return a clock that moves only when it is waited for: it makes the lock look older."""
    asked: list[float] = []

    def wait(seconds: float) -> None:
        asked.append(seconds)
        path = storage.root / LOCK
        stamp = path.stat().st_mtime - seconds
        os.utime(path, (stamp, stamp))
        on_wait(len(asked))
        assert len(asked) < 100

    wait.asked = asked
    return wait


def waited(wait, began: float, seconds: float) -> bool:
    """Return whether ``seconds`` were waited for, of which the test itself has taken some since ``began``."""
    return seconds - 2 - (time.monotonic() - began) <= sum(wait.asked) <= seconds + 2


def test_the_second_one_is_refused_at_once_and_told_who_holds_it(storage, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    first, second = Lock(storage), Lock(storage)
    first.acquire()
    with pytest.raises(CheckpointError) as refused:
        second.acquire(wait=lambda seconds: pytest.fail("the system knows that the holder runs"))
    said = rf"in use by Slurm job 4711 on \S+ \(process {os.getpid()}, since 2\d+-.*UTC\)"
    assert re.search(said, str(refused.value))
    assert "\n" not in str(refused.value)
    first.release()
    second.acquire()
    second.release()
    assert list(storage.root.iterdir()) == []


def test_a_dead_process_of_this_machine_holds_nothing(storage, caplog):
    held_by(storage, pid=2**22 + 1)
    taken = Lock(storage)
    taken.acquire(wait=lambda seconds: pytest.fail("nothing to wait for"))
    assert "took over the lock of a job on" in caplog.text
    taken.release()


def test_a_dead_process_that_nobody_has_waited_for_holds_nothing(storage):
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    assert fields[0] == "Z"
    held_by(storage, pid=child.pid, began=fields[19])
    taken = Lock(storage)
    taken.acquire(wait=lambda seconds: pytest.fail("nothing to wait for"))
    taken.release()
    child.wait()


def test_a_number_that_another_process_has_now_holds_nothing(storage):
    held_by(storage, began="1")
    taken = Lock(storage)
    taken.acquire(wait=lambda seconds: pytest.fail("nothing to wait for"))
    taken.release()


def test_a_holder_elsewhere_that_stamps_is_alive(storage, monkeypatch):
    monkeypatch.setattr(lock, "STALE_SECONDS", 3600.0)  # of which the test itself may take some
    held_by(storage, **ELSEWHERE)
    wait = waits(storage, lambda number: storage.stamp(LOCK, b"") if number == 40 else None)
    with pytest.raises(CheckpointError, match=r"in use by Slurm job 4711 on node-7 \(process 99"):
        Lock(storage).acquire(wait=wait)
    assert len(wait.asked) == 40


def test_a_holder_elsewhere_that_is_silent_is_dead(storage, caplog):
    began = time.monotonic()
    held_by(storage, **ELSEWHERE)
    wait = waits(storage)
    taken = Lock(storage)
    taken.acquire(wait=wait)
    assert waited(wait, began, lock.STALE_SECONDS)
    assert caplog.text.count("to see whether it still is") == 1
    taken.release()


@pytest.mark.parametrize("wrong", [-1e6, 1e6])
def test_this_machines_clock_does_not_matter(storage, monkeypatch, wrong):
    """By our clock the stamp may be of next week, or of last year: its age is told by the storage's own."""
    monkeypatch.setattr(lock, "STALE_SECONDS", 3600.0)
    held_by(storage, **ELSEWHERE)
    now = time.time() + wrong
    monkeypatch.setattr(time, "time", lambda: now)
    wait = waits(storage, lambda number: storage.stamp(LOCK, b"") if number == 40 else None)
    with pytest.raises(CheckpointError, match="in use by Slurm job 4711"):
        Lock(storage).acquire(wait=wait)


def test_a_lock_of_the_future_ages_as_any_other(storage):
    """The storage's clock was put back after the holder died: it takes longer, and nothing else."""
    began = time.monotonic()
    held_by(storage, **ELSEWHERE)
    path = storage.root / LOCK
    os.utime(path, (time.time() + 20, time.time() + 20))
    taken, wait = Lock(storage), waits(storage)
    taken.acquire(wait=wait)
    assert waited(wait, began, lock.STALE_SECONDS + 20)
    taken.release()


def test_of_two_that_take_over_one_succeeds(storage):
    old = held_by(storage, **ELSEWHERE)
    assert storage.swap(LOCK, old, b"first")
    assert not storage.swap(LOCK, old, b"second")
    assert storage.peek(LOCK)[0] == b"first"
    assert [path.name for path in storage.root.iterdir()] == [LOCK]


def test_an_unreadable_lock_ages_too(storage):
    storage.swap(LOCK, None, b"?")
    taken = Lock(storage)
    taken.acquire(wait=waits(storage))
    taken.release()


def test_stamping_keeps_it(storage, monkeypatch):
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    held = Lock(storage)
    held.acquire()
    path = storage.root / LOCK
    os.utime(path, (1, 1))
    until = time.monotonic() + 120
    while path.stat().st_mtime == 1 and time.monotonic() < until:
        time.sleep(0.01)
    assert storage.peek(LOCK)[1] < 600  # which it would not be by decades
    held.release()


def test_a_stamp_on_its_way_does_not_bring_back_a_lock_that_is_given_back(storage, monkeypatch):
    """In S3 a stamp writes the lock anew."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.01)
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def stamp(file: str, data: bytes) -> None:
        begun.set()
        go.wait()
        (storage.root / file).write_bytes(data)
        ended.set()

    monkeypatch.setattr(storage, "stamp", stamp)
    held = Lock(storage)
    held.acquire()
    begun.wait()
    monkeypatch.setattr(lock, "BEAT_SECONDS", 600.0)
    released = threading.Thread(target=held.release)
    released.start()
    released.join(0.2)
    go.set()
    released.join()
    ended.wait()
    assert list(storage.root.iterdir()) == []


def manager(folder: Path) -> CheckpointManager:
    return CheckpointManager([Policy(str(folder), 1, 2)], model_type="m")


def test_who_was_forced_out_commits_nothing_more(tmp_path):
    first, second = manager(tmp_path), manager(tmp_path)
    state = {"model": {"w": torch.ones(3)}}
    first.lock()
    first.save(1, state, {})
    with pytest.raises(CheckpointError, match=r"cannot start: .*in use.*--break_checkpoint_lock 1"):
        second.lock()
    second.lock(force=True)
    with pytest.raises(CheckpointError, match=r"cannot save .*m-2steps: .* was taken over by a job on .*process"):
        first.save(2, state, {})
    second.save(3, state, {})
    first.close()
    assert (tmp_path / LOCK).exists(), "the first one's end does not unlock the second one's folder"
    second.close()
    with pytest.raises(CheckpointError, match="has been let go"):  # as a save that outlived a failing run
        second.save(4, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m-1steps", "m-3steps"]
    assert find(tmp_path).step == 3


def test_what_is_left_goes_whatever_the_clock_says(tmp_path):
    """Under the lock, what is unfinished is a dead job's, also if it is stamped with a time that is still to come."""
    left = tmp_path / ".m-2steps.0123abcd.staging"
    left.mkdir()
    os.utime(left, (time.time() + 9e5, time.time() + 9e5))
    saver = manager(tmp_path)
    saver.lock()
    saver.save(3, {"model": {"w": torch.ones(3)}}, {})
    saver.close()
    assert [path.name for path in tmp_path.iterdir()] == ["m-3steps"]


def test_what_another_job_tries_its_folder_with_stays_for_a_moment(tmp_path):
    """It does so before it asks for the lock, or will not ask for it: an evaluation only reads."""
    probe = LocalStorage(str(tmp_path)).stage(PROBE)
    for there in (True, False):
        saver = manager(tmp_path)
        saver.lock()
        saver.save(3, {"model": {"w": torch.ones(3)}}, {})
        saver.close()
        assert (tmp_path / probe).exists() == there
        if there:
            long_ago = time.time() - 3600
            os.utime(tmp_path / probe, (long_ago, long_ago))
