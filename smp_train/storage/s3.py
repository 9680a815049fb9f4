"""A prefix of a bucket: lists, reads and writes objects, with several requests at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from smp_train.errors import CheckpointError, SmpTrainError, one_line
from smp_train.storage import client as s3_client
from smp_train.storage.base import SCHEME, Entry, Range, split
from smp_train.storage.client import code_of, explain
from smp_train.storage.prefetch import prefetched
from smp_train.storage.upload import Upload

PART_BYTES = 16 << 20
"""Bytes of one request, up or down. A rank holds about twenty parts at most."""
MOST_PARTS = 9000
"""S3 allows 10,000 parts of one object; the expected size may be a little too small."""
CHUNK_BYTES = 1 << 17
"""Bytes of one read from a connection. A connection that breaks during a read loses that chunk."""
LEAST_CHUNK_BYTES = 1 << 10
BODY_ATTEMPTS = 10
"""A read fails after this many tries in a row without a single byte."""
WAIT_SECONDS = 0.2
"""Wait after the first try without a byte; doubled after each further try."""
MISSING = ("404", "NoSuchKey")
UNREADABLE = (*MISSING, "NoSuchBucket", "403", "AccessDenied", "Forbidden")
"""Without permission to list the bucket, S3 denies access to missing objects."""


def part_bytes(expected_bytes: int) -> int:
    """Return the size of the parts in which an object of about ``expected_bytes`` is uploaded."""
    return max(PART_BYTES, -(-expected_bytes // MOST_PARTS))


def parts(name: str, start: int, length: int, etag: str = "") -> Iterator[Range]:
    """Divide a range of a file into ranges of at most `PART_BYTES`."""
    for first in range(start, start + length, PART_BYTES):
        yield Range(name, first, min(PART_BYTES, start + length - first), etag)


class S3Storage:
    """See `Storage`."""

    def __init__(self, location: str, error: type[SmpTrainError] = CheckpointError) -> None:
        self.bucket, key = split(location, error)
        self.prefix = key.strip("/")
        self.location = f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")
        self.error = error

    def key(self, name: str) -> str:
        """Return the key of an object below the prefix."""
        return "/".join(part for part in (self.prefix, name) if part)

    def request(self, operation: str, name: str | None = None, **parameters: Any) -> Any:
        """Make one request about an object, or about the bucket. Raises the storage's error."""
        if name is not None:
            parameters["Key"] = self.key(name)
        with self._explained(operation, name):
            return getattr(s3_client.client(), operation)(Bucket=self.bucket, **parameters)

    def _request_unless(self, codes: tuple[str, ...], operation: str, name: str, **parameters: Any) -> Any:
        """Make a request; return None if S3 answers with an error code in ``codes``."""
        try:
            return self.request(operation, name, **parameters)
        except self.error as error:
            if code_of(error.__cause__) in codes:
                return None
            raise

    def _pages(self, operation: str, **parameters: Any) -> Iterator[dict[str, Any]]:
        pages = s3_client.client().get_paginator(operation)
        with self._explained(operation):
            yield from pages.paginate(Bucket=self.bucket, **parameters)

    @contextmanager
    def _explained(self, operation: str, name: str | None = None) -> Iterator[None]:
        try:
            yield
        except s3_client.failures() as error:
            raise explain(error, self._shown(name), operation, self.error) from error

    def _shown(self, name: str | None) -> str:
        return self.location if name is None else f"{SCHEME}{self.bucket}/{self.key(name)}"

    # --- listing

    def files(self, folder: str = "") -> dict[str, Entry]:
        return self._listed(folder)[0]

    def level(self, folder: str = "") -> tuple[dict[str, Entry], list[str]]:
        return self._listed(folder, Delimiter="/")

    def _listed(self, folder: str, **options: str) -> tuple[dict[str, Entry], list[str]]:
        start = f"{self.key(folder.rstrip('/'))}/".lstrip("/")
        entries: dict[str, Entry] = {}
        folders: list[str] = []
        for page in self._pages("list_objects_v2", Prefix=start, **options):
            for item in page.get("Contents", ()):
                modified = item["LastModified"].timestamp()
                entries[item["Key"][len(start) :]] = Entry(item["Size"], modified, item["ETag"])
            folders += [item["Prefix"][len(start) :].rstrip("/") for item in page.get("CommonPrefixes", ())]
        entries.pop("", None)  # consoles mark an empty folder by an object with the folder's name
        return entries, folders

    def is_empty(self) -> bool:
        """Return whether no object is below the prefix."""
        prefix = f"{self.prefix}/" if self.prefix else ""
        return not self.request("list_objects_v2", Prefix=prefix, MaxKeys=1).get("KeyCount")

    def exists(self, name: str) -> bool:
        return self.entry(name) is not None

    def entry(self, name: str, missing: tuple[str, ...] = MISSING) -> Entry | None:
        """Return an object's entry; None for an error code in ``missing``."""
        answer = self._request_unless(missing, "head_object", name)
        return answer and Entry(answer["ContentLength"], answer["LastModified"].timestamp(), answer["ETag"])

    # --- reading

    def read(self, name: str) -> bytes:
        content = self.read_unless(name)
        assert content is not None
        return content

    def read_if_there(self, name: str) -> bytes | None:
        return self.read_unless(name, MISSING)

    def read_unless(self, name: str, missing: tuple[str, ...] = ()) -> bytes | None:
        """Return a small object's content; None for an error code in ``missing``."""
        answer = self._request_unless(missing, "get_object", name)
        if answer is None:
            return None
        content = bytearray()
        self.receive(name, content.extend, 0, answer["ContentLength"], answer["ETag"], answer)
        return bytes(content)

    def read_range(self, name: str, start: int, length: int, etag: str = "") -> bytes:
        """Return the bytes of a `Range`; fewer bytes are an error."""
        content = bytearray()
        self.receive(name, content.extend, start, start + length, etag)
        return bytes(content)

    def ranges(self, spans: Iterable[Range]) -> Iterator[bytes]:
        """Yield the bytes of each range, in order, with one request per range."""
        return prefetched(lambda span: self.read_range(*span), spans, s3_client.AT_ONCE)

    def receive(
        self, name: str, write: Callable[[bytes], object], start: int, end: int, etag: str = "", answer: Any = None
    ) -> None:
        """Pass the bytes of an object from ``start`` to ``end`` to ``write``, in chunks as they arrive.

        A transfer that breaks is resumed at that byte. If ``etag`` is set, another version of the object is an error.
        ``answer`` is the answer to the first request, if the caller has made it.
        """
        done, failures, chunk_bytes = start, 0, CHUNK_BYTES
        version = {"IfMatch": etag} if etag else {}
        while done < end:
            previous = done
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
                # A chunk is lost if the connection breaks: where all connections are short, chunks must be small.
                chunk_bytes = max(LEAST_CHUNK_BYTES, chunk_bytes // 4)
            failures = 0 if done > previous else failures + 1
            if failures >= BODY_ATTEMPTS:
                reason = f"{failures} tries in a row brought nothing (last: {one_line(problem)})"
                raise self.error(f"{self._shown(name)}: cannot be read: {reason}")
            if failures:
                time.sleep(min(WAIT_SECONDS * 2 ** (failures - 1), 10.0))

    # --- writing

    def put(self, name: str, data: bytes) -> None:
        self.request("put_object", name, Body=data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        if self.exists(name):  # a server may ignore conditions
            return False
        refused = ("PreconditionFailed", "ConditionalRequestConflict")
        try:
            if self._request_unless(refused, "put_object", name, Body=data, IfNoneMatch="*") is None:
                # A first try may have written the object, and its answer was lost.
                return self.read_if_there(name) == data
        except self.error as error:
            if code_of(error.__cause__) != "NotImplemented":
                raise
            self.put(name, data)
        return True

    @contextmanager
    def writer(self, name: str, size: int = 0) -> Iterator[BinaryIO]:
        upload: Any = Upload(self, name, part_bytes(size))
        try:
            yield upload
            upload.complete()
        except BaseException:
            upload.abort()
            raise

    def move(self, name: str, to: str) -> None:
        with self._explained("copy", to):
            source = {"Bucket": self.bucket, "Key": self.key(name)}
            s3_client.client().copy(source, self.bucket, self.key(to))
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

    def discard_unfinished(self, ours: Callable[[str], bool], killed_before: float) -> list[str]:
        """Abort multipart uploads, whose parts cost money and are in no listing."""
        start = f"{self.prefix}/".lstrip("/")
        discarded = []
        for page in self._pages("list_multipart_uploads", Prefix=start):
            for upload in page.get("Uploads", ()):
                name = upload["Key"][len(start) :]
                if ours(name) and upload["Initiated"].timestamp() < killed_before:
                    self.request("abort_multipart_upload", name, UploadId=upload["UploadId"])
                    discarded.append(name)
        return discarded

    def now(self) -> float:
        answer = self.request("list_objects_v2", Prefix=self.prefix, MaxKeys=1)
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return parsedate_to_datetime(date).timestamp() if date else time.time()
