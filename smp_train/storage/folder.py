"""A folder of a local or shared POSIX file system, where a rename is atomic."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from smp_train.errors import CheckpointError
from smp_train.storage.base import Entry, Range
from smp_train.storage.patience import patiently

SMALL_FILE_BYTES = 64 << 20
"""Of files that are read whole: what others have put there must not fill the memory."""
PARTIAL = ".partial"
MAKE_ATTEMPTS = 10
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
"""Error numbers of file systems without hard links."""


class FolderStorage:
    """See `Storage`."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.root = Path(location)

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
            status = patiently(lambda: _status_of_opened(path), path)
        except FileNotFoundError:
            return None
        return Entry(status.st_size, status.st_mtime)

    def exists(self, name: str) -> bool:
        path = self.root / name
        try:
            return stat.S_ISREG(patiently(path.stat, path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

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

    def ranges(self, wanted: Iterable[Range]) -> Iterator[bytes]:
        with contextlib.ExitStack() as opened:
            file: BinaryIO
            current = None

            def read_part(name: str, start: int, length: int) -> bytes:
                nonlocal file, current
                try:
                    if name != current:
                        opened.close()
                        file, current = opened.enter_context((self.root / name).open("rb")), name
                    file.seek(start)
                    return file.read(length)
                except OSError:
                    current = None  # a handle stays stale after the server has restarted
                    raise

            for name, start, length, _ in wanted:
                yield patiently(partial(read_part, name, start, length), self.root / name)

    def put(self, name: str, data: bytes) -> None:
        def write() -> None:
            with self.writer(name) as file:
                file.write(data)

        patiently(write, self.root / name)  # each attempt writes a new temporary file

    def put_if_absent(self, name: str, data: bytes) -> bool:
        path = self.root / name

        def write() -> bool:
            with _partial(path) as partial:
                with _synced(partial) as file:
                    file.write(data)
                try:
                    os.link(partial, path)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno not in NO_LINKS:
                        raise
                    try:
                        path.open("xb").close()
                    except FileExistsError:
                        return False
                    partial.replace(path)
            sync_folder(path.parent)
            return True

        return patiently(write, path)

    @contextmanager
    def writer(self, name: str, size: int = 0) -> Iterator[BinaryIO]:
        """Yield a stream into a file, which is renamed to ``name`` when it is on stable storage."""
        path = self.root / name
        with _partial(path) as partial:
            with _synced(partial) as file:
                yield file
            partial.rename(path)
        sync_folder(path.parent)

    def move(self, name: str, to: str) -> None:
        target = self.root / to
        _make(target.parent)
        (self.root / name).rename(target)
        sync_folder(target.parent)

    def delete(self, name: str) -> None:
        path = self.root / name
        patiently(lambda: path.unlink(missing_ok=True), path)
        sync_folder(path.parent)  # before what was deleted after it
        self._remove_empty(path.parent)

    def delete_folder(self, folder: str, but: Collection[str] = ()) -> None:
        """Remove a folder, then the folders around it that are empty; or its contents except for some files."""
        path = self.root / folder
        files, folders = self.level(folder) if but else ({}, [""])  # "" is the folder itself
        for name in (name for name in (*files, *folders) if name not in but):
            remove = os.unlink if name in files else shutil.rmtree
            with contextlib.suppress(FileNotFoundError):  # another process removes it too
                patiently(partial(remove, path / name), path)
        self._remove_empty(path.parent)

    def discard_unfinished(self, ours: Callable[[str], bool], before: float) -> list[str]:
        found = []
        for where, folders, files in os.walk(self.root, topdown=False):
            empty = [""] if not folders and not files else []
            for file in [*filter(_is_partial, files), *empty]:
                path = os.path.join(where, file)
                name = os.path.relpath(path, self.root) + "/" * (not file)
                with contextlib.suppress(OSError):  # its writer is faster
                    if ours(name) and os.stat(path).st_mtime < before:
                        os.unlink(path) if file else os.rmdir(path)
                        self._remove_empty(Path(path).parent)
                        found.append(name)
        return found

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder, and those that it is in, as far as they are empty."""
        while folder != self.root and self.root in folder.parents:
            try:
                folder.rmdir()
            except OSError:
                return
            folder = folder.parent

    def now(self) -> float:
        """Return the time by the clock that stamps files here, which may be a server's."""
        probe = self.root / f".clock.{uuid.uuid4().hex[:8]}{PARTIAL}"

        def touch() -> float:
            probe.touch()
            return probe.stat().st_mtime

        try:
            return patiently(touch, probe)
        finally:
            probe.unlink(missing_ok=True)


def _files_below(folder: str, prefix: str) -> Iterator[tuple[str, Entry]]:
    """Yield the path below the top folder and the entry of each file. Raises OSError, which `os.walk` would hide."""
    files, folders = _level(folder, follow_symlinks=False)
    for name, entry in files.items():
        yield prefix + name, entry
    for name in folders:
        yield from _files_below(os.path.join(folder, name), f"{prefix}{name}/")


def _level(folder: str | Path, follow_symlinks: bool = True) -> tuple[dict[str, Entry], list[str]]:
    """Return the files in a folder, and the names of the folders in it, with ``follow_symlinks`` linked ones too."""
    files: dict[str, Entry] = {}
    folders = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process removes or renames it
                if entry.is_dir(follow_symlinks=follow_symlinks):
                    folders.append(entry.name)
                elif entry.is_file(follow_symlinks=False) and not _is_partial(entry.name):
                    status = entry.stat(follow_symlinks=False)
                    files[entry.name] = Entry(status.st_size, status.st_mtime)
    return files, sorted(folders)


def _status_of_opened(path: Path) -> os.stat_result:
    """Return the status of a file, opened first: network file systems ask their server at that moment only."""
    with path.open("rb") as file:
        return os.fstat(file.fileno())


def _is_partial(name: str) -> bool:
    """Return whether a file is one that is being written under another name."""
    return name.startswith(".") and name.endswith(PARTIAL)


def _make(folder: Path) -> None:
    """Make a folder and those that it is in, their names on stable storage."""
    for attempt in range(MAKE_ATTEMPTS):
        missing = [path for path in (folder, *folder.parents) if not path.is_dir()]
        try:
            for path in reversed(missing):
                path.mkdir(exist_ok=True)
                sync_folder(path.parent)
            return
        except FileNotFoundError:  # another process has removed one that was empty
            if attempt == MAKE_ATTEMPTS - 1:
                raise


@contextmanager
def _partial(path: Path) -> Iterator[Path]:
    """Make the folder of ``path``, yield a temporary name beside it, and remove what has that name afterwards."""
    _make(path.parent)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}{PARTIAL}")
    try:
        yield partial
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


@contextmanager
def _synced(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which is on stable storage when the context ends."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to stable storage."""
    # Some network file systems have no fsync of a folder; their servers make renames durable.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
