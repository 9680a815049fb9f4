"""Checkpoints in S3, which knows no rename: what is written last decides.

``<prefix>/<name>/<attempt>/...`` are the files of one attempt at a save, under keys that no other attempt uses;
``<prefix>/<name>/COMMITTED`` is put last, in one request, and names the attempt that counts. So a checkpoint of the
same step is replaced at once, and what a writer uploads that its own job has given up can do no harm. An attempt is
eight random digits and `RunId.key`; its first object says which run's it is.
"""

from __future__ import annotations

import logging
import re
import socket
import uuid
from collections.abc import Mapping
from datetime import datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from smp_train.checkpoints.record import (
    COMMITTED,
    DAMAGED,
    Committed,
    FileRecord,
    RunId,
    checksum_of,
    parse_folder_name,
)
from smp_train.checkpoints.storage import PROBE, UNKNOWN, is_own, taken
from smp_train.errors import CheckpointError
from smp_train.storage import client as s3
from smp_train.storage import s3_folder
from smp_train.storage.s3_folder import S3Folder

if TYPE_CHECKING:
    from smp_train.checkpoints.dcp import Reader, Writer

logger = logging.getLogger(__name__)

MOST_PARTS = 9000
"""S3 takes 10,000 parts of one object."""
IN_FLIGHT_SECONDS = 60.0
"""The last request of a process that was killed, which may be its COMMITTED, may still be on its way for so long."""
STAMPED_TO_SECONDS = 2.0
"""S3 tells times to the second."""
ASIDE = f"{COMMITTED}."
"""How COMMITTED begins once the checkpoint has been set aside; why comes after it."""
ATTEMPT = re.compile("[0-9a-f]{8}(-(?P<key>[0-9a-f]{8}))?")
CLAIM = ".run"
"""First object of an attempt: two runs that stage the same name at the same time see each other by it."""


