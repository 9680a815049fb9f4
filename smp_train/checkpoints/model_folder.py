"""A folder that a model is written to as Hugging Face has it, on a file system or in S3."""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.weight_files import INDEXES, weight_files
from smp_train.runtime.places import Place, S3Path, names_in, place

CONFIG = "config.json"


class ModelFolder(Protocol):
    """Where files are there entirely or not at all."""

    def stream(self, name: str, size: int) -> contextlib.AbstractContextManager[BinaryIO]:
        """Return a file of about ``size`` bytes to write, there when the context is left without an error."""

    def remove(self, name: str) -> None:
        """Remove a file."""


class _Local:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def stream(self, name: str, size: int) -> Iterator[BinaryIO]:
        scratch = self._folder / f".{name}.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            scratch.rename(self._folder / name)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self._folder / name}: {error.strerror or error}; give another folder"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()


class _InS3:
    def __init__(self, folder: S3Path) -> None:
        from smp_train.checkpoints.storage_s3 import S3Storage

        self._storage = S3Storage(str(folder))

    @contextmanager
    def stream(self, name: str, size: int) -> Iterator[BinaryIO]:
        from smp_train.checkpoints.dcp_s3 import Upload

        upload: Any = Upload(self._storage, self._storage.key(name), size)
        try:
            yield upload
        except BaseException as error:
            upload.abort(error)
            raise
        upload.complete()

    def remove(self, name: str) -> None:
        self._storage.ask("delete_object", key=self._storage.key(name))


def _open(there: Place) -> ModelFolder:
    return _InS3(there) if isinstance(there, S3Path) else _Local(there)


def free_folder(location: str | os.PathLike[str], replace: bool = False) -> ModelFolder:
    """Return the folder, in which there is no model.

    Raises `ConfigError` where it holds one, which ``replace`` removes; `CheckpointError` where it cannot be written to.
    """
    there = place(location)
    folder = _open(there)
    try:
        names = set(names_in(there))
        held = [name for name in (CONFIG, *INDEXES) if name in names] + weight_files(there)
        if held and not replace:
            raise ConfigError(f"{there} holds a model already; give another folder, or remove it")
        for name in held:
            folder.remove(name)
    except OSError as error:
        raise CheckpointError(f"cannot write to {there}: {error.strerror}; give another folder") from None
    return folder


def check_writable(location: str | os.PathLike[str], flag: str) -> None:
    """Prove that files can be written to ``location``, which ``flag`` gave, and removed; else `CheckpointError`."""
    folder, probe = _open(place(location)), f".probe-{uuid.uuid4().hex[:8]}"
    try:
        put(folder, probe, b"smp-train\n")
        folder.remove(probe)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"--{flag}: {error}") from None


def put(folder: ModelFolder, name: str, data: bytes) -> None:
    """Write a small file."""
    with folder.stream(name, len(data)) as file:
        file.write(data)


def put_made(folder: ModelFolder, make: Callable[[str], Any]) -> None:
    """Write the files that ``make`` writes to a folder of this machine, config.json last."""
    with tempfile.TemporaryDirectory() as made:
        make(made)
        files = [path for path in Path(made).rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: (path.name == CONFIG, path.name)):
            put(folder, path.relative_to(made).as_posix(), path.read_bytes())
