"""A folder that a model is written to as Hugging Face has it, on a file system or in S3."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from smp_train.errors import CheckpointError, ConfigError
from smp_train.models.hugging_face import CONFIG_FILE
from smp_train.models.weight_files import INDEXES, weight_files
from smp_train.storage.paths import Place, S3Path, names_in, place

SCRATCH = ".partial"
"""Sub-folder in which a model is written that is to replace another one."""
OF_A_MODEL = re.compile(r"(pytorch_)?model(-\d+-of-\d+)?\.(safetensors|bin)")
"""What transformers calls the weights it writes; others beside them, such as an adapter's, are none of ours."""


class ModelFolder(Protocol):
    """Where files are there entirely or not at all."""

    def stream(self, name: str, size: int) -> contextlib.AbstractContextManager[BinaryIO]:
        """Return a file of about ``size`` bytes to write, there when the context is left without an error."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def scratch(self) -> ModelFolder:
        """Return the folder within this one from which `take_over` takes; it is empty."""

    def take_over(self, name: str) -> None:
        """Move a file of the scratch folder here, in place of one of that name."""

    def written(self) -> list[str]:
        """Return the paths of all files."""

    def clear(self) -> None:
        """Remove all that is in the folder, and it."""


class _Local:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def stream(self, name: str, size: int) -> Iterator[BinaryIO]:
        final = self._folder / name
        scratch = final.with_name(f".{final.name}.partial")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            with scratch.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            scratch.rename(final)
        except OSError as error:
            raise CheckpointError(
                f"cannot write {final}: {error.strerror or error}; give another folder"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        (self._folder / name).unlink()

    def scratch(self) -> _Local:
        made = _Local(self._folder / SCRATCH)
        made.clear()
        return made

    def take_over(self, name: str) -> None:
        (self._folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self._folder / SCRATCH / name).rename(self._folder / name)

    def written(self) -> list[str]:
        return [path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file()]

    def clear(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder)


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

    def scratch(self) -> _InS3:
        made = _InS3(S3Path(f"{self._storage.location}/{SCRATCH}"))
        made.clear()
        return made

    def take_over(self, name: str) -> None:
        self._storage.copy(f"{SCRATCH}/{name}", name)

    def written(self) -> list[str]:
        return list(self._storage.entries(""))

    def clear(self) -> None:
        self._storage.remove_all("")


def _open(there: Place) -> ModelFolder:
    return _InS3(there) if isinstance(there, S3Path) else _Local(there)


@contextmanager
def writing(location: str | os.PathLike[str], replace: bool = False) -> Iterator[ModelFolder]:
    """Yield a folder to write a model to, which is at ``location`` when the context is left without an error.

    Raises `ConfigError` where a model is there and ``replace`` is not set. Where it is, the old model stays until the
    new one is whole: there must be room for both. What is no part of it stays in any case.
    """
    there = place(location)
    folder = _open(there)
    with _explained(there):
        names = set(names_in(there))
        held = [name for name in (CONFIG_FILE, *INDEXES) if name in names] + weight_files(there)
    if not held:
        yield folder
        return
    if not replace:
        raise ConfigError(f"{there} holds a model already; give another folder, or remove it")
    with _explained(there):
        old = _files_of_the_model(there, names)
        scratch = folder.scratch()
    try:
        yield scratch
    except BaseException:
        with contextlib.suppress(OSError, CheckpointError):
            scratch.clear()
        raise
    with _explained(there):
        _move_in(folder, scratch, old)


def _move_in(folder: ModelFolder, scratch: ModelFolder, old: list[str]) -> None:
    """Replace one model by another. When this is cut short, the folder does not open, and the next time mends it."""
    new = sorted(scratch.written(), key=lambda name: (name == CONFIG_FILE, name))
    for name in old:  # config.json first
        if name == CONFIG_FILE or name not in new:
            folder.remove(name)
    for name in new:
        folder.take_over(name)
    scratch.clear()


def _files_of_the_model(there: Place, names: set[str]) -> list[str]:
    """Return config.json, the weights that are transformers' or in an index, then the indexes: by them it is known."""
    found = {name for name in names if OF_A_MODEL.fullmatch(name)}
    for index in INDEXES:
        if index in names:
            with contextlib.suppress(ValueError, KeyError, AttributeError):
                found |= names & set(json.loads((there / index).read_text(encoding="utf-8"))["weight_map"].values())
    return [name for name in (CONFIG_FILE, *sorted(found), *INDEXES) if name in names]


@contextmanager
def _explained(there: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write to {there}: {error.strerror}; give another folder") from None


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
        for path in sorted(files, key=lambda path: (path.name == CONFIG_FILE, path.name)):
            put(folder, path.relative_to(made).as_posix(), path.read_bytes())
