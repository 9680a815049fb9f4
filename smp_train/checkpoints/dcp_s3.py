"""torch.distributed.checkpoint straight to S3 and back: nothing is written to a disk on the way."""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from smp_train.checkpoints import storage_s3
from smp_train.checkpoints.collective import one_line
from smp_train.checkpoints.dcp import DCP_METADATA, LocalReader, Writer
from smp_train.checkpoints.record import Checksum, FileRecord
from smp_train.distributed.agree import here
from smp_train.errors import CheckpointError
from smp_train.models.weight_files import refuse_compressed
from smp_train.storage import s3_folder

if TYPE_CHECKING:
    from smp_train.checkpoints.storage_s3 import S3Storage


ABORT_SECONDS = 30.0
"""What fails is told to the others without waiting longer for S3; the next run removes what is left."""


class Pipe:
    """What one thread writes, another reads, in chunks of a fixed size; few of them are held."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = bytearray()
        self._chunks: queue.Queue[bytes | None] = queue.Queue(maxsize=2)
        self._broken: BaseException | None = None
        self._ended = False

    def write(self, data: memoryview) -> None:
        """Add ``data``; waits while the reader is behind. Raises what the reader broke off with."""
        while data:
            room = self._chunk_bytes - len(self._chunk)
            self._chunk += data[:room]
            data = data[room:]
            if len(self._chunk) == self._chunk_bytes:
                self._hand_over(bytes(self._chunk))
                self._chunk.clear()

    def end(self) -> None:
        """Let the reader come to the end."""
        if self._chunk:
            self._hand_over(bytes(self._chunk))
        self._hand_over(None)

    def break_off(self, why: BaseException) -> None:
        """Make both sides fail with ``why``, one of them having done so."""
        self._broken = why
        while True:
            try:
                self._chunks.put_nowait(None)
                return
            except queue.Full:
                with suppress(queue.Empty):  # nobody wants these any more
                    self._chunks.get_nowait()

    def _hand_over(self, chunk: bytes | None) -> None:
        while True:
            if self._broken is not None:
                raise self._broken
            try:
                self._chunks.put(chunk, timeout=0.5)
                return
            except queue.Full:
                continue

    def read(self, size: int = -1) -> bytes:
        """Return the next chunk, whatever ``size``; nothing at the end."""
        if self._ended:
            return b""
        chunk = self._chunks.get()
        if self._broken is not None:
            raise self._broken
        self._ended = chunk is None
        return chunk or b""


def part_bytes(expected_bytes: int) -> int:
    """Return the size of the parts in which an object of about ``expected_bytes`` goes up."""
    return max(s3_folder.PART_BYTES, -(-expected_bytes // storage_s3.MOST_PARTS))


class Upload(io.RawIOBase):
    """A stream into an object, which is there when `close` has returned, or not at all."""

    def __init__(self, storage: S3Storage, key: str, expected_bytes: int) -> None:
        self._storage, self._key = storage, key
        self._part_bytes = part_bytes(expected_bytes)
        self._pipe = Pipe(self._part_bytes)
        self._checksum = Checksum()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._upload, name="smp-train-upload", daemon=True)
        self._thread.start()

    def _upload(self) -> None:
        from boto3.s3.transfer import TransferConfig

        config = TransferConfig(
            multipart_threshold=self._part_bytes,
            multipart_chunksize=self._part_bytes,
            max_concurrency=s3_folder.AT_ONCE,
            preferred_transfer_client="classic",
        )
        try:
            self._storage.client.upload_fileobj(self._pipe, self._storage.bucket, self._key, Config=config)
        except BaseException as error:
            self._failure = error
            self._pipe.break_off(error)

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._checksum.record().size

    def write(self, data: Any) -> int:
        """Take ``data`` in; it may change afterwards."""
        with memoryview(data).cast("B") as view:
            self._checksum.add(view)
            try:
                self._pipe.write(view)
            except Exception as error:
                raise self._explained(error) from error
            return len(view)

    def complete(self) -> FileRecord:
        """Wait until the object is there and return its record. Raises `CheckpointError`."""
        record = self._checksum.record()
        try:
            self._pipe.end()
        except Exception as error:
            raise self._explained(error) from error
        self._thread.join()
        if self._failure is not None and not self._is_there(record.size):
            raise self._explained(self._failure) from self._failure
        return record

    def abort(self, why: BaseException) -> None:
        """Give the object up: what has been uploaded of it is removed."""
        self._pipe.break_off(why)
        self._thread.join(ABORT_SECONDS)

    def _is_there(self, size: int) -> bool:
        """Return whether the upload was complete though its last answer was lost: nobody else writes this key."""
        if getattr(self._failure, "response", {}).get("Error", {}).get("Code") != "NoSuchUpload":
            return False
        return bool(self._storage.ask("head_object", key=self._key)["ContentLength"] == size)

    def _explained(self, error: BaseException) -> CheckpointError:
        return self._storage.explained(self._failure or error, "upload_fileobj", self._key)


class _Objects:
    """What DCP asks of a file system."""

    def __init__(self, storage: S3Storage) -> None:
        self._storage = storage
        self._held: dict[str, bytes] = {}
        self.records: dict[str, FileRecord] = {}
        self.expected_bytes = 0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IO[bytes]]:
        """Yield a stream into an object, or of nothing: a reader fetches what it needs itself."""
        name = str(path)
        if mode == "rb":
            yield io.BytesIO()
        elif DCP_METADATA in name:  # small, and about to be renamed, which objects cannot be
            with io.BytesIO() as stream:
                yield stream
                self._held[name] = stream.getvalue()
        else:
            upload = Upload(self._storage, self._storage.key(name), self.expected_bytes)
            try:
                yield upload  # type: ignore[misc]
            except BaseException as error:
                upload.abort(error)
                raise
            self.records[name] = upload.complete()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """Return ``suffix`` below ``path``."""
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        """Return ``path``."""
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: there are no folders."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return False: an attempt's place is its own."""
        return False

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Do nothing."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Put what was held back."""
        folder, _, file = str(new_path).rpartition("/")
        self._storage.put(folder, file, self._held.pop(str(path)))


