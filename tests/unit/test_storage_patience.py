"""A file system that does not answer: waited for, then reported, and never taken for damage."""

from __future__ import annotations

import errno
import io
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_train.checkpoints.find import newest_in, open_intact
from smp_train.storage import patience
from smp_train.storage.folder import FolderStorage
from tests.checkpoint_files import save


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counter[str]]:
    """Let the first calls of a function for a path with ``part`` in it fail; return how many calls there were."""
    monkeypatch.setattr(patience, "WAITS", (0.0,) * len(patience.WAITS))

    def install(module: Any, function: str, part: str, times: int, number: int = errno.EIO) -> Counter[str]:
        original, calls = getattr(module, function), Counter[str]()

        def attempt(path: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(path, int) and part in os.fspath(path):
                calls[part] += 1
                if calls[part] <= times:
                    raise OSError(number, os.strerror(number), os.fspath(path))
            return original(path, *args, **options)

        monkeypatch.setattr(module, function, attempt)
        return calls

    return install


@pytest.mark.parametrize(
    ("number", "failures", "expected"),
    [(errno.EIO, 2, 3), (errno.ESTALE, 2, 3), (errno.ETIMEDOUT, 2, 3), (errno.EIO, 99, 5), (errno.EACCES, 99, 1)],
)
def test_transient_errors_are_retried_and_other_errors_are_not(
    tmp_path: Path, failing: Any, caplog: pytest.LogCaptureFixture, number: int, failures: int, expected: int
) -> None:
    storage = FolderStorage(str(tmp_path))
    storage.put("run/a", b"content")
    calls = failing(os, "scandir", "run", failures, number)
    if failures < expected:
        assert list(storage.files()) == ["run/a"]
    else:  # a folder that cannot be listed does not count as empty
        with pytest.raises(OSError, match=os.strerror(number)):
            storage.files()
    assert calls["run"] == expected
    assert bool(caplog.messages) == (expected > 1)


@pytest.mark.parametrize("file", [".distcp", "COMMITTED"])
def test_a_checkpoint_that_cannot_be_read_is_not_damaged(tmp_path: Path, failing: Any, file: str) -> None:
    def newest() -> Any:
        folder, name = newest_in(tmp_path)
        return open_intact(folder.location, name, strict=False, mark=True)

    save(str(tmp_path), 2, 4, keep=9)
    names = sorted(tmp_path.rglob("*"))
    failing(io, "open", file, 2)
    assert newest().step == 4, "the newest one, not an older one"
    failing(io, "open", file, 99)
    with pytest.raises(Exception, match="Input/output error"):
        newest()
    assert sorted(tmp_path.rglob("*")) == names, "nothing is renamed, or marked as damaged"
