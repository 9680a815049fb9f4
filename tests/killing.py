"""A process that is killed: none of its operations on files, or in S3, after the n-th has any effect."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smp_train.errors import CheckpointError

OPERATIONS = ("rename", "replace", "link", "unlink", "mkdir", "rmdir")


class Killed(BaseException):
    """The process has ended."""


@contextlib.contextmanager
def killed(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, after: int
) -> Iterator[list[str]]:
    """Let the first ``after`` operations of the body through, and none later; yield the list of operations.

    ``kind`` is ``folder`` or ``s3``.
    """
    if kind == "folder":
        with _in_folder(monkeypatch, after) as seen:
            yield seen
    else:
        with _in_s3(request.getfixturevalue("server"), after) as seen:
            yield seen


@contextlib.contextmanager
def _in_folder(monkeypatch: pytest.MonkeyPatch, after: int) -> Iterator[list[str]]:
    seen: list[str] = []

    def count(operation: str, path: Any) -> None:
        seen.append(f"{operation} {path}")
        if len(seen) > after:
            raise Killed

    def counted(name: str) -> None:
        original = getattr(os, name)
        patched.setattr(os, name, lambda path, *args, **more: (count(name, path), original(path, *args, **more))[1])

    open_file = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **more: Any) -> Any:
        if mode == "xb":
            count("open", path)
        return open_file(path, mode, *args, **more)

    with monkeypatch.context() as patched, contextlib.suppress(Killed):
        for name in OPERATIONS:
            counted(name)
        patched.setattr(Path, "open", opened)
        yield seen


@contextlib.contextmanager
def _in_s3(server: Any, after: int) -> Iterator[list[str]]:
    seen: list[str] = []

    def on_request(method: str, path: str) -> str | None:
        if method not in ("PUT", "POST", "DELETE"):
            return None
        seen.append(f"{method} {path}")
        return "AccessDenied" if len(seen) > after else None

    server.on_request = on_request
    with contextlib.suppress(CheckpointError):
        yield seen
    server.on_request = lambda method, path: None


def operations_until_killed(work: Callable[[], object], after: int) -> int | None:
    """Do ``work`` in a child process that SIGKILL ends at its operation on files after the first ``after``.

    Return how many operations there were, None if the child was killed.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            signal.alarm(120)
            number = _count_and_kill(work, after)
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
    return int(answer)


def _count_and_kill(work: Callable[[], object], after: int) -> int:
    counted = 0

    def count() -> None:
        nonlocal counted
        counted += 1
        if counted > after:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: (count(), function(*args, **options))[1]

    for name in (*OPERATIONS, "fsync"):
        setattr(os, name, before(getattr(os, name)))
    open_file = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode == "xb":
            count()
        return open_file(path, mode, *args, **options)

    Path.open = opened  # type: ignore[assignment, method-assign]
    work()
    return counted