class S3Writer(FileSystemWriter, Writer):
    """Uploads one object per rank, in parts, while it is being made, and checksums it on the way."""

    def __init__(self, storage: S3Storage, place: str) -> None:
        super().__init__(place, single_file_per_rank=True, sync_files=False)
        self._objects = _Objects(storage)
        self.fs = self._objects  # type: ignore[assignment]
        self.path = place
        self.records = {}
        self.on_stage = lambda stage: None

    def storage_meta(self) -> StorageMeta:
        """Leave the place out of the metadata: a checkpoint may be copied elsewhere."""
        return StorageMeta(save_id=self.save_id)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name each rank's object. A digit before it spreads them over prefixes, on which S3 splits its load."""
        return [replace(plan, storage_data=_StoragePrefix(f"{i % 16:x}/__{i}_")) for i, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Upload this rank's share and record it."""
        try:
            self.on_stage("write")
            self._objects.expected_bytes = sum(_size(item) for item in plan.items)
            results = super().write_data(plan, planner).wait()
            self.on_stage("checksum")
            start = len(str(self.path)) + 1
            self.records = {name[start:]: record for name, record in self._objects.records.items()}
        except Exception as error:
            # What is raised here is pickled on its way to the other ranks: a plain message always can be.
            raise CheckpointError(here(one_line(error))) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _size(item: Any) -> int:
    """Return the bytes that an item of a plan takes, with those of the format it is stored in."""
    if item.tensor_data is None:
        return 1 << 16
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize) + 4096


class S3Reader(LocalReader):
    """Reads one checkpoint, each entry by a request of its own, several at once."""

    def __init__(self, storage: S3Storage, place: str, files: Mapping[str, int]) -> None:
        FileSystemReader.__init__(self, place)
        self.files = files
        self._storage = storage
        self.fs = _Objects(storage)  # type: ignore[assignment]
        self.path = place
        self._coming: Iterator[bytes] = iter(())

    def metadata_bytes(self) -> bytes:
        """Return the index as it is stored."""
        return self._storage.read(str(self.path), DCP_METADATA)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch and load this rank's share, in the order in which `FileSystemReader` asks for it."""
        wanted: dict[str, list[Any]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            wanted.setdefault(stored.relative_path, []).append(stored)
        spans = [(each.relative_path, each.offset, each.length) for file in wanted.values() for each in file]
        self._coming = self._whole(spans)
        return super().read_data(plan, planner)

    def _whole(self, spans: list[tuple[str, int, int]]) -> Iterator[bytes]:
        """Yield each (file, start, length), which may be larger than one request is to bring."""
        part = s3_folder.PART_BYTES
        pieces = self._storage.ranges(
            (str(self.path), file, start + done, min(part, length - done))
            for file, start, length in spans
            for done in range(0, length, part)
        )
        for _, _, length in spans:
            yield b"".join(next(pieces) for _ in range(0, length, part))

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        data = io.BytesIO(next(self._coming))
        assert data.getbuffer().nbytes == sinfo.length
        refuse_compressed(data)
        return data
