"""Where checkpoints live: what differs between a folder and an object store is behind `Storage`."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from smp_train.checkpoints.record import COMMITTED, DAMAGED, Committed, FileRecord, RunId, checksum, name_before
from smp_train.errors import CheckpointError, ConfigError
from smp_train.storage import client as s3

if TYPE_CHECKING:
    from smp_train.checkpoints.dcp import Reader, Writer

# `.llama_v2-100steps.5f3a9c01-0badcafe.staging`: hidden, so that it can be taken neither for a checkpoint nor for
# another attempt at the same step; the second number is `RunId.key`, absent where the run is unknown. Kinds:
# staging = being written; replaced = the older one of a step that is being saved again; deleting = no longer a
# checkpoint, on its way out.
VISIBLE_WITHIN_SECONDS = 5.0
TOUCHED_FOR_SECONDS = 60.0
"""Small files that are made for a moment are nobody's after this."""
PROBE = "shared"
"""What `CheckpointManager.check_shared` stages, for a moment and without the lock."""
SMALL_FILE_BYTES = 64 << 20
"""Of COMMITTED and meta.json, which are read whole."""
UNKNOWN = RunId()
_SCRATCH = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}(-(?P<key>[0-9a-f]{8}))?\.(?P<kind>staging|replaced|deleting)")


class Storage(Protocol):
    """One folder of checkpoints. ``name`` is always a direct entry of it, ``file`` a direct entry of that.

    ``run`` is the run that writes to it: what is there of other runs, or of other programs, is never replaced or swept.
    """

    location: str
    run: RunId

    def check_writable(self) -> None:
        """Create the folder where needed and prove that files can be written to it."""

    def names(self) -> list[str]:
        """Return the names of the folders that look like something, finished or not."""

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file under ``name``, by its path there; empty where there is no folder.

        Links are left out: what they lead to is no part of a checkpoint.
        """

    def has(self, name: str, file: str) -> bool:
        """Return whether ``file`` is there."""

    def read(self, name: str, file: str) -> bytes:
        """Return a small file's contents."""

    def checksum(self, name: str, file: str) -> FileRecord:
        """Read a file as it is stored and return its record."""

    def secure(self, name: str, file: str) -> FileRecord:
        """Bring a file that another program wrote to stable storage, and return its record."""

    def make(self, name: str) -> None:
        """Make a folder within one that is staged."""

    def put(self, name: str, file: str, data: bytes) -> FileRecord:
        """Write a small file so that it is there entirely or not at all, on stable storage on return."""

    def writer(self, name: str) -> Writer:
        """Return the DCP writer for the folder ``name``."""

    def reader(self, name: str, files: Mapping[str, int] | None = None) -> Reader:
        """Return the DCP reader for the folder ``name``, of its ``files`` (name: size) or of all that are there."""

    def stage(self, name: str) -> str:
        """Return the name under which a checkpoint is to be written that will be called ``name``."""

    def mark(self, staged: str, committed: Committed) -> None:
        """Write into ``staged`` that it is complete, where that comes before the name."""

    def publish(self, staged: str, name: str, committed: Committed) -> str:
        """Make the complete ``staged`` visible as ``name``, at once; an older one of the run then goes.

        Where the name is taken by anything else, the run's id is added to it. Returns the name that it has.
        """

    def delete(self, name: str) -> None:
        """Remove a folder; what is left when that is cut short does not look like a checkpoint."""

    def set_aside(self, name: str, kind: str = DAMAGED) -> str:
        """Rename a damaged or an abandoned checkpoint so that it no longer counts; return what is called so now."""

    def aside(self, kind: str = DAMAGED) -> list[str]:
        """Return the names of checkpoints that were set aside."""

    def drop_aside(self, name: str, kind: str = DAMAGED) -> None:
        """Remove one of them; a newer checkpoint of the same step stays."""

    def sweep(self, idle: float) -> list[str]:
        """Finish or remove what interrupted saves of the run left, if untouched for ``idle`` seconds."""

    def swap(self, file: str, old: bytes | None, new: bytes) -> bool:
        """Make ``new`` the contents of a file of the folder itself if they are ``old`` (None: if it is not there)."""

    def peek(self, file: str) -> tuple[bytes, float] | None:
        """Return such a file's contents and the seconds since it was stamped; None where it is not there."""

    def stamp(self, file: str, data: bytes) -> None:
        """Let such a file, whose contents are ``data``, be as new."""

    def drop(self, file: str) -> None:
        """Remove such a file."""


