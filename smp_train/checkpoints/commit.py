"""How a checkpoint becomes one, in a folder and in S3: the file that is written last decides.

``<name>/<attempt>/...`` are the files of one attempt at a save, under names that no other attempt uses.
``<name>/COMMITTED`` is put last, at once, and names the attempt that counts. So a step that is saved again is replaced
at once, and a writer that its own job has given up does no harm with what it still writes. An attempt is eight random
digits and `RunId.key`; its first file says which run's it is.

Versions before wrote a checkpoint's files beside COMMITTED where it was in a folder, and set it aside by renaming the
folder: such are read, replaced and deleted alike.
"""

from __future__ import annotations

import logging
import math
import os
import posixpath
import re
import shutil
import socket
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from smp_train import storage
from smp_train.checkpoints.dcp import LocalReader, Reader
from smp_train.checkpoints.dcp_storage import S3Reader, TreeWriter
from smp_train.checkpoints.manifest import (
    COMMITTED,
    DAMAGED,
    Committed,
    FileRecord,
    RunId,
    checksum_of,
    name_before,
    parse_folder_name,
)
from smp_train.errors import CheckpointError
from smp_train.storage import Range, is_s3
from smp_train.storage.folder import sync_folder
from smp_train.storage.s3 import PART_BYTES

logger = logging.getLogger(__name__)

ASIDE = f"{COMMITTED}."
"""How COMMITTED is called once the checkpoint has been set aside; the reason comes after it."""
CLAIM = ".run"
"""First file of an attempt: two runs that begin the same name at the same time see each other by it."""
PROBE = ".probe-"
"""How files are called that are there for a moment, to see who can write to the folder, or sees it."""
PROBE_SECONDS = 60.0
"""A probe, or a temporary file, that has not been touched for so long is nobody's."""
IN_FLIGHT_SECONDS = 60.0
"""The last request of a killed process to S3, which may be its COMMITTED, may still take effect for so long."""
UNKNOWN = RunId()
ATTEMPT = re.compile("[0-9a-f]{8}(-(?P<key>[0-9a-f]{8}))?")
"""Names of the sub-folders of a checkpoint, one for each attempt to save it."""
_BEFORE = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}(-(?P<key>[0-9a-f]{8}))?\.(?P<kind>staging|replaced|deleting)")
"""Scratch folders of versions before. ``replaced`` holds the older checkpoint of a step that was being saved again."""


def open_folder(location: str | os.PathLike[str], run: RunId = UNKNOWN) -> CheckpointFolder:
    """Return the folder of checkpoints at a location. Raises `ConfigError` for a kind of URL that is not supported."""
    return CheckpointFolder(storage.at(location), run)


def parent_of(place: str) -> tuple[str, str]:
    """Return (folder, name) of a place in normal form; of a bucket or the root folder, that itself and nothing."""
    if is_s3(place) and place.count("/") == 2:
        return place, ""
    return os.path.split(place)


def absent(place: str) -> str | None:
    """Return why ``place`` can hold no checkpoint. A prefix of S3 with nothing in it is as good as an empty folder."""
    if is_s3(place) or os.path.isdir(place):
        return None
    return "is a file" if os.path.exists(place) else "does not exist"


