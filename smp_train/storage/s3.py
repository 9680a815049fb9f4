"""A prefix of a bucket: lists, reads and writes objects, with several requests at once."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from smp_train.errors import CheckpointError, SmpTrainError, one_line
from smp_train.storage import client as s3_client
from smp_train.storage.base import SCHEME, Entry, Range, Storage, split
from smp_train.storage.client import AT_ONCE, code_of, explain
from smp_train.storage.streams import RangeFile, prefetched

PART_BYTES = 16 << 20
"""Bytes of one request, up or down. A rank holds about twenty parts at most."""
MOST_PARTS = 9000
"""S3 allows 10,000 parts of one object; the expected size may be a little too small."""
CHUNK_BYTES = 1 << 17
"""Bytes of one read from a connection. A connection that breaks during a read loses that chunk."""
BODY_ATTEMPTS = 10
"""A read fails after this many tries in a row without a single byte."""
WAIT_SECONDS = 0.2
"""Wait after the first try that received no byte; doubled after each further such try."""
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


class S3Storage(Storage):
    """See `Storage`."""

    def __init__(self, location: str, error: type[SmpTrainError] = CheckpointError) -> None:
        self.bucket, key = split(location, error)
        self.prefix = key.strip("/")
        self.location = f"{SCHEME}{self.bucket}/{self.prefix}".rstrip("/")
        self.error = error

    def key(self, name: str) -> str:
        """Return the key of an object below the prefix."""
        return "/".join(part for part in (self.prefix, name) if part)

    def request(
        self, operation: str, name: str | None = None, unless: tuple[str, ...] = (), **parameters: Any
    ) -> Any:
        """Make one request about an object, or about the bucket; return None for an S3 error code in ``unless``.

        Raises the storage's error.
        """
        if name is not None:
            parameters["Key"] = self.key(name)
        try:
            with self._explained(operation, name):
                return getattr(s3_client.client(), operation)(Bucket=self.bucket, **parameters)
        except self.error as error:
            if code_of(error.__cause__) in unless:
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
            raise explain(error, self._url(name), operation, self.error) from error

    def _url(self, name: str | None) -> str:
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

    def entry(self, name: str, missing: tuple[str, ...] = MISSING) -> Entry | None:
        """Return an object's entry; None for an error code in ``missing``."""
        answer = self.request("head_object", name, missing)
        return answer and Entry(answer["ContentLength"], answer["LastModified"].timestamp(), answer["ETag"])

    # --- reading

    def read(self, name: str) -> bytes:
        content = self.read_if_there(name, missing=())
        assert content is not None
        return content

    def read_if_there(self, name: str, missing: tuple[str, ...] = MISSING) -> bytes | None:
        """Return a small object's content; None for an error code in ``missing``."""
        answer = self.request("get_object", name, missing)
        if answer is None:
            return None
        chunks: list[bytes] = []
        self.receive(name, chunks.append, 0, answer["ContentLength"], answer["ETag"], answer)
        return b"".join(chunks)

    def read_range(self, name: str, start: int, length: int, etag: str = "") -> bytes:
        """Return the bytes of a `Range`; fewer bytes are an error."""
        chunks: list[bytes] = []
        self.receive(name, chunks.append, start, start + length, etag)
        return b"".join(chunks)

    def ranges(self, spans: Iterable[Range]) -> Generator[bytes, None, None]:
        return prefetched(lambda span: self.read_range(*span), spans, AT_ONCE)

    def open_ranges(self, name: str, entry: Entry, read_ahead: int) -> io.BufferedReader:
        """Return the object's version ``entry`` as a file; each read fetches at least ``read_ahead`` bytes."""

        def read(start: int, length: int) -> bytes:
            return b"".join(self.ranges(parts(name, start, length, entry.etag)))

        return io.BufferedReader(RangeFile(entry.size, read), read_ahead)

    def receive(
        self, name: str, write: Callable[[bytes], object], start: int, end: int, etag: str = "", answer: Any = None
    ) -> None:
        """Pass the bytes of an object from ``start`` to ``end`` to ``write``, in chunks as they arrive.

        A broken transfer is resumed at the next byte. If ``etag`` is set, another version of the object is an error.
        ``answer`` is the answer to the first request, if the caller has made it.
        """
        done, failures = start, 0
        version: dict[str, Any] = {"IfMatch": etag} if etag else {}
        while done < end:
            previous = done
            if answer is None:
                answer = self.request("get_object", name, Range=f"bytes={done}-{end - 1}", **version)
            body, answer = answer["Body"], None
            problem: Exception = EOFError(f"{done - start} of {end - start} bytes")
            try:
                for chunk in body.iter_chunks(CHUNK_BYTES):
                    write(chunk)
                    done += len(chunk)
            except s3_client.failures() as error:
                problem = error
            finally:
                body.close()
            failures = 0 if done > previous else failures + 1
            if failures >= BODY_ATTEMPTS:
                reason = f"{failures} tries in a row brought nothing (last: {one_line(problem)})"
                raise self.error(f"{self._url(name)}: cannot be read: {reason}")
            if failures:
                time.sleep(min(WAIT_SECONDS * 2 ** (failures - 1), 10.0))

    # --- writing

    def put(self, name: str, data: bytes) -> None:
        self.request("put_object", name, Body=data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        refused = ("PreconditionFailed", "ConditionalRequestConflict")
        try:
            written = self.request("put_object", name, refused, Body=data, IfNoneMatch="*")
        except self.error as error:
            if code_of(error.__cause__) != "NotImplemented":
                raise
            if self.exists(name):
                return False
            written = self.request("put_object", name, Body=data)
        # A first try may have written the object, and its answer was lost.
        return written is not None or self.read_if_there(name) == data

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


class Upload(io.RawIOBase):
    """A stream into an object, which appears when `complete` returns, or never. Raises the storage's errors.

    Parts are sent while the next are written, so that memory holds only a few.
    """

    def __init__(self, storage: S3Storage, name: str, part_bytes: int) -> None:
        self._storage, self._name, self._part_bytes = storage, name, part_bytes
        self._buffer, self._size, self._id = bytearray(), 0, ""
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="smp-train-upload")
        self._parts: list[Future[dict[str, Any]]] = []

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any) -> int:
        """Copy ``data`` to the buffer. Waits while `AT_ONCE` parts are being sent."""
        with memoryview(data).cast("B") as view:
            done = 0
            while done < len(view):
                room = self._part_bytes - len(self._buffer)
                self._buffer += view[done : done + room]
                done += room
                if len(self._buffer) == self._part_bytes:
                    self._send()
            self._size += len(view)
            return len(view)

    def _send(self) -> None:
        if not self._id:
            self._id = self._storage.request("create_multipart_upload", self._name)["UploadId"]
        if len(self._parts) >= AT_ONCE:
            self._parts[-AT_ONCE].result()
        part, self._buffer = self._buffer, bytearray()
        self._parts.append(self._pool.submit(self._put, len(self._parts) + 1, part))

    def _put(self, number: int, data: bytearray) -> dict[str, Any]:
        answer = self._storage.request("upload_part", self._name, UploadId=self._id, PartNumber=number, Body=data)
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

    def complete(self) -> None:
        """Send the last part, and wait until the object exists."""
        if not self._id:
            self._storage.put(self._name, bytes(self._buffer))
            return
        if self._buffer:
            self._send()
        parts = {"Parts": [part.result() for part in self._parts]}
        upload = {"UploadId": self._id, "MultipartUpload": parts}
        if self._storage.request("complete_multipart_upload", self._name, ("NoSuchUpload",), **upload) is None:
            # A first try has completed the upload, and its answer was lost. Nobody else writes this object.
            entry = self._storage.entry(self._name)
            if entry is None or entry.size != self._size:
                raise self._storage.error(f"{self._storage.location}/{self._name}: its upload was aborted; save again")

    def abort(self) -> None:
        """Delete the parts sent so far, without waiting for parts in flight: the next run deletes those."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._id:
            with suppress(self._storage.error):
                self._storage.request("abort_multipart_upload", self._name, UploadId=self._id)
