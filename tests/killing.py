"""A process that is killed: none of its operations on files, or in S3, after the n-th has any effect."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
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
