"""How a checkpoint becomes one, in a folder and in S3: the file that is written last decides.

``<name>/<attempt>/...`` are the files of one attempt at a save, under names that no other attempt uses.
``<name>/COMMITTED`` is put last, atomically, and names the attempt that counts. So saving a step again replaces it
atomically, and late writes of an abandoned save cannot damage the committed checkpoint. An attempt is eight random
digits and `RunId.key`; its first file names the run.

Versions before wrote a checkpoint's files beside COMMITTED where it was in a folder, and set it aside by renaming the
folder: such are read, replaced and deleted alike.
"""

from __future__ import annotations

import logging
import math
import os
import posixpath
import re
import socket
import uuid
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path

from smp_train import storage
from smp_train.checkpoints.dcp.storage import Reader, TreeReader, TreeWriter
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
"""Name of COMMITTED once the checkpoint has been set aside; the reason follows."""
CLAIM = ".run"
"""First file of an attempt, with the run's id: two runs that begin one name at once see each other by it."""
DELETING = ".deleting"
"""Name of COMMITTED while a checkpoint whose files lie beside it is being deleted."""
PROBE = ".probe-"
"""Prefix of short-lived files that test whether a rank can write to the folder and sees other ranks' files."""
PROBE_SECONDS = 60.0
"""A probe or temporary file older than this belongs to no process."""
IN_FLIGHT_SECONDS = 60.0
"""For so long the last request of a killed process, perhaps its COMMITTED, may still take effect in S3."""
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
        return TreeReader(self.storage, posixpath.normpath(name), files)

    def aside(self, kind: str = DAMAGED) -> list[str]:
        """Return the names of checkpoints that were set aside."""
        return [name for name in self.names() if self._is_aside(name, kind)]

    def _is_aside(self, name: str, kind: str) -> bool:
        if name != name_before(name):
            return name.removeprefix(name_before(name)).startswith(f".{kind}")
        return parse_folder_name(name) is not None and any(
            file.startswith(ASIDE + kind) for file in self.storage.level(name)[0]
        )

    def _marker(self, name: str, file: str = COMMITTED) -> Committed | None:
        """Return what a file in the form of COMMITTED says; None where it is not there, or cannot be read."""
        try:
            return Committed.from_bytes(self.read(name, file))
        except (ValueError, FileNotFoundError, CheckpointError):
            return None

    def _is_own(self, marker: Committed | None) -> bool:
        return marker is not None and marker.run.id == self.run.id

    def _is_attempt(self, folder: str) -> bool:
        """Return whether a folder's name is that of an attempt of the run."""
        attempt = ATTEMPT.fullmatch(folder)
        return attempt is not None and (attempt["key"] or "") == self.run.key

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
        files, folders = self.storage.level(name)
        if COMMITTED in files:
            return self._is_own(self._marker(name))
        markers = [self._marker(name, file) for file in files if file.startswith(ASIDE)]
        own = all(marker is None or self._is_own(marker) for marker in markers)
        return len(markers) == len(files) and own and all(map(self._is_attempt, folders))

    def _taken(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{os.path.join(self.location, name)} is there already and not a checkpoint of this run: it is left as it "
            "is; move it away, or give another folder"
        )

    def publish(self, staged: str, committed: Committed, check: Callable[[], None] = lambda: None) -> str:
        """Call ``check``, put COMMITTED for the attempt ``staged``, delete the attempt it replaces; return the name."""
        name, root = staged.split("/")
        older = self._marker(name)
        if self.has(name, COMMITTED) and not self._is_own(older):
            raise self._taken(name)
        check()
        if not self.has(staged, CLAIM):  # a job that took over, and may have ended since, sweeps attempts
            raise CheckpointError(f"another job of this run has removed {staged}; this step is not committed")
        self._published.add(staged)
        self.put(name, COMMITTED, committed.at(root).to_bytes())
        if older is not None:
            try:
                if older.root:
                    self.storage.delete_folder(f"{name}/{older.root}")
                for file in older.files if not older.root else ():  # as versions before wrote it
                    self.storage.delete(f"{name}/{file}")
            except (OSError, CheckpointError) as error:
                logger.info("%s of %s is left there: %s", older.root or "the older one", name, error)
        return name

    def delete(self, name: str) -> None:
        """Remove a checkpoint, its COMMITTED first, or an attempt that came to nothing.

        What was set aside stays, and attempts of other runs: one may begin to save the step just then.

        An attempt that this process has tried to publish is left to a later sweep, which knows what came of it.
        """
        if "/" in name:
            if name not in self._published:
                self.storage.delete_folder(name)
            return
        files = self.storage.level(name)[0]
        marker = self._marker(name)
        root = marker.root if marker is not None else ""
        beside = marker is not None and not root  # as versions before wrote it
        if any(file.startswith(ASIDE) for file in files):
            self.storage.delete(f"{name}/{COMMITTED}")
            for folder in {*self._unclaimed(name), *([f"{name}/{root}"] if root else [])}:
                self.storage.delete_folder(folder)
            return
        if beside:  # its files do not show whose they are
            self.storage.move(f"{name}/{COMMITTED}", f"{name}/{DELETING}")
        else:
            self.storage.delete(f"{name}/{COMMITTED}")
        self._clear(name, root, DELETING)

    def _clear(self, name: str, root: str, *last: str) -> None:
        """Remove all below ``name`` but attempts of other runs than that of ``root``; the files ``last`` at the end."""
        files, folders = self.storage.level(name)
        for folder in folders:
            if folder == root or self._is_attempt(folder) or not ATTEMPT.fullmatch(folder):
                self.storage.delete_folder(f"{name}/{folder}")
        # COMMITTED is there where S3's copy to another name was not followed by its deletion.
        for file in sorted(files, key=lambda file: (file != COMMITTED, file in last)):
            self.storage.delete(f"{name}/{file}")

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
        if name != name_before(name):  # as versions before set it aside
            self.storage.delete_folder(name)
            return
        files = self.storage.level(name)[0]
        markers = {file: self._marker(name, file) for file in files if file.startswith(COMMITTED)}
        dropped = {file: marker for file, marker in markers.items() if file.startswith(ASIDE + kind)}
        kept = [marker for file, marker in markers.items() if file not in dropped]
        if not kept and len(files) > len(markers):  # as versions before wrote it
            self._clear(name, "", *dropped)
            return
        # In S3 a copy may not have been followed by the deletion: then another marker names the same attempt.
        roots = {marker.root for marker in dropped.values() if marker} - {marker.root for marker in kept if marker}
        for root in filter(None, roots if None not in kept else ()):
            self.storage.delete_folder(f"{name}/{root}")
        # One that cannot be read names no attempt: it was written after the files of its own.
        until = max((files[file].modified for file, marker in dropped.items() if marker is None), default=-math.inf)
        for attempt, newest in self._unclaimed(name, dropped).items():
            if newest < until:
                self.storage.delete_folder(attempt)
        for file in dropped:
            self.storage.delete(f"{name}/{file}")

    def sweep(self, idle: float) -> list[str]:
        """Remove what interrupted saves and deletions of the run left, if untouched for ``idle`` seconds.

        These are attempts that no COMMITTED names, unfinished uploads, and what versions before left. What was touched
        later may belong to another job that is saving. Returns a line for each.
        """
        names = self.names()
        if is_s3(self.location):
            idle = max(idle + 1, IN_FLIGHT_SECONDS)  # S3 tells times in full seconds
        elif not names:
            return []
        now, done = self.storage.now(), []
        for name in names:
            left = {name: self._touched(name)} if self._is_scratch(name) else {}
            if parse_folder_name(name) is not None:
                left = self._unclaimed(name)
                if self._is_own(self._marker(name, DELETING)):
                    self._clear(name, "", DELETING)
            for folder, newest in left.items():
                if now - newest >= idle:
                    self.storage.delete_folder(folder)
                    done.append(f"removed {folder}, left by an interrupted save or deletion")
        for file, entry in self.storage.level()[0].items():
            if file.startswith(PROBE) and now - entry.modified >= PROBE_SECONDS:
                self.storage.delete(file)
        files = self.storage.discard_unfinished(self._is_in_attempt, now - idle)
        if not is_s3(self.location):
            files += self.storage.discard_unfinished(self._is_marker, now - max(idle, PROBE_SECONDS))
        return done + [f"removed what was written of {file}" for file in files]

    def _touched(self, name: str) -> float:
        return max((entry.modified for entry in self.storage.files(name).values()), default=-math.inf)

    def _is_in_attempt(self, file: str) -> bool:
        name, *below = file.split("/")
        return parse_folder_name(name) is not None and len(below) > 1 and self._is_attempt(below[0])

    def _is_marker(self, file: str) -> bool:
        """Return whether a file is in the folder, or a COMMITTED: those of other runs look the same."""
        name, *below = file.split("/")
        return not below or (len(below) == 1 and below[0] != "" and parse_folder_name(name) is not None)

    def _unclaimed(self, name: str, dropped: Container[str] = ()) -> dict[str, float]:
        """Return the run's attempts at ``name`` that no COMMITTED names, set aside or not, and when last touched.

        Those in ``dropped`` are taken not to be there.
        """
        entries = self.storage.files(name)
        markers = [file for file in entries if file == COMMITTED or file.startswith(ASIDE)]
        claims = [self._marker(name, file) for file in markers if file not in dropped]
        if None in claims:  # it may have named any of them
            return {}
        claimed = {claim.root for claim in claims if claim is not None}
        found: dict[str, float] = {}
        for file, entry in entries.items():
            attempt, _, rest = file.partition("/")
            if rest and self._is_attempt(attempt) and attempt not in claimed:
                found[f"{name}/{attempt}"] = max(entry.modified, found.get(f"{name}/{attempt}", -math.inf))
        return found

    # --- what versions before left in folders

    def rescue(self) -> None:
        """Give a checkpoint its name back that lost it to a replacement which was cut short."""
        for name in self.names() if not is_s3(self.location) else ():
            match = _BEFORE.fullmatch(name)
            if match is not None and match["kind"] == "replaced" and self.has(name, COMMITTED):
                with suppress(OSError):  # the name is taken, or another process is faster
                    Path(self.location, name).rename(Path(self.location, match["name"]))

    def _is_scratch(self, name: str) -> bool:
        """Return whether a folder is the run's, and holds nothing of use."""
        match = _BEFORE.fullmatch(name)
        if match is None or (match["key"] or "") != self.run.key:
            return False
        # What `rescue` could not give its name back is all there is of that step.
        return match["kind"] != "replaced" or not self.has(name, COMMITTED) or self.has(match["name"], COMMITTED)
