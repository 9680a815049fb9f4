"""A file system that does not answer: waited for, then reported, and never taken for damage."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_train.checkpoints.checkpoint import Checkpoint
from smp_train.checkpoints.find import newest_in, open_intact
from smp_train.errors import CheckpointError
from smp_train.storage import patience
from smp_train.storage.folder import FolderStorage
from tests.checkpoint_files import save


class Unanswered:
    """Fails the first ``times`` calls that concern a path with ``name`` in it."""

    def __init__(self, name: str, times: int, number: int = errno.EIO) -> None:
        self.name, self.times, self.number, self.calls = name, times, number, 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(path: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(path, int) and self.name in os.fspath(path):
                self.calls += 1
                if self.calls <= self.times:
                    raise OSError(self.number, os.strerror(self.number), os.fspath(path))
            return call(path, *args, **options)

        return attempt


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "WAITS", (0.0,) * len(patience.WAITS))


@pytest.mark.parametrize(
    ("number", "failures", "calls"),
    [(errno.EIO, 2, 3), (errno.ESTALE, 2, 3), (errno.ETIMEDOUT, 2, 3), (errno.EIO, 99, 5), (errno.EACCES, 99, 1)],
)
def test_transient_errors_are_retried_and_other_errors_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    number: int, failures: int, calls: int,
) -> None:  # fmt: skip
    storage = FolderStorage(str(tmp_path))
    storage.put("run/a", b"content")
    server = Unanswered("run", failures, number)
    monkeypatch.setattr(os, "scandir", server.wrap(os.scandir))
    if failures < calls:
        assert list(storage.files()) == ["run/a"]
    else:  # a folder that cannot be listed does not count as empty
        with pytest.raises(OSError, match=os.strerror(number)):
            storage.files()
    assert server.calls == calls
    assert caplog.text.count("trying again") == (calls > 1)


@pytest.mark.parametrize(("times", "found"), [(2, True), (99, False)])
@pytest.mark.parametrize("file", [".distcp", "COMMITTED"])
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, times: int, found: bool
) -> None:
    def newest() -> Checkpoint | None:
        folder, name = newest_in(tmp_path)
        return open_intact(folder.location, name, strict=False, mark=True)

    save(str(tmp_path), 2, 4, keep=9)
    names = sorted(str(path) for path in tmp_path.rglob("*"))
    server = Unanswered(file, times)
    monkeypatch.setattr(io, "open", server.wrap(io.open))
    if found:
        checkpoint = newest()
        assert checkpoint is not None
        assert checkpoint.step == 4, "the newest one, not an older one"
    else:
        with pytest.raises((CheckpointError, OSError), match="Input/output error"):
            newest()
    assert server.calls > 2
    assert sorted(str(path) for path in tmp_path.rglob("*")) == names, "nothing is renamed, or marked as damaged"
