"""One run's folder of checkpoints, on a file system or in S3: list it, write to it, sweep it. No collectives, no torch.

Each sub-folder ``<model_type>-<step>steps[-<attempt>]/`` is an attempt at saving a step. One writer reserves and writes
it, once, and nobody replaces or renames it, so no commit can overwrite another commit. Deleting a checkpoint deletes
its COMMITTED first.
"""

from __future__ import annotations

import contextlib
import json
import os
import posixpath
import uuid
from itertools import count
from typing import NamedTuple

from smp_train import storage
from smp_train.arguments.training_flags import NODE_LOCAL as LOCAL
from smp_train.checkpoints.format import BEGUN, COMMITTED, DAMAGED, SWEPT, Marker, folder_name, parse_folder_name
from smp_train.distributed.agree import rank
from smp_train.errors import CheckpointError
from smp_train.storage import is_s3
from smp_train.storage.checksum import FileRecord, checksum_of
from smp_train.storage.probe import PROBE, PROBE_SECONDS
from smp_train.storage.s3 import parts

IN_FLIGHT_SECONDS = 60.0
"""For this long, the last request of a killed process may still take effect in S3."""


class Committed(NamedTuple):
    """A committed checkpoint, ordered by generation, then by step."""

    generation: int
    step: int
    name: str
    marker: Marker | None
    """None if COMMITTED cannot be parsed."""


def open_folder(location: str | os.PathLike[str]) -> RunFolder:
    """Return the run folder at a location. Raises `ConfigError` for an unsupported kind of URL."""
    return RunFolder(storage.open_storage(location))


def folder_of_run(parent: str, run_name: str) -> RunFolder:
    """Return a run's folder below --checkpoint_dir, or this rank's folder of parts below ``local:DIR``.

    No other function builds this path.
    """
    path = posixpath.join(parent.removeprefix(LOCAL), run_name)
    return open_folder(f"{path}/rank{rank():05d}" if parent.startswith(LOCAL) else path)


class RunFolder:
    """One run's checkpoints in one folder. Methods take a checkpoint's ``name``, and a ``file`` path in its folder."""

    def __init__(self, files: storage.Storage) -> None:
        self.storage, self.location = files, files.location

    # --- reading

    def names(self) -> list[str]:
        """Return the names of all attempts: committed, unfinished or swept."""
        return [name for name in self.storage.level()[1] if parse_folder_name(name)]

    def committed(self) -> list[Committed]:
        """Return the committed checkpoints, the newest first.

        If COMMITTED cannot be parsed, the generation is taken from BEGUN and the step from the folder's name.
        """
        checkpoints = []
        for name in self.names():
            parsed = parse_folder_name(name)
            content = self.storage.read_if_there(f"{name}/{COMMITTED}")
            if parsed is None or content is None:
                continue
            try:
                marker: Marker | None = Marker.from_bytes(content)
            except (ValueError, CheckpointError):  # damaged, or of a newer version
                marker = None
            # Prefer the marker to the folder's name: a folder may have been renamed by hand.
            order = (marker.generation, marker.step) if marker else (self._began(name) or 0, parsed[1])
            checkpoints.append(Committed(*order, name, marker))
        return sorted(checkpoints, key=lambda checkpoint: checkpoint[:3], reverse=True)

    def is_marked_damaged(self, name: str) -> bool:
        """Return whether a checkpoint has the file DAMAGED."""
        return self.storage.exists(f"{name}/{DAMAGED}")

    def has_committed(self) -> bool:
        """Return whether there is a committed checkpoint."""
        return any(self.storage.exists(f"{name}/{COMMITTED}") for name in self.names())

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each file below ``name``; links are left out."""
        return {file: entry.size for file, entry in self.storage.files(name).items()}

    def read(self, name: str, file: str) -> bytes:
        """Return a small file's content."""
        return self.storage.read(posixpath.join(name, file))

    def checksum(self, name: str, file: str, size: int) -> FileRecord:
        """Read a stored file of ``size`` bytes and return its `FileRecord`."""
        return checksum_of(self.storage.ranges(parts(posixpath.join(name, file), 0, size)))

    # --- writing

    def put(self, name: str, file: str, data: bytes) -> FileRecord:
        """Write a small file and return its `FileRecord`."""
        self.storage.put(posixpath.join(name, file), data)
        return checksum_of([data])

    def begin(self, model_type: str, step: int, generation: int) -> str:
        """Reserve a folder for an attempt at saving a step; return its name."""
        content = json.dumps({"generation": generation, "writer": uuid.uuid4().hex}).encode()
        for attempt in count(1):
            name = folder_name(model_type, step, str(attempt) if attempt > 1 else "")
            files, folders = self.storage.level(name)
            with contextlib.suppress(FileExistsError):  # a file has that name
                if not files and not folders and self.storage.put_if_absent(f"{name}/{BEGUN}", content):
                    return name
        raise AssertionError("there is always a next attempt")

    def commit(self, name: str, marker: Marker) -> None:
        """Put COMMITTED, which makes the attempt a checkpoint."""
        self.storage.put(f"{name}/{COMMITTED}", marker.to_bytes())

    def withdraw(self, name: str) -> None:
        """Delete a checkpoint's COMMITTED."""
        self.storage.delete(f"{name}/{COMMITTED}")

    def delete(self, name: str) -> None:
        """Delete a checkpoint or an attempt: first COMMITTED, and last BEGUN, which marks it as this program's."""
        self.withdraw(name)
        self.storage.delete_folder(name, but=(BEGUN,))
        self.storage.delete(f"{name}/{BEGUN}")

    def is_swept(self, name: str) -> bool:
        """Return whether another job has deleted, or is deleting, the files of an attempt."""
        return self.storage.exists(f"{name}/{SWEPT}") or not self.storage.exists(f"{name}/{BEGUN}")

    def sweep(self, generation: int) -> list[str]:
        """Delete the files of uncommitted attempts of generations below ``generation``; return a line for each attempt.

        BEGUN and SWEPT stay, because the writer may only have stalled. BEGUN reserves the name; SWEPT makes the writer
        withdraw a late COMMITTED (`is_swept`). An attempt without a readable BEGUN stays: it is not this program's.
        """
        lines, now = [], self.storage.now()
        for name in self.names():
            began, entries = self._began(name), self.storage.files(name)
            if began is None or began >= generation or COMMITTED in entries or entries.keys() <= {BEGUN, SWEPT}:
                continue
            if is_s3(self.location) and any(now - entry.modified < IN_FLIGHT_SECONDS for entry in entries.values()):
                continue
            self.storage.put(f"{name}/{SWEPT}", b"")
            if self.storage.exists(f"{name}/{COMMITTED}"):  # committed in the meantime
                continue
            self.storage.delete_folder(name, but=(BEGUN, SWEPT))
            lines.append(f"deleted the files of {name}, which an interrupted save or deletion left")
        for file, entry in self.storage.level()[0].items():
            if file.startswith(PROBE) and now - entry.modified >= PROBE_SECONDS:
                self.storage.delete(file)
        unfinished = self.storage.discard_unfinished(self._is_ours, now - PROBE_SECONDS)
        return lines + [f"deleted what was written of {file}" for file in unfinished]

    def _began(self, name: str) -> int | None:
        """Return the generation that began an attempt; None if BEGUN cannot be read."""
        try:
            return int(json.loads(self.storage.read_if_there(f"{name}/{BEGUN}") or b"")["generation"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def _is_ours(self, file: str) -> bool:
        name, _, below = file.partition("/")
        return not below or parse_folder_name(name) is not None