def open_storage(location: str | os.PathLike[str], run: RunId = UNKNOWN) -> Storage:
    """Return the storage for a folder of checkpoints. Raises `ConfigError` for one that is not supported."""
    place = place_of(location)
    if s3.is_s3(place):
        from smp_train.checkpoints.storage_s3 import S3Storage

        return S3Storage(place, run)
    return LocalStorage(place, run)


def is_own(storage: Storage, name: str, file: str = COMMITTED) -> bool:
    """Return whether ``file``, in the form of COMMITTED, is there and says that the storage's run wrote it."""
    try:
        return storage.has(name, file) and Committed.from_bytes(storage.read(name, file)).run.id == storage.run.id
    except (ValueError, FileNotFoundError, CheckpointError):
        return False


def taken(storage: Storage, name: str) -> CheckpointError:
    """Return what to raise where no name is free for a checkpoint."""
    return CheckpointError(
        f"{os.path.join(storage.location, name)} is there already and not a checkpoint of this run: it is left as it "
        "is; move it away, or give another folder"
    )


def place_of(location: str | os.PathLike[str]) -> str:
    """Return a location in its one normal form: an absolute path, or ``s3://bucket/prefix`` without a slash at the end.

    Raises `ConfigError` for another kind of place.
    """
    text = os.fspath(location)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if scheme is None:
        return os.path.abspath(os.path.expanduser(text))
    if not s3.is_s3(text):
        raise ConfigError(
            f"checkpoint folder {text}: {scheme[1]}:// is not supported; give a folder that all nodes share, or s3://"
        )
    bucket, key = s3.split(text)
    return posixpath.join(s3.SCHEME + bucket, posixpath.normpath("/" + key)[1:]).rstrip("/")


def parent_of(place: str) -> tuple[str, str]:
    """Return (folder, name) of a place in normal form; of a bucket or the root folder, that itself and nothing."""
    if s3.is_s3(place) and place.count("/") == 2:
        return place, ""
    return os.path.split(place)


def absent(place: str) -> str | None:
    """Say why ``place`` can hold no checkpoint. A prefix of S3 with nothing in it is as good as an empty folder."""
    if s3.is_s3(place) or os.path.isdir(place):
        return None
    return "is a file" if os.path.exists(place) else "does not exist"


