"""A stream into an S3 object: parts are sent while the next are written, so that memory holds only a few."""

from __future__ import annotations

import io
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from smp_train.storage import client
from smp_train.storage.client import code_of

if TYPE_CHECKING:
    from smp_train.storage.s3 import S3Storage


class Upload(io.RawIOBase):
    """The object appears when `complete` returns, or never. Any method raises the storage's errors."""

    def __init__(self, storage: S3Storage, name: str, part_bytes: int) -> None:
        self._storage, self._name, self._part_bytes = storage, name, part_bytes
        self._buffer = bytearray()
        self._size = 0
        self._id = ""
        self._pool: ThreadPoolExecutor | None = None
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
        if self._pool is None:
            self._id = self._storage.request("create_multipart_upload", self._name)["UploadId"]
            self._pool = ThreadPoolExecutor(client.AT_ONCE, thread_name_prefix="smp-train-upload")
        if len(self._parts) >= client.AT_ONCE:
            self._parts[-client.AT_ONCE].result()
        part, self._buffer = self._buffer, bytearray()
        self._parts.append(self._pool.submit(self._put, len(self._parts) + 1, part))

    def _put(self, number: int, data: bytearray) -> dict[str, Any]:
        answer = self._storage.request("upload_part", self._name, UploadId=self._id, PartNumber=number, Body=data)
        checksums = {name: value for name, value in answer.items() if name.startswith("Checksum")}
        return {"PartNumber": number, "ETag": answer["ETag"], **checksums}

    def complete(self) -> None:
        """Send the last part, and wait until the object exists."""
        if self._pool is None:
            self._storage.put(self._name, bytes(self._buffer))
            return
        if self._buffer:
            self._send()
        parts = {"Parts": [part.result() for part in self._parts]}
        self._pool.shutdown()
        try:
            self._storage.request("complete_multipart_upload", self._name, UploadId=self._id, MultipartUpload=parts)
        except self._storage.error as error:
            # If the answer to a first try was lost, the retry gets NoSuchUpload. Nobody else writes this object.
            entry = self._storage.entry(self._name) if code_of(error.__cause__) == "NoSuchUpload" else None
            if entry is None or entry.size != self._size:
                raise

    def abort(self) -> None:
        """Delete the parts sent so far, without waiting for parts in flight: the next run deletes those."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            with suppress(self._storage.error):
                self._storage.request("abort_multipart_upload", self._name, UploadId=self._id)
