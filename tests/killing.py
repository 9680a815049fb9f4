"""A process that is killed, or whose disk is full: no operation on files, or in S3, after the n-th has any effect."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_train.errors import CheckpointError

OPERATIONS = ("rename", "replace", "link", "unlink", "mkdir", "rmdir")


def ends(request: pytest.FixtureRequest, kind: str, work: Callable[[], object], after: int) -> bool:
    """Do ``work``, whose operations after the first ``after`` have no effect; return whether it had no more of them.

    ``kind`` is ``folder``, where a child process does the work and is killed, or ``s3``.
    """
    if kind == "folder":
        return operations_until_killed(work, after) is not None
    server, seen = request.getfixturevalue("server"), []

    def on_request(method: str, path: str) -> str | None:
        seen.extend([path] * (method in ("PUT", "POST", "DELETE")))
        return "AccessDenied" if method in ("PUT", "POST", "DELETE") and len(seen) > after else None

    server.on_request = on_request
    with contextlib.suppress(CheckpointError):
        work()
    server.on_request = lambda method, path: None
    return len(seen) <= after


def operations_until_killed(work: Callable[[], object], after: int) -> int | None:
    """Do ``work`` in a child process that SIGKILL ends at its operation on files after the first ``after``.

    Return how many operations there were, None if the child was killed.
    """
    return _in_a_child(work, after, lambda operation: os.kill(os.getpid(), signal.SIGKILL))


def operations_until_full(work: Callable[[], object], after: int) -> int | None:
    """Do ``work`` in a child process whose disk is full from its operation on files after the first ``after`` on.

    Return how many operations there were, None if there were more. Deleting needs no room.
    """

    def full(operation: str) -> None:
        if operation not in ("unlink", "rmdir"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return _in_a_child(work, after, full)


def _in_a_child(work: Callable[[], object], after: int, beyond: Callable[[str], object]) -> int | None:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            signal.alarm(120)
            number = _count(work, after, beyond)
            os.write(writes, str(number).encode())
        except BaseException:
            os.write(writes, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as stream:
        answer = stream.read().decode()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return None
    assert answer.isdigit(), answer
    return int(answer) if int(answer) <= after else None


def _count(work: Callable[[], object], after: int, beyond: Callable[[str], object]) -> int:
    """Do ``work``, call ``beyond`` before each of its operations after the first ``after``; return their number."""
    counted = 0

    def count(operation: str) -> None:
        nonlocal counted
        counted += 1
        if counted > after:
            beyond(operation)

    def before(operation: str) -> Callable[..., Any]:
        function = getattr(os, operation)
        return lambda *args, **options: (count(operation), function(*args, **options))[1]

    for name in (*OPERATIONS, "fsync"):
        setattr(os, name, before(name))
    open_file = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode == "xb":
            count("open")
        return open_file(path, mode, *args, **options)

    Path.open = opened  # type: ignore[assignment, method-assign]
    work()
    return counted
