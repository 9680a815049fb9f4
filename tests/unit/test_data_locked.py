"""Folders that are held by a lock: who has them, and who may remove what another left."""

import errno
import fcntl
import gc
import os
import socket
import threading

import pytest

from smp_train.data import locked
from smp_train.data.open_files import OpenFiles
from smp_train.data.token_cache import settle

HERE = socket.gethostname()


def leave(folder, host, age, work=True):
    """Leave what a process that is gone was making, and return (folder, mark)."""
    path, mark = folder / f"{locked.WORK}{host}-x", folder / f"{locked.LOCK}{host}-x"
    mark.touch()
    if work:
        path.mkdir()
        os.utime(path, (os.stat(folder).st_mtime - age,) * 2)
    os.utime(mark, (os.stat(folder).st_mtime - age,) * 2)
    return path, mark


@pytest.mark.parametrize(("host", "age", "gone"), [(HERE, 0, True), ("elsewhere", 0, False), ("elsewhere", 4000, True)])
def test_what_killed_processes_left(tmp_path, host, age, gone):
    path, mark = leave(tmp_path, host, age)
    scratch = locked.Scratch(str(tmp_path))
    assert path.exists() == mark.exists() == (not gone)
    scratch.remove()
    assert len(list(tmp_path.iterdir())) == (0 if gone else 2)


@pytest.mark.parametrize(
    ("host", "age", "gone"),
    [(HERE, 0, False), (HERE, 100, True), ("elsewhere", 100, False), ("elsewhere", 4000, True)],
)
def test_marks_without_a_folder(tmp_path, host, age, gone):
    _, mark = leave(tmp_path, host, age, work=False)
    locked.Scratch(str(tmp_path)).remove()
    assert mark.exists() == (not gone)


def test_a_fresh_mark_is_not_even_locked_by_others(tmp_path, monkeypatch):
    """Its maker is about to."""
    _, mark = leave(tmp_path, HERE, 0, work=False)
    looked, is_free = [], locked._is_free
    monkeypatch.setattr(locked, "_is_free", lambda path: looked.append(path) or is_free(path))
    locked._sweep(str(tmp_path))
    assert not looked
    os.utime(mark, (1, 1))
    locked._sweep(str(tmp_path))
    assert looked == [str(mark)]


def test_a_scratch_is_locked_though_another_looks_at_it(tmp_path, monkeypatch):
    flock, looking = fcntl.flock, []
    done = threading.Timer(0.1, lambda: os.close(looking[0]))

    def looked_at(file, how):
        if not looking:
            (mark,) = tmp_path.glob(f"{locked.LOCK}*")
            looking.append(os.open(mark, os.O_RDWR))
            flock(looking[0], fcntl.LOCK_EX)
            done.start()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", looked_at)
    scratch = locked.Scratch(str(tmp_path))
    done.join()
    locked._sweep(str(tmp_path))
    assert os.path.isdir(scratch.path)
    scratch.remove()
    assert not list(tmp_path.iterdir())


def test_a_lock_says_more_than_age(tmp_path):
    """A process that was stopped for hours has its folder still."""
    asleep = locked.Scratch(str(tmp_path))
    os.utime(asleep.path, (1, 1))
    other = locked.Scratch(str(tmp_path))
    assert os.path.isdir(asleep.path)
    other.remove()
    asleep.remove()
    assert not list(tmp_path.iterdir())


def test_a_slot_is_held_by_all_processes_of_a_job(tmp_path):
    """And free when the last of them is gone: a rank may live a little longer than the one that took it."""
    first = locked.claim(str(tmp_path), "slot")
    peer = locked.hold(first.path)
    first.close()
    other = locked.claim(str(tmp_path), "slot")
    assert [os.path.basename(held.path) for held in (first, other)] == ["slot-0", "slot-1"]
    peer.close()
    assert locked.claim(str(tmp_path), "slot").path == first.path


def test_slots_where_files_cannot_be_locked(tmp_path, monkeypatch):
    """Each job has a folder that no other ever takes; left ones go by age."""

    def no_locks(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    first, second, counting = (locked.claim(str(tmp_path), "slot") for _ in range(3))
    assert first.path != second.path
    for held, age in ((first, 10_000), (second, 0), (counting, 10_000)):
        os.utime(os.path.join(held.path, locked.HELD), (os.stat(tmp_path).st_mtime - age,) * 2)
    locked.Scratch(counting.path)
    third = locked.claim(str(tmp_path), "slot")
    assert not os.path.exists(first.path)
    assert os.path.exists(second.path)
    assert os.path.exists(counting.path), "something is being made there"
    third.touch()
    with locked.alone(second.path) as free:
        assert not free, "as nobody can tell"


def test_holding_what_is_being_removed(tmp_path, monkeypatch):
    """The lock of a folder that was removed between opening and locking it is worth nothing."""
    flock, calls = fcntl.flock, []

    def removed(file, how):
        if not calls:
            os.unlink(tmp_path / "a" / locked.HELD)
        calls.append(how)
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed)
    held = locked.hold(str(tmp_path / "a"))
    assert len(calls) == 2
    with locked.alone(str(tmp_path / "a")) as free:
        assert not free
    held.close()
    with locked.alone(str(tmp_path / "a")) as free:
        assert free


def test_a_file_gets_its_name_when_it_is_on_disk(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, call=call: done.append(name) or call(*given))
    (tmp_path / "new").touch(mode=0o600)
    # Of all threads: another would make a file that everybody may write.
    monkeypatch.setattr(os, "umask", None)
    settle(str(tmp_path / "new"), str(tmp_path / "named"))
    (tmp_path / "plain").touch()
    assert done == ["fsync", "replace", "fsync"]
    assert (tmp_path / "named").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_file_that_cannot_be_opened_is_not_counted(monkeypatch):
    class Gone:
        def open(self):
            raise FileNotFoundError

        def close(self):
            raise AssertionError("it was never open")

    from smp_train.data import open_files

    gc.collect()  # what other tests have dropped is not to be given back to the count of this one
    count = open_files._Count()
    monkeypatch.setattr(open_files, "_count", count)
    files = OpenFiles(1)
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            files.use(Gone())
    assert count.kept == 0
    files.close()
    assert count.kept == 0
