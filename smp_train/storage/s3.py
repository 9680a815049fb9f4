"""A prefix of a bucket: listed, its objects read whole or by ranges and written, several requests at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from smp_train.errors import CheckpointError, SmpTrainError, one_line
from smp_train.storage import client as s3_client
from smp_train.storage.base import Entry, Range
from smp_train.storage.client import SCHEME, code_of, explain, split
from smp_train.storage.prefetch import prefetched
from smp_train.storage.upload import Upload

PART_BYTES = 16 << 20
"""Bytes of one request, up or down. A rank holds some twenty of them at most."""
MOST_PARTS = 9000
"""S3 takes 10,000 parts of one object."""
CHUNK_BYTES = 1 << 17
"""Bytes per read of a body; what a read that breaks off had is lost."""
LEAST_CHUNK_BYTES = 1 << 10
BODY_ATTEMPTS = 10
"""Tries in a row of which the body brings not a byte."""
WAIT_SECONDS = 0.2
"""Before the second of them; doubled before each further one."""
MISSING = ("404", "NoSuchKey")
UNREADABLE = (*MISSING, "NoSuchBucket", "403", "AccessDenied", "Forbidden")
"""Without permission to list, S3 answers for a missing object that access is denied."""


def part_bytes(expected_bytes: int) -> int:
    """Return the size of the parts in which an object of about ``expected_bytes`` goes up."""
    return max(PART_BYTES, -(-expected_bytes // MOST_PARTS))


class S3Storage:
    """See `Storage`. What S3 refuses is an ``error`` that names the object, or the prefix, and what to do."""

    def __init__(self, location: str, error: type[SmpTrainError] = CheckpointError) -> None:
        self.bucket, key = split(location, error)
        self.prefix = key.strip("/")
        self.location = f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")
        self.error = error

    def key(self, name: str) -> str:
        """Return the key of something below the prefix."""
        return "/".join(part for part in (self.prefix, name) if part)

    def request(self, operation: str, name: str | None = None, **parameters: Any) -> Any:
        """Make one request about the object ``name``, or about the prefix. Raises the error that names it."""
        if name is not None:
            parameters["Key"] = self.key(name)
        try:
            return getattr(s3_client.client(), operation)(Bucket=self.bucket, **parameters)
        except s3_client.failures() as error:
            raise explain(error, self._shown(name), operation, self.error) from error

    def _shown(self, name: str | None) -> str:
        return self.location if name is None else f"{SCHEME}{self.bucket}/{self.key(name)}"

    def _pages(self, operation: str, prefix: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        pages = s3_client.client().get_paginator(operation)
        try:
            yield from pages.paginate(Bucket=self.bucket, Prefix=prefix, **parameters)
        except s3_client.failures() as error:
            raise explain(error, self.location, operation, self.error) from error

    # --- looking

    def files(self, folder: str = "") -> dict[str, Entry]:
        return self._listed(folder)[0]

    def level(self, folder: str = "") -> tuple[dict[str, Entry], list[str]]:
        return self._listed(folder, Delimiter="/")

    def _listed(self, folder: str, **level: str) -> tuple[dict[str, Entry], list[str]]:
        start = f"{self.key(folder.rstrip('/'))}/".lstrip("/")
        found: dict[str, Entry] = {}
        folders: list[str] = []
        for page in self._pages("list_objects_v2", start, **level):
            for each in page.get("Contents", ()):
                modified = each["LastModified"].timestamp()
                found[each["Key"][len(start) :]] = Entry(each["Size"], modified, each["ETag"])
            folders += [each["Prefix"][len(start) :].rstrip("/") for each in page.get("CommonPrefixes", ())]
        found.pop("", None)  # how consoles draw an empty folder
        return found, folders

    def is_empty(self) -> bool:
        """Return whether there is nothing below the prefix."""
        prefix = f"{self.prefix}/" if self.prefix else ""
        return not self.request("list_objects_v2", Prefix=prefix, MaxKeys=1).get("KeyCount")

    def exists(self, name: str) -> bool:
        return self.entry(name) is not None

    def entry(self, name: str, missing: tuple[str, ...] = MISSING) -> Entry | None:
        """Return what is known of one object; None for an error code in ``missing``."""
        answer = self._unless(missing, "head_object", name)
        return answer and Entry(answer["ContentLength"], answer["LastModified"].timestamp(), answer["ETag"])

    def _unless(self, codes: tuple[str, ...], operation: str, name: str, **parameters: Any) -> Any:
        """Make a request; return None for an error code among ``codes``."""
        try:
            return self.request(operation, name, **parameters)
        except self.error as error:
            if error.__cause__ is not None and code_of(error.__cause__) in codes:
                return None
            raise

    # --- reading

    def read(self, name: str) -> bytes:
        found = self.read_unless(name)
        assert found is not None
        return found

    def read_if_there(self, name: str) -> bytes | None:
        return self.read_unless(name, MISSING)

    def read_unless(self, name: str, missing: tuple[str, ...] = ()) -> bytes | None:
        """Return a small object's content; None for an error code in ``missing``."""
        answer = self._unless(missing, "get_object", name)
        if answer is None:
            return None
        content = bytearray()
        self.receive(name, content.extend, 0, answer["ContentLength"], answer["ETag"], answer)
        return bytes(content)

    def read_range(self, name: str, start: int, length: int, etag: str = "") -> bytes:
        """Return bytes of an object, of the version ``etag`` where that is given; fewer are an error."""
        content = bytearray()
        self.receive(name, content.extend, start, start + length, etag)
        return bytes(content)

    def ranges(self, wanted: Iterable[Range]) -> Iterator[bytes]:
        """Yield each range, of one request each, in this order."""
        return prefetched(lambda each: self.read_range(*each), wanted, s3_client.AT_ONCE)

    def receive(
        self, name: str, write: Callable[[bytes], object], start: int, end: int, etag: str = "", answer: Any = None
    ) -> None:
        """Pass bytes ``start`` to ``end`` of an object to ``write``, chunk by chunk as they come.

        A body that breaks off is resumed where it broke. With ``etag`` it is an error if the object was replaced.
        ``answer`` is that to the first request, if it has been made.
        """
        done, failures, chunk_bytes = start, 0, CHUNK_BYTES
        version = {"IfMatch": etag} if etag else {}
        while done < end:
            before = done
            if answer is None:
                answer = self.request("get_object", name, Range=f"bytes={done}-{end - 1}", **version)
            body, answer = answer["Body"], None
            problem: Exception = EOFError(f"{done - start} of {end - start} bytes")
            try:
                for chunk in body.iter_chunks(chunk_bytes):
                    write(chunk)
                    done += len(chunk)
            except s3_client.failures() as error:
                problem = error
            finally:
                body.close()
            if done < end:
                # Of a chunk that breaks off nothing is kept: where every connection is short, chunks must be too.
                chunk_bytes = max(LEAST_CHUNK_BYTES, chunk_bytes // 4)
            failures = 0 if done > before else failures + 1
            if failures >= BODY_ATTEMPTS:
                what = f"{failures} tries in a row brought nothing (last: {one_line(problem)})"
                raise self.error(f"{self._shown(name)}: cannot be read: {what}")
            if failures:
                time.sleep(min(WAIT_SECONDS * 2 ** (failures - 1), 10.0))

    # --- writing

    def put(self, name: str, data: bytes) -> None:
        self.request("put_object", name, Body=data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if self.read_unless(name, MISSING) is not None:  # a server may ignore conditions
            return False
        refused = ("PreconditionFailed", "ConditionalRequestConflict")
        try:
            if self._unless(refused, "put_object", name, Body=data, IfNoneMatch="*") is None:
                return self.read_unless(name, MISSING) == data  # a first try did it, and its answer was lost
        except self.error as error:
            if error.__cause__ is None or code_of(error.__cause__) != "NotImplemented":
                raise
            self.put(name, data)
        return True

    @contextmanager
    def writer(self, name: str, size: int = 0) -> Iterator[BinaryIO]:
        """Yield a stream into an object, which goes up in parts meanwhile."""
        upload: Any = Upload(self, name, part_bytes(size))
        try:
            yield upload
            upload.complete()
        except BaseException:
            upload.abort()
            raise

    def move(self, name: str, to: str) -> None:
        """Copy an object within S3, however large it is, and remove the original."""
        try:
            source = {"Bucket": self.bucket, "Key": self.key(name)}
            s3_client.client().copy(source, self.bucket, self.key(to))
        except s3_client.failures() as error:
            raise explain(error, self._shown(to), "copy", self.error) from error
        self.delete(name)

    def delete(self, name: str) -> None:
        self.request("delete_object", name)

    def delete_folder(self, folder: str, but: Collection[str] = ()) -> None:
        keys = [self.key(f"{folder}/{file}".lstrip("/")) for file in self.files(folder) if file not in but]
        for start in range(0, len(keys), 1000):
            batch = [{"Key": key} for key in keys[start : start + 1000]]
            answer = self.request("delete_objects", Delete={"Objects": batch, "Quiet": True})
            for error in answer.get("Errors", ()):
                raise self.error(
                    f"{SCHEME}{self.bucket}/{error['Key']}: cannot be removed ({error.get('Code')}: "
                    f"{error.get('Message')}); the role in use needs s3:DeleteObject on {self.bucket}"
                )

    def discard_unfinished(self, ours: Callable[[str], bool], before: float) -> list[str]:
        """Abort multipart uploads, which cost money and no listing shows."""
        start = f"{self.prefix}/".lstrip("/")
        found = []
        for page in self._pages("list_multipart_uploads", start):
            for upload in page.get("Uploads", ()):
                name = upload["Key"][len(start) :]
                if ours(name) and upload["Initiated"].timestamp() < before:
                    self.request("abort_multipart_upload", name, UploadId=upload["UploadId"])
                    found.append(name)
        return found

    def now(self) -> float:
        answer = self.request("list_objects_v2", Prefix=self.prefix, MaxKeys=1)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return parsedate_to_datetime(date).timestamp() if date else time.time()
