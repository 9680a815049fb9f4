"""Folders that a process holds by a lock: the kernel releases it, however the process ends.

A slot is held by all processes of one job, and taken over by the next when the last of them is gone; a scratch folder
is one process's own, and removed by whoever finds its lock free. Where the file system has no locks, age decides.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import socket
import uuid
from collections.abc import Iterator

from smp_train.data.index import FAILED, STALE_SECONDS, clock

logger = logging.getLogger("smp_train.data")

HELD = ".lock"
"""The file in a folder whose lock says that the folder is in use."""
WORK, LOCK = ".work-", ".lock-"
MARK_SECONDS = 60.0
"""A mark without a folder is older than that when its maker is gone."""


def try_lock(file: int, *, alone: bool) -> bool | None:
    """Lock an open file at once, shared or ``alone``; None where there are no locks."""
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


class Held:
    """A folder in use by this process, for as long as this object is there.

    Args:
        path: the folder.
        file: its `HELD`, open and locked as far as it can be.
    """

    def __init__(self, path: str, file: int) -> None:
        self.path = path
        self._file = file

    def touch(self) -> None:
        """Show that it is in use, where no lock does."""
        with contextlib.suppress(OSError):
            os.utime(self._file)

    def close(self) -> None:
        """Hold it no longer."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close


def hold(path: str) -> Held:
    """Make a folder if it is not there, and hold it as others may too. Raises OSError."""
    for last in (*[False] * 9, True):
        os.makedirs(path, exist_ok=True)
        try:
            file = os.open(os.path.join(path, HELD), os.O_CREAT | os.O_RDWR, 0o666)
        except FileNotFoundError:
            if last:
                raise
            continue
        # Who holds it alone is about to remove it, or to take it over for a moment: not for long.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)
        # Removed meanwhile? There are file systems on which a file is never the same as itself.
        with contextlib.suppress(OSError):
            if last or os.path.samestat(os.fstat(file), os.stat(os.path.join(path, HELD))):
                break
        os.close(file)
    return Held(path, file)


@contextlib.contextmanager
def alone(path: str) -> Iterator[bool]:
    """Hold a folder for oneself, if nobody uses it and that is certain; tell whether that is so."""
    try:
        # Who was killed as he removed it may have left all but this.
        file = os.open(os.path.join(path, HELD), os.O_CREAT | os.O_RDWR, 0o666)
    except OSError:
        yield False
        return
    try:
        yield bool(try_lock(file, alone=True))
    finally:
        os.close(file)


def claim(folder: str, name: str) -> Held:
    """Hold the first folder ``<name>-N`` that no other job does; the peers of this process then `hold` it too.

    What jobs that are gone have left in others is moved into it, but for what they had half made. Raises OSError.
    """
    claimed = _first_free(folder, name)
    if claimed is None:
        return _claim_unlocked(folder, name)
    for other in _slots(folder, name):
        if other != claimed.path:
            with alone(other) as free:
                if free:
                    _clear(other)
                    _move(other, claimed.path)
    return claimed


def _first_free(folder: str, name: str) -> Held | None:
    """Hold the first slot that is free; None where there are no locks."""
    for number in itertools.count():
        path = os.path.join(folder, f"{name}-{number}")
        try:
            os.makedirs(path, exist_ok=True)
            file = os.open(os.path.join(path, HELD), os.O_CREAT | os.O_RDWR, 0o666)
        except PermissionError:
            if not os.path.isdir(path):
                raise
            continue  # another user's
        locked = try_lock(file, alone=True)
        if locked:
            _clear(path)
            # Between the one lock and the other, another job may come in.
            if try_lock(file, alone=False):
                if number:
                    logger.info("%s: other runs stage in those before it; each takes room of its own", path)
                return Held(path, file)
        os.close(file)
        if locked is None:
            return None
    raise AssertionError("numbers do not end")


def _claim_unlocked(folder: str, name: str) -> Held:
    """Hold a folder of this job's own, where files cannot be locked; remove those not touched for an hour."""
    logger.info("%s: files cannot be locked there, so what an earlier run has staged is not used", folder)
    now = clock(folder)
    for other in _slots(folder, name):
        with contextlib.suppress(OSError):
            # What is made there shows as well: before the first step a job may count for hours.
            entries = [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(other)]
            touched = max(entries, default=os.stat(other).st_mtime)
            if touched < now - STALE_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
    return hold(os.path.join(folder, f"{name}-{uuid.uuid4().hex[:8]}"))


def _slots(folder: str, name: str) -> list[str]:
    return [entry.path for entry in os.scandir(folder) if entry.name.startswith(f"{name}-") and entry.is_dir()]


def _clear(path: str) -> None:
    """Remove word of failures, and what was half made."""
    for entry in os.scandir(path):
        with contextlib.suppress(OSError):
            if entry.name.startswith(WORK):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name.startswith(LOCK) or entry.name.endswith((FAILED, ".tmp")):
                os.unlink(entry.path)


def _move(path: str, where: str) -> None:
    for entry in os.scandir(path):
        with contextlib.suppress(OSError):
            if entry.name != HELD:
                os.rename(entry.path, os.path.join(where, entry.name))


class Scratch:
    """A folder for what this process is making, which another removes if this one cannot."""

    def __init__(self, folder: str) -> None:
        _sweep(folder)
        name = f"{socket.gethostname()}-{uuid.uuid4().hex}"
        self.path = os.path.join(folder, WORK + name)
        self._mark = os.path.join(folder, LOCK + name)
        # Locked before the folder is there: a folder whose lock is free has lost its maker.
        self._lock = os.open(self._mark, os.O_CREAT | os.O_RDWR, 0o666)
        # Whoever looks whether it is free has it for a moment.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.mkdir(self.path)

    def touch(self) -> None:
        """Show that it is in use."""
        with contextlib.suppress(OSError):
            os.utime(self.path)

    def remove(self) -> None:
        """Remove the folder with all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.unlink(self._mark)
            os.close(self._lock)
            self._lock = -1


def _sweep(folder: str) -> None:
    """Remove the scratch folders of processes that were killed, and marks that have no folder.

    On this machine those are the ones whose lock is free, however long they were not touched; of another one, where a
    lock may mean nothing here, those not touched for an hour.
    """
    here, now = f"{socket.gethostname()}-", clock(folder)
    names = set(os.listdir(folder))
    for name in {name.removeprefix(WORK).removeprefix(LOCK) for name in names if name.startswith((WORK, LOCK))}:
        path, mark = os.path.join(folder, WORK + name), os.path.join(folder, LOCK + name)
        # Gone by now, or another user's.
        with contextlib.suppress(OSError):
            made = WORK + name in names
            age = now - os.stat(path if made else mark).st_mtime
            if not made and age <= MARK_SECONDS:
                # A mark is there a moment before its lock and its folder are: not to be touched before they are.
                continue
            free = _is_free(mark) if name.startswith(here) else None
            if age > STALE_SECONDS if free is None else free:
                shutil.rmtree(path, ignore_errors=True)
                os.unlink(mark)


def _is_free(mark: str) -> bool | None:
    """Tell whether nobody has locked a mark; None where there are no locks."""
    try:
        file = os.open(mark, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        return try_lock(file, alone=True)
    finally:
        os.close(file)