class S3Storage(S3Folder):
    """A prefix of a bucket. ``name`` may also be ``<name>/<attempt>``, the place of one attempt."""

    def __init__(self, location: str, run: RunId = UNKNOWN) -> None:
        super().__init__(location)
        self.run = run
        self._published: set[str] = set()
        """Attempts whose COMMITTED was sent, answered or not: where it was not, it may still have its effect."""

    # --- looking

    def names(self) -> list[str]:
        """Return the names one level below the prefix."""
        start = self.key() + "/" if self.prefix else ""
        found = []
        for page in self._pages("list_objects_v2", Prefix=start, Delimiter="/"):
            found += [each["Prefix"][len(start) :].rstrip("/") for each in page.get("CommonPrefixes", ())]
        return sorted(found)

    def aside(self, kind: str = DAMAGED) -> list[str]:
        """Return the names of checkpoints that were set aside."""
        return [name for name in self.names() if any(file.startswith(ASIDE + kind) for file in self.sizes(name))]

    def sizes(self, name: str) -> dict[str, int]:
        """Return the size in bytes of each object below ``name``; empty where there is none."""
        return {file: entry.size for file, entry in self.entries(name).items()}

    # --- reading

    def checksum(self, name: str, file: str) -> FileRecord:
        """Read an object as it is stored and return its record."""
        size = self.ask("head_object", key=self.key(name, file))["ContentLength"]
        part = s3_folder.PART_BYTES
        starts = range(0, size, part)
        return checksum_of(self.ranges((name, file, start, min(part, size - start)) for start in starts))

    # --- writing

    def check_writable(self) -> None:
        """Prove that objects can be written and removed; else `CheckpointError`."""
        key = self.key(f".probe-{socket.gethostname()}")
        try:
            self.ask("put_object", key=key, Body=b"smp-train\n")
            self.ask("delete_object", key=key)
        except CheckpointError as error:
            raise CheckpointError(f"cannot write to checkpoint folder {self.location}: {error}") from error

    def put(self, name: str, file: str, data: bytes) -> FileRecord:
        """Write a small object; it is there entirely or not at all."""
        self.ask("put_object", key=self.key(name, file), Body=data)
        return checksum_of([data])

    def writer(self, name: str) -> Writer:
        """Return the DCP writer for the attempt ``name``."""
        from smp_train.checkpoints.dcp_s3 import S3Writer

        return S3Writer(self, name)

    def reader(self, name: str, files: Mapping[str, int] | None = None) -> Reader:
        """Return the DCP reader for the attempt ``name``, of its ``files`` (name: size) or of all that are there."""
        from smp_train.checkpoints.dcp_s3 import S3Reader

        return S3Reader(self, name, self.sizes(name) if files is None else files)

    def stage(self, name: str) -> str:
        """Return the place of a new attempt: below ``name``, or where that is taken below the one with the run's id."""
        if not self.run.id:
            return f"{name}/{uuid.uuid4().hex[:8]}"
        attempt = f"{uuid.uuid4().hex[:8]}-{self.run.key}"
        if name != PROBE:
            self.put(f"{name}/{attempt}", CLAIM, self.run.id.encode())
            if not self._is_free(name):
                self.remove_all(f"{name}/{attempt}")
                name = f"{name}-{self.run.id}"
        return f"{name}/{attempt}"

    def _is_free(self, name: str) -> bool:
        """Return whether ``name`` is that of a checkpoint of the run, or nothing but the run's own lies below it."""
        if is_own(self, name):
            return True
        tops = {file.partition("/")[0] for file in self.entries(name)}
        return all(self._is_attempt(top) or (top.startswith(ASIDE) and is_own(self, name, top)) for top in tops)

    def secure(self, name: str, file: str) -> FileRecord:
        """Return the record of an object that another program wrote: it is durable already."""
        return self.checksum(name, file)

    def make(self, name: str) -> None:
        """Do nothing: there are no folders."""

    def mark(self, staged: str, committed: Committed) -> None:
        """Do nothing: what lies in the attempt's own place is not looked at before it is published."""

    def publish(self, staged: str, name: str, committed: Committed) -> str:
        """Make the attempt ``staged`` count, in one request; an older one's files then go. Returns its name."""
        name, root = staged.split("/")
        if self.has(name, COMMITTED) and not is_own(self, name):
            raise taken(self, name)
        try:
            older = _root_of(self.read(name, COMMITTED)) if self.has(name, COMMITTED) else None
        except CheckpointError:
            older = None
        self._published.add(staged)
        self.put(name, COMMITTED, committed.at(root).to_bytes())
        if older:
            try:
                self.remove_all(f"{name}/{older}")
            except CheckpointError as error:
                logger.info("%s/%s is left to a later sweep: %s", name, older, error)
        return name

    def delete(self, name: str) -> None:
        """Remove a checkpoint, its COMMITTED first, or an attempt that came to nothing. What was set aside stays.

        An attempt that this process has tried to publish is left to a later sweep, which knows what came of it.
        """
        if "/" in name:
            if name not in self._published:
                self.remove_all(name)
            return
        own = _root_of(self.read(name, COMMITTED)) if self.has(name, COMMITTED) else None
        self.ask("delete_object", key=self.key(name, COMMITTED))
        folders = {name}
        if any(file.startswith(ASIDE) for file in self.entries(name)):
            folders = {*self._unclaimed(name), *([f"{name}/{own}"] if own else [])}
        for folder in folders:
            self.remove_all(folder)

    def set_aside(self, name: str, kind: str = DAMAGED) -> str:
        """Rename COMMITTED, so that the checkpoint no longer counts; return what it is called now."""
        attempt, aside = 1, ASIDE + kind
        while self.has(name, aside):
            attempt += 1
            aside = f"{ASIDE}{kind}-{attempt}"
        source = {"Bucket": self.bucket, "Key": self.key(name, COMMITTED)}
        self.ask("copy_object", key=self.key(name, aside), CopySource=source)
        self.ask("delete_object", key=self.key(name, COMMITTED))
        return f"{name}/{aside}"

    def drop_aside(self, name: str, kind: str = DAMAGED) -> None:
        """Remove one of them; a newer checkpoint of the same step stays."""
        files = list(self.entries(name))
        for file in [file for file in files if file.startswith(ASIDE + kind)]:
            self.ask("delete_object", key=self.key(name, file))
            files.remove(file)
        for folder in self._unclaimed(name) if any(file.startswith(COMMITTED) for file in files) else [name]:
            self.remove_all(folder)

    def sweep(self, idle: float) -> list[str]:
        """Remove the run's attempts that no COMMITTED names, and its uploads, if untouched for ``idle`` seconds.

        But not what was touched within `IN_FLIGHT_SECONDS`. Returns what was done, one line each.
        """
        idle = max(idle, IN_FLIGHT_SECONDS)
        done = []
        names = [name for name in self.names() if parse_folder_name(name) is not None or name == PROBE]
        now = self._now()
        for name in names:
            for attempt, newest in self._unclaimed(name).items():
                if (now - newest).total_seconds() >= idle + STAMPED_TO_SECONDS:
                    self.remove_all(attempt)
                    done.append(f"removed {attempt}, left by an interrupted save or deletion")
        for page in self._pages("list_multipart_uploads", Prefix=self.key() + "/" if self.prefix else ""):
            for upload in page.get("Uploads", ()):
                name, _, below = upload["Key"][len(self.key()) :].lstrip("/").partition("/")
                begun = (now - upload["Initiated"]).total_seconds()
                own = parse_folder_name(name) is not None and self._is_attempt(below.partition("/")[0])
                if own and begun >= idle + STAMPED_TO_SECONDS:
                    self.ask("abort_multipart_upload", key=upload["Key"], UploadId=upload["UploadId"])
                    done.append(f"gave up the unfinished upload of {upload['Key']}")
        return done

    def _is_attempt(self, folder: str) -> bool:
        """Return whether the folder's name is that of an attempt of the run."""
        attempt = ATTEMPT.fullmatch(folder)
        return attempt is not None and (attempt["key"] or "") == self.run.key

    def _unclaimed(self, name: str) -> dict[str, datetime]:
        """Return the run's attempts at ``name`` that no COMMITTED names, set aside or not, and when last touched."""
        entries = self.entries(name)
        claimed = set()
        for file in entries:
            if file == COMMITTED or file.startswith(ASIDE):
                root = _root_of(self.read(name, file))
                if root is None:  # unreadable: it may have named any of them
                    return {}
                claimed.add(root)
        found: dict[str, datetime] = {}
        for file, entry in entries.items():
            attempt, _, rest = file.partition("/")
            if rest and self._is_attempt(attempt) and attempt not in claimed:
                place = f"{name}/{attempt}"
                found[place] = max(entry.modified, found.get(place, entry.modified))
        return found

    def swap(self, file: str, old: bytes | None, new: bytes) -> bool:
        """Make ``new`` the contents of an object of the prefix itself if they are ``old`` (None: if there is none)."""
        key = self.key(file)
        if old is None:
            if self._get(key) is not None:  # a server may know no conditions, and say nothing of it
                return False
            condition = {"IfNoneMatch": "*"}
        else:
            seen = self._get(key)
            if seen is None or seen["Body"] != old:
                return False
            condition = {"IfMatch": seen["ETag"]}
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.put_object(Bucket=self.bucket, Key=key, Body=new, **condition)
        except (BotoCoreError, ClientError) as error:
            code = getattr(error, "response", {}).get("Error", {}).get("Code")
            if code in ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey"):
                # Or a first try did it, and its answer was lost.
                now = self._get(key)
                return now is not None and now["Body"] == new
            if code != "NotImplemented":
                raise self.explained(error, "put_object", key) from error
            self.ask("put_object", key=key, Body=new)  # a server without conditions
        return True

    def peek(self, file: str) -> tuple[bytes, float] | None:
        """Return such an object's contents and the seconds since it was put; None where it is not there."""
        seen = self._get(self.key(file))
        if seen is None:
            return None
        now = seen["ResponseMetadata"]["HTTPHeaders"].get("date")
        age = parsedate_to_datetime(now) - seen["LastModified"] if now else timedelta(0)
        return seen["Body"], age.total_seconds()

    def _get(self, key: str) -> dict[str, Any] | None:
        """Return the answer to a request for a small object, its body read; None where it is not there."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            answer: dict[str, Any] = self.client.get_object(Bucket=self.bucket, Key=key)
            answer["Body"] = answer["Body"].read()
        except (BotoCoreError, ClientError) as error:
            if getattr(error, "response", {}).get("Error", {}).get("Code") == "NoSuchKey":
                return None
            raise self.explained(error, "get_object", key) from error
        return answer

    def stamp(self, file: str, data: bytes) -> None:
        """Let such an object, whose contents are ``data``, be as new; another job's stays as it is."""
        self.swap(file, data, data)

    def drop(self, file: str) -> None:
        """Remove such an object."""
        self.ask("delete_object", key=self.key(file))

    def _now(self) -> datetime:
        """Return the time by the clock of S3: ours may be wrong."""
        answer = self.ask("list_objects_v2", Prefix=self.key(), MaxKeys=1)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return parsedate_to_datetime(date) if date else datetime.now().astimezone()

    def copy(self, file: str, to: str) -> None:
        """Copy an object of the prefix within S3, however large it is."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.copy({"Bucket": self.bucket, "Key": self.key(file)}, self.bucket, self.key(to))
        except (BotoCoreError, ClientError) as error:
            raise self.explained(error, "copy_object", self.key(to)) from error

    def remove_all(self, folder: str) -> None:
        """Remove every object below ``folder``."""
        keys = [self.key(folder, file) for file in self.entries(folder)]
        for start in range(0, len(keys), 1000):
            batch = [{"Key": key} for key in keys[start : start + 1000]]
            answer = self.ask("delete_objects", Delete={"Objects": batch, "Quiet": True})
            for error in answer.get("Errors", ()):
                raise CheckpointError(
                    f"{s3.SCHEME}{self.bucket}/{error['Key']}: cannot be removed ({error.get('Code')}: "
                    f"{error.get('Message')}); the role in use needs s3:DeleteObject on {self.bucket}"
                )


def _root_of(data: bytes) -> str | None:
    """Return the attempt that a COMMITTED names, None where it cannot be read."""
    try:
        return Committed.from_bytes(data).root
    except (ValueError, CheckpointError):
        return None