class LocalStorage:
    """A folder of a local or shared POSIX file system, where a rename is atomic."""

    def __init__(self, location: str, run: RunId = UNKNOWN) -> None:
        self.location, self.run = location, run
        self.root = Path(location)

    def check_writable(self) -> None:
        """Create the folder where needed and prove that files can be written; else `CheckpointError`."""
        probe = self.root / f".probe-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            if self.root.exists() and not self.root.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a folder")
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                _write_durably(probe, b"smp-train\n")
            finally:
                probe.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"cannot write to checkpoint folder {self.location}: {error.strerror or error}; "
                "give another --checkpoint_dir"
            ) from None

    def names(self) -> list[str]:
        """Return the names of the sub-folders; empty where the folder does not exist."""
        try:
            with os.scandir(self.root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except FileNotFoundError:
            return []

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file under ``name``, by its path there; empty where there is no folder."""
        top, found = self.root / name, {}
        if os.path.dirname(name) and top.is_symlink():
            return {}
        for folder, _, files in os.walk(top):
            for file in files:
                path = os.path.join(folder, file)
                with contextlib.suppress(FileNotFoundError):  # a job is removing, or renaming, it just now
                    entry = os.lstat(path)
                    if stat.S_ISREG(entry.st_mode):
                        found[os.path.relpath(path, top)] = entry.st_size
        return found

    def has(self, name: str, file: str) -> bool:
        """Return whether ``file`` is there."""
        return (self.root / name / file).is_file()

    def read(self, name: str, file: str) -> bytes:
        """Return a small file's contents. Raises `CheckpointError` for a large one, or a link."""
        path = self.root / name / file
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link; a checkpoint is made of files of its own")
        if path.stat().st_size > SMALL_FILE_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; no more than {SMALL_FILE_BYTES} are read")
        return path.read_bytes()

    def checksum(self, name: str, file: str) -> FileRecord:
        """Read a file as it is stored and return its record."""
        with (self.root / name / file).open("rb") as stream:
            return checksum(stream)

    def secure(self, name: str, file: str) -> FileRecord:
        """Bring a file that another program wrote to stable storage, and return its record."""
        with (self.root / name / file).open("rb") as stream:
            os.fsync(stream.fileno())
            return checksum(stream)

    def make(self, name: str) -> None:
        """Make a folder within one that is staged."""
        (self.root / name).mkdir(exist_ok=True)

    def put(self, name: str, file: str, data: bytes) -> FileRecord:
        """Write a small file so that it is there entirely or not at all, on stable storage on return."""
        folder = self.root / name
        scratch = folder / f".{file}.tmp"
        _write_durably(scratch, data)
        scratch.rename(folder / file)
        _sync_folder(folder)
        return self.checksum(name, file)

    def writer(self, name: str) -> Writer:
        """Return the DCP writer for the folder ``name``."""
        from smp_train.checkpoints.dcp import LocalWriter

        return LocalWriter(self.root / name)

    def reader(self, name: str, files: Mapping[str, int] | None = None) -> Reader:
        """Return the DCP reader for the folder ``name``, of its ``files`` (name: size) or of all that are there."""
        from smp_train.checkpoints.dcp import LocalReader

        return LocalReader(self.root / name, self.sizes(name) if files is None else files)

    def stage(self, name: str) -> str:
        """Create a folder beside the final one, on the same file system; return its name."""
        staged = self._scratch_name(name, "staging")
        (self.root / staged).mkdir(parents=True)
        return staged

    def mark(self, staged: str, committed: Committed) -> None:
        """Write COMMITTED into the staging folder: the last file of a checkpoint."""
        self.put(staged, COMMITTED, committed.to_bytes())

    def publish(self, staged: str, name: str, committed: Committed) -> str:
        """Make the complete ``staged`` visible as ``name``, at once. An older one of the run goes after that.

        Between the two renames neither has the final name; the older one, still complete, then counts under
        its scratch name (see `interrupted`), so no moment exists at which a kill would lose both.
        """
        for folder, _, _ in os.walk(self.root / staged):
            _sync_folder(Path(folder))
        for final in [name, f"{name}-{self.run.id}"] if self.run.id else [name]:
            older = None
            if is_own(self, final):
                older = self._scratch_name(final, "replaced")
                (self.root / final).rename(self.root / older)
            elif os.path.lexists(self.root / final):
                continue
            try:
                (self.root / staged).rename(self.root / final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                continue  # another run was faster
            _sync_folder(self.root)
            if older is not None:
                with contextlib.suppress(OSError):  # a later sweep removes it
                    self.delete(older)
            return final
        raise taken(self, name)

    def delete(self, name: str) -> None:
        """Remove a folder; it loses its name first, so that what is left by a kill is no checkpoint."""
        folder = self.root / name
        with contextlib.suppress(FileNotFoundError):  # another process removes it too, as `smp-train checkpoint prune`
            if _SCRATCH.fullmatch(name) is None:
                gone = self.root / self._scratch_name(name, "deleting")
                folder.rename(gone)
                folder = gone
            shutil.rmtree(folder)

    def set_aside(self, name: str, kind: str = DAMAGED) -> str:
        """Rename a checkpoint to ``<name>.damaged`` (or ``.damaged-2``, …), or likewise; return the new name."""
        scratch = _SCRATCH.fullmatch(name)  # it lost its name to a replacement that was cut short
        first = f"{scratch['name'] if scratch else name}.{kind}"
        attempt, aside = 1, first
        while (self.root / aside).exists():
            attempt += 1
            aside = f"{first}-{attempt}"
        (self.root / name).rename(self.root / aside)
        return aside

    def aside(self, kind: str = DAMAGED) -> list[str]:
        """Return the names of checkpoints that were set aside."""
        names = [(name, name_before(name)) for name in self.names()]
        return [name for name, before in names if name.removeprefix(before).startswith(f".{kind}")]

    def drop_aside(self, name: str, kind: str = DAMAGED) -> None:
        """Remove one of them; a newer checkpoint of the same step stays."""
        self.delete(name)

    def sweep(self, idle: float) -> list[str]:
        """Finish or remove what earlier, interrupted saves of the run left, if untouched for ``idle`` seconds.

        Returns what was done, one line each. What was touched later may belong to another job that is saving.
        """
        if not self.root.is_dir():
            return []
        done = []
        rescued = interrupted(self)
        left = [match for match in map(_SCRATCH.fullmatch, self.names()) if match is not None]
        now = self._now()
        for pattern in (".probe-*", ".clock-*", ".lock*-????????"):
            for file in self.root.glob(pattern):
                with contextlib.suppress(FileNotFoundError):  # its maker is faster
                    if now - file.stat().st_mtime > max(idle, TOUCHED_FOR_SECONDS):
                        file.unlink()
        for match in left:
            name = match[0]
            with contextlib.suppress(FileNotFoundError):  # its maker is about to rename or to remove it
                probe = match["name"] == PROBE
                if (match["key"] or "") != self.run.key and not probe:
                    continue
                least = max(idle, TOUCHED_FOR_SECONDS) if probe else idle
                if now - _last_touched(self.root / name) < least:
                    continue
                if rescued.get(match["name"]) == name:
                    (self.root / name).rename(self.root / match["name"])
                    done.append(f"gave {match['name']} its name back")
                else:
                    shutil.rmtree(self.root / name)
                    done.append(f"removed {name}, left by an interrupted {match['kind']}")
        return done

    def _scratch_name(self, name: str, kind: str) -> str:
        match = _SCRATCH.fullmatch(name)
        key = f"-{self.run.key}" if self.run.key else ""
        return f".{match['name'] if match else name}.{uuid.uuid4().hex[:8]}{key}.{kind}"

    def swap(self, file: str, old: bytes | None, new: bytes) -> bool:
        """Make ``new`` the contents of a file of the folder itself if they are ``old`` (None: if it is not there)."""
        path, mine = self.root / file, self.root / f"{file}-{uuid.uuid4().hex[:8]}"
        self.root.mkdir(parents=True, exist_ok=True)
        try:
            if old is not None:
                try:
                    path.rename(mine)
                except FileNotFoundError:
                    return False
                if mine.read_bytes() != old:  # somebody was faster: give it back
                    _link(mine, path)
                    return False
            _write_durably(mine, new)
            return _link(mine, path)
        finally:
            mine.unlink(missing_ok=True)

    def peek(self, file: str) -> tuple[bytes, float] | None:
        """Return such a file's contents and the seconds since it was stamped; None where it is not there."""
        try:
            # Opened first: network file systems ask their server then, and may answer from memory otherwise.
            with (self.root / file).open("rb") as stream:
                return stream.read(), self._now() - os.fstat(stream.fileno()).st_mtime
        except FileNotFoundError:
            return None

    def stamp(self, file: str, data: bytes) -> None:
        """Let such a file, whose contents are ``data``, be as new."""
        os.utime(self.root / file)

    def drop(self, file: str) -> None:
        """Remove such a file."""
        (self.root / file).unlink(missing_ok=True)

    def _now(self) -> float:
        """Return the time by the clock that stamps files here, which may be a server's: ours may be wrong."""
        probe = self.root / f".clock-{uuid.uuid4().hex[:8]}"
        try:
            probe.touch()
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


def interrupted(storage: Storage) -> dict[str, str]:
    """Return {final name: scratch name} of complete checkpoints whose replacement was cut short."""
    names = storage.names()
    found = {}
    for name in names:
        match = _SCRATCH.fullmatch(name)
        if match is None or match["kind"] != "replaced" or match["name"] in names:
            continue
        if storage.has(name, COMMITTED):
            found[match["name"]] = name
    return found


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _link(source: Path, path: Path) -> bool:
    """Give the file ``source`` the name ``path`` too, if nobody has it."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            with path.open("xb") as stream:
                stream.write(source.read_bytes())
        except FileExistsError:
            return False
    return True


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some network file systems know no fsync of a folder; their renames are durable on the server's word.
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _last_touched(folder: Path) -> float:
    newest = folder.stat().st_mtime
    with os.scandir(folder) as entries:
        for entry in entries:
            newest = max(newest, entry.stat().st_mtime)
    return newest


def wait_for(seen: Callable[[], bool]) -> bool:
    """Ask ``seen`` until it says yes or `VISIBLE_WITHIN_SECONDS` have passed; return what it said last.

    A network file system may show what another node has written a little late.
    """
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not seen():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True