class CheckpointFolder:
    """A folder of checkpoints. ``name`` is a checkpoint's, or ``<name>/<attempt>``; ``file`` is below that.

    ``run`` is the run that writes: what is there of other runs, or of other programs, is never replaced or removed.
    """

    def __init__(self, files: storage.Storage, run: RunId = UNKNOWN) -> None:
        self.storage, self.run, self.location = files, run, files.location
        self._published: set[str] = set()
        """Attempts whose COMMITTED was sent, answered or not: where it was not, it may still have its effect."""

    # --- looking and reading

    def names(self) -> list[str]:
        """Return the names of the folders, checkpoints or not."""
        return sorted(self.storage.level()[1])

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file below ``name``; links are left out."""
        return {file: entry.size for file, entry in self.storage.files(name).items()}

    def has(self, name: str, file: str) -> bool:
        """Return whether ``file`` is there."""
        return self.storage.exists(posixpath.join(name, file))

    def read(self, name: str, file: str) -> bytes:
        """Return a small file's content."""
        return self.storage.read(posixpath.join(name, file))

    def checksum(self, name: str, file: str, size: int) -> FileRecord:
        """Read a file as it is stored and return its record."""
        path = posixpath.join(name, file)
        starts = range(0, size, PART_BYTES)
        return checksum_of(self.storage.ranges(Range(path, at, min(PART_BYTES, size - at)) for at in starts))

    def reader(self, name: str, files: Mapping[str, int] | None = None) -> Reader:
        """Return the DCP reader of the tree ``name``, of its ``files`` (name: size) or of all that are there."""
        files = self.sizes(name) if files is None else files
        if is_s3(self.location):
            return S3Reader(self.storage, posixpath.normpath(name), files)
        return LocalReader(Path(self.location, name), files)

    def aside(self, kind: str = DAMAGED) -> list[str]:
        """Return the names of checkpoints that were set aside."""
        return [name for name in self.names() if self._is_aside(name, kind)]

    def _is_aside(self, name: str, kind: str) -> bool:
        if name != name_before(name):
            return name.removeprefix(name_before(name)).startswith(f".{kind}")
        return parse_folder_name(name) is not None and any(
            file.startswith(ASIDE + kind) for file in self.storage.level(name)[0]
        )

    def _is_own(self, name: str, file: str = COMMITTED) -> bool:
        """Return whether ``file``, in the form of COMMITTED, is there and says that this run wrote it."""
        try:
            return self.has(name, file) and Committed.from_bytes(self.read(name, file)).run.id == self.run.id
        except (ValueError, FileNotFoundError, CheckpointError):
            return False

    def _is_attempt(self, folder: str) -> bool:
        """Return whether a folder's name is that of an attempt of the run."""
        attempt = ATTEMPT.fullmatch(folder)
        return attempt is not None and (attempt["key"] or "") == self.run.key

    def _root(self, name: str, file: str = COMMITTED) -> str | None:
        """Return the attempt that a COMMITTED names, None where it cannot be read."""
        try:
            return Committed.from_bytes(self.read(name, file)).root
        except (ValueError, FileNotFoundError, CheckpointError):
            return None

    # --- writing

    def check_writable(self) -> None:
        """Create the folder where needed and prove that files can be written; else `CheckpointError`."""
        try:
            self.storage.delete(self.put_probe())
        except (OSError, CheckpointError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(
                f"cannot write to checkpoint folder {self.location}: {reason}; give another --checkpoint_dir"
            ) from error

    def put_probe(self) -> str:
        """Write a file for `check_probe`, and return its name."""
        probe = f"{PROBE}{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self.storage.put(probe, b"smp-train\n")
        return probe

    def check_probe(self, probe: str) -> None:
        """Raise `CheckpointError` where this rank does not see what another one has put there."""
        if not storage.wait_for(lambda: self.storage.exists(probe)):
            raise CheckpointError(
                f"{self.location} is not the folder that rank 0 sees; give a --checkpoint_dir that all nodes share"
            )

    def put(self, name: str, file: str, data: bytes) -> FileRecord:
        """Write a small file and return its record."""
        self.storage.put(posixpath.join(name, file), data)
        return checksum_of([data])

    def writer(self, name: str) -> TreeWriter:
        """Return the DCP writer of the tree ``name``, an attempt or a sub-folder of one."""
        attempt = "/".join(name.split("/")[:2])
        return TreeWriter(self.storage, name, begun=f"{attempt}/{CLAIM}")

    def make(self, name: str) -> None:
        """Make a sub-folder of an attempt, for a library that writes there itself."""
        if not is_s3(self.location):
            Path(self.location, name).mkdir(exist_ok=True)
            sync_folder(Path(self.location, name).parent)

    def secure(self, name: str, file: str, size: int) -> FileRecord:
        """Bring a file that such a library wrote to stable storage, and return its record."""
        if not is_s3(self.location):
            path = Path(self.location, name, file)
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
            sync_folder(path.parent)
        return self.checksum(name, file, size)

    def stage(self, name: str) -> str:
        """Begin an attempt: below ``name``, or below ``<name>-<id of the run>`` where that is not the run's.

        Raises `CheckpointError` where it is not, and the run has no id.
        """
        attempt = "-".join([uuid.uuid4().hex[:8], *([self.run.key] if self.run.key else [])])
        if not self.storage.exists(name):
            self.put(f"{name}/{attempt}", CLAIM, self.run.id.encode())
            if self._is_free(name):
                return f"{name}/{attempt}"
            self.storage.delete_folder(f"{name}/{attempt}")
        if not self.run.id:
            raise self._taken(name)
        self.put(f"{name}-{self.run.id}/{attempt}", CLAIM, self.run.id.encode())
        return f"{name}-{self.run.id}/{attempt}"

    def _is_free(self, name: str) -> bool:
        """Return whether ``name`` is that of a checkpoint of the run, or nothing but the run's own lies below it."""
        if self._is_own(name):
            return True
        files, folders = self.storage.level(name)
        asides = [file for file in files if file.startswith(ASIDE)]
        foreign = [file for file in asides if self._root(name, file) is not None and not self._is_own(name, file)]
        return files.keys() <= set(asides) and not foreign and all(map(self._is_attempt, folders))

    def _taken(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{os.path.join(self.location, name)} is there already and not a checkpoint of this run: it is left as it "
            "is; move it away, or give another folder"
        )

    def publish(self, staged: str, committed: Committed) -> str:
        """Make the attempt ``staged`` count, by one file; an older one's files then go. Returns the name."""
        name, root = staged.split("/")
        if self.has(name, COMMITTED) and not self._is_own(name):
            raise self._taken(name)
        older = Committed.from_bytes(self.read(name, COMMITTED)) if self.has(name, COMMITTED) else None
        self._published.add(staged)
        self.put(name, COMMITTED, committed.at(root).to_bytes())
        if older is not None:
            try:
                self._delete_files(name, older)
            except (OSError, CheckpointError) as error:
                logger.info("%s of %s is left there: %s", older.root or "the older one", name, error)
        return name

    def _delete_files(self, name: str, older: Committed) -> None:
        if older.root:
            self.storage.delete_folder(f"{name}/{older.root}")
            return
        for file in older.files:  # beside COMMITTED, as versions before wrote it
            self.storage.delete(f"{name}/{file}")

    def delete(self, name: str) -> None:
        """Remove a checkpoint, its COMMITTED first, or an attempt that came to nothing.

        What was set aside stays, and attempts of other runs: one may begin to save the step just then.

        An attempt that this process has tried to publish is left to a later sweep, which knows what came of it.
        """
        if "/" in name:
            if name not in self._published:
                self.storage.delete_folder(name)
            return
        files, folders = self.storage.level(name)
        own = self._root(name) if COMMITTED in files else None
        self.storage.delete(f"{name}/{COMMITTED}")
        if any(file.startswith(ASIDE) for file in files):
            doomed = {*self._unclaimed(name), *([f"{name}/{own}"] if own else [])}
        elif folders:
            for file in files:
                self.storage.delete(f"{name}/{file}")
            others = {each for each in folders if ATTEMPT.fullmatch(each) and not self._is_attempt(each)} - {own}
            doomed = {f"{name}/{each}" for each in folders if each not in others}
        else:  # as versions before wrote it
            doomed = {name}
        for folder in doomed:
            self.storage.delete_folder(folder)

    def set_aside(self, name: str, kind: str = DAMAGED) -> str:
        """Rename COMMITTED, so that the checkpoint no longer counts; return what it is called now."""
        attempt, aside = 1, ASIDE + kind
        while self.has(name, aside):
            attempt += 1
            aside = f"{ASIDE}{kind}-{attempt}"
        self.storage.move(f"{name}/{COMMITTED}", f"{name}/{aside}")
        return f"{name}/{aside}"

    def drop_aside(self, name: str, kind: str = DAMAGED) -> None:
        """Remove what was set aside under ``name``; a newer checkpoint of that step stays, and a save under way too."""
        files = self.storage.level(name)[0]
        asides = {file: self._root(name, file) for file in files if file.startswith(ASIDE + kind)}
        others = [file for file in files if file.startswith(COMMITTED) and file not in asides]
        beside = any(not file.startswith(COMMITTED) for file in files)  # as versions before wrote them
        for file in asides:
            self.storage.delete(f"{name}/{file}")
        if name != name_before(name) or (beside and not others):
            self.storage.delete_folder(name)
            return
        kept = {self._root(name, file) for file in others}  # where S3's copy was not followed by the deletion: the same
        for root in filter(None, {*asides.values()} - kept if None not in kept else ()):
            self.storage.delete_folder(f"{name}/{root}")
        # One that cannot be read names no attempt: it was written after the files of its own.
        until = max((files[file].modified for file, root in asides.items() if root is None), default=-math.inf)
        for attempt, newest in self._unclaimed(name).items():
            if newest < until:
                self.storage.delete_folder(attempt)

    def sweep(self, idle: float) -> list[str]:
        """Remove what interrupted saves of the run left, if untouched for ``idle`` seconds; return a line for each.

        These are attempts that no COMMITTED names, and unfinished uploads. What was touched later may belong to
        another job that is saving.
        """
        names = self.names()
        if is_s3(self.location):
            idle = max(idle + 1, IN_FLIGHT_SECONDS)  # S3 tells times in full seconds
        elif not names:
            return []
        done = self._sweep_before(idle)
        now = self.storage.now()
        for name in filter(parse_folder_name, names):
            for attempt, newest in self._unclaimed(name).items():
                if now - newest >= idle:
                    self.storage.delete_folder(attempt)
                    done.append(f"removed {attempt}, left by an interrupted save or deletion")
        for file, entry in self.storage.level()[0].items():
            if file.startswith(PROBE) and now - entry.modified >= PROBE_SECONDS:
                self.storage.delete(file)
        least = idle if is_s3(self.location) else max(idle, PROBE_SECONDS)
        for file in self.storage.discard_unfinished(self._may_discard, now - least):
            done.append(f"removed what was written of {file}")
        return done

    def _may_discard(self, file: str) -> bool:
        """Return whether what was written of a file may be the run's: in an attempt, or beside it in a folder."""
        name, *below = file.split("/")
        if len(below) < 2:
            return not is_s3(self.location) and (not below or parse_folder_name(name) is not None)
        return parse_folder_name(name) is not None and self._is_attempt(below[0])

    def _unclaimed(self, name: str) -> dict[str, float]:
        """Return the run's attempts at ``name`` that no COMMITTED names, set aside or not, and when last touched."""
        entries = self.storage.files(name)
        claimed = set()
        for file in entries:
            if file == COMMITTED or file.startswith(ASIDE):
                root = self._root(name, file)
                if root is None:  # unreadable: it may have named any of them
                    return {}
                claimed.add(root)
        found: dict[str, float] = {}
        for file, entry in entries.items():
            attempt, _, rest = file.partition("/")
            if rest and self._is_attempt(attempt) and attempt not in claimed:
                place = f"{name}/{attempt}"
                found[place] = max(entry.modified, found.get(place, -math.inf))
        return found

    # --- what versions before left in folders

    def rescue(self) -> None:
        """Give a checkpoint its name back that lost it to a replacement which was cut short."""
        for name in self.names() if not is_s3(self.location) else ():
            match = _BEFORE.fullmatch(name)
            if match is not None and match["kind"] == "replaced" and self.has(name, COMMITTED):
                with suppress(OSError):  # the name is taken, or another process is faster
                    Path(self.location, name).rename(Path(self.location, match["name"]))

    def _sweep_before(self, idle: float) -> list[str]:
        done = []
        for name in self.names() if not is_s3(self.location) else ():
            match = _BEFORE.fullmatch(name)
            if match is None or (match["key"] or "") != self.run.key:
                continue
            if match["kind"] == "replaced" and self.has(name, COMMITTED) and not self.has(match["name"], COMMITTED):
                continue  # `rescue` could not give its name back: it is all there is of that step
            folder = Path(self.location, name)
            with suppress(FileNotFoundError):  # another process is faster
                touched = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
                if self.storage.now() - touched >= idle:
                    shutil.rmtree(folder)
                    done.append(f"removed {name}, left by an interrupted save or deletion")
        return done
