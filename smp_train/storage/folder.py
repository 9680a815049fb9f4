"""A folder of a local or shared POSIX file system, where a rename is atomic."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from smp_train.errors import CheckpointError
from smp_train.storage.base import Entry, Range, Storage
from smp_train.storage.patience import patiently

SMALL_FILE_BYTES = 64 << 20
"""Largest file that is read whole, so that a stranger's file cannot fill the memory."""
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
"""Error numbers of file systems without hard links."""
PARTIAL = ".partial"
"""Suffix of a hidden temporary name, under which a file is written before it is renamed."""


class FolderStorage(Storage):
    """See `Storage`."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.root = Path(location)

    # --- reading

    def files(self, folder: str = "") -> dict[str, Entry]:
        top = self.root / folder
        if os.path.dirname(folder) and top.is_symlink():
            return {}
        return patiently(lambda: dict(_files_below(str(top), "")), top)

    def level(self, folder: str = "") -> tuple[dict[str, Entry], list[str]]:
        path = self.root / folder
        return patiently(lambda: _level(path), path)

    def entry(self, name: str) -> Entry | None:
        path = self.root / name
        try:
            status = patiently(lambda: _status(path), path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return Entry(status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None

    def read(self, name: str) -> bytes:
        """Return a small file's content. Raises `CheckpointError` for a large file, or a link."""
        path = self.root / name
        status = patiently(path.lstat, path)
        if stat.S_ISLNK(status.st_mode):
            raise CheckpointError(f"{path} is a link; a checkpoint is made of files of its own")
        if status.st_size > SMALL_FILE_BYTES:
            raise CheckpointError(f"{path} has {status.st_size} bytes; no more than {SMALL_FILE_BYTES} are read")
        return patiently(path.read_bytes, path)

    def read_if_there(self, name: str) -> bytes | None:
        try:
            return self.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def ranges(self, spans: Iterable[Range]) -> Iterator[bytes]:
        for name, start, length, _ in spans:
            path = self.root / name
            yield patiently(partial(_read_range, path, start, length), path)

    # --- writing

    def put(self, name: str, data: bytes) -> None:
        self._write(name, data, Path.rename)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        try:
            self._write(name, data, _link)
        except FileExistsError:
            return False
        return True

    def _write(self, name: str, data: bytes, publish: Callable[[Path, Path], object]) -> None:
        def write() -> None:  # each attempt writes a new temporary file
            with _written(self.root / name, publish) as file:
                file.write(data)

        patiently(write, self.root / name)

    def writer(self, name: str, size: int = 0) -> AbstractContextManager[BinaryIO]:
        """Return a stream into a temporary file, which is synced and renamed to ``name`` at the end."""
        return _written(self.root / name, Path.rename)

    def move(self, name: str, to: str) -> None:
        target = self.root / to
        _make(target.parent)
        (self.root / name).rename(target)
        sync_folder(target.parent)

    def delete(self, name: str) -> None:
        path = self.root / name
        patiently(lambda: path.unlink(missing_ok=True), path)
        sync_folder(path.parent)  # later deletions must not reach the disk first
        self._remove_empty(path.parent)

    def delete_folder(self, folder: str, but: Collection[str] = ()) -> None:
        path = self.root / folder
        files, folders = self.level(folder)
        for name in (name for name in (*files, *folders) if name not in but):
            remove = os.unlink if name in files else shutil.rmtree
            with suppress(FileNotFoundError):  # another process deletes it too
                patiently(partial(remove, path / name), path)
        self._remove_empty(path)

    def discard_unfinished(self, ours: Callable[[str], bool], killed_before: float) -> list[str]:
        discarded = []
        walk = os.walk(self.root, topdown=False)  # unlike `rglob`, it ignores folders that disappear
        for path in (Path(folder, file) for folder, _, files in walk for file in filter(_is_partial, files)):
            name = path.relative_to(self.root).as_posix()
            with suppress(OSError):  # its writer has just renamed it
                if ours(name) and path.stat().st_mtime < killed_before:
                    path.unlink()
                    self._remove_empty(path.parent)
                    discarded.append(name)
        return discarded

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder below the root if it is empty."""
        if self.root in folder.parents:
            with suppress(OSError):
                folder.rmdir()

    def now(self) -> float:
        """Return the time of a file written now: a file server may have its own clock."""
        probe = f".clock.{uuid.uuid4().hex[:8]}{PARTIAL}"
        try:
            self.put(probe, b"")
            return (self.root / probe).stat().st_mtime
        finally:
            (self.root / probe).unlink(missing_ok=True)


def _files_below(folder: str, prefix: str) -> Iterator[tuple[str, Entry]]:
    """Yield the relative path and entry of each file. Raises OSError, which `os.walk` would hide."""
    files, folders = _level(folder, follow_symlinks=False)
    for name, entry in files.items():
        yield prefix + name, entry
    for name in folders:
        yield from _files_below(os.path.join(folder, name), f"{prefix}{name}/")


def _level(folder: str | Path, follow_symlinks: bool = True) -> tuple[dict[str, Entry], list[str]]:
    """Return the files in a folder and the names of its subfolders; links to folders count as folders by default."""
    files: dict[str, Entry] = {}
    folders = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # another process deletes or renames it
                if entry.is_dir(follow_symlinks=follow_symlinks):
                    folders.append(entry.name)
                elif entry.is_file(follow_symlinks=False) and not _is_partial(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    files[entry.name] = Entry(status.st_size, status.st_mtime)
    return files, sorted(folders)


def _read_range(path: Path, start: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(length)


def _status(path: Path) -> os.stat_result:
    """Return a file's status after opening it: a network file system asks its server only when a file is opened."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _written(path: Path, publish: Callable[[Path, Path], object]) -> Iterator[BinaryIO]:
    """Yield a stream into a hidden file next to ``path``; then sync it, let ``publish`` name it, sync the folder."""
    _make(path.parent)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        with draft.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(draft, path)
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    sync_folder(path.parent)


def _link(draft: Path, path: Path) -> None:
    """Give a written file the name ``path``. Raises FileExistsError if the name is taken."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        path.open("xb").close()  # a kill before the rename leaves an empty file
        draft.rename(path)


def _is_partial(name: str) -> bool:
    return name.startswith(".") and name.endswith(PARTIAL)


def _make(folder: Path) -> None:
    """Make a folder, with the folders around it, and sync their names."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to stable storage."""
    # Some network file systems cannot fsync a folder; their servers make renames durable.
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
