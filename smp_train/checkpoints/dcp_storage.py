"""torch.distributed.checkpoint on a `Storage`: a tree is written while it is serialised, and checksummed on the way."""

from __future__ import annotations

import io
import os
import posixpath
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import IO, Any, BinaryIO

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from smp_train.checkpoints.collective import REMEDY, root_cause
from smp_train.checkpoints.dcp import DCP_METADATA, Reader, parsed_index
from smp_train.checkpoints.format import Checksum, FileRecord, checksum_of
from smp_train.distributed.agree import here
from smp_train.errors import CheckpointError
from smp_train.models.weight_files import refuse_compressed
from smp_train.progress import MOVED
from smp_train.storage import Range, Storage, is_s3, s3, wait_for
from smp_train.storage.ranges import RangeFile


class _Checksummed(io.RawIOBase):
    """Passes on what is written, and has its record."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._checksum = file, Checksum()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.record().size

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as view:
            self._checksum.add(view)
            self._file.write(view)
            MOVED.done += len(view)
            return len(view)

    def record(self) -> FileRecord:
        return self._checksum.record()


class _Files:
    """What DCP asks of a file system."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._index: dict[str, bytes] = {}
        self.records: dict[str, FileRecord] = {}
        self.expected_bytes = 0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IO[bytes]]:
        """Yield a stream into a file, or from one in a folder; from S3 `TreeReader` fetches what it needs itself."""
        name = str(path)
        if mode == "rb":
            folder = self._storage.location
            with io.BytesIO() if is_s3(folder) else open(f"{folder}/{name}", "rb") as file:
                yield file
        elif DCP_METADATA in name:  # DCP writes it under another name and renames it
            with io.BytesIO() as stream:
                yield stream
                self._index[name] = stream.getvalue()
        else:
            with self._storage.writer(name, self.expected_bytes) as file:
                checksummed: Any = _Checksummed(file)
                yield checksummed
            self.records[name] = checksummed.record()

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        pass  # a file is written with its folders

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False  # an attempt's files are its own

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        pass

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        data = self._index.pop(str(path))
        self._storage.put(str(new_path), data)
        self.records[str(new_path)] = checksum_of([data])


class TreeWriter(FileSystemWriter):
    """Writes one file per rank into a tree, and keeps account of the files this rank wrote, for COMMITTED."""

    def __init__(self, storage: Storage, place: str, begun: str) -> None:
        """``begun`` is a file of the attempt, which rank 0 has written."""
        super().__init__(place, single_file_per_rank=True, sync_files=False)
        self._storage, self._begun = storage, begun
        self._files = _Files(storage)
        self.fs = self._files  # type: ignore[assignment]
        self.path = place
        self.on_stage: Callable[[str], None] = lambda stage: None

    @property
    def records(self) -> dict[str, FileRecord]:
        """The files that this rank has written, by their path in the tree."""
        return {posixpath.relpath(name, str(self.path)): record for name, record in self._files.records.items()}

    def storage_meta(self) -> StorageMeta:
        """Leave the place out of the metadata: a checkpoint may be copied elsewhere."""
        return StorageMeta(save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse to write where this rank does not see the attempt that rank 0 has begun."""
        if not wait_for(lambda: self._storage.exists(self._begun)):
            location = self._storage.location
            raise CheckpointError(
                here(
                    f"does not see {self._begun}, which rank 0 made: the nodes do not share {location}; "
                    "give a --checkpoint_dir that they do"
                )
            )
        return super().prepare_local_plan(plan)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name each rank's file. In S3 a digit before it spreads them over prefixes, on which S3 splits its load."""
        spread = is_s3(self._storage.location)
        names = [f"{i % 16:x}/__{i}_" if spread else f"__{i}_" for i in range(len(plans))]
        return [replace(plan, storage_data=_StoragePrefix(name)) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share and record it."""
        try:
            self.on_stage("write")
            self._files.expected_bytes = sum(_size(item) for item in plan.items)
            MOVED.begin(self._files.expected_bytes)
            results = super().write_data(plan, planner).wait()
            self.on_stage("checksum")
        except Exception as error:
            # What is raised here is pickled on its way to the other ranks: a plain message always can be.
            raise CheckpointError(here(self._explained(error))) from error
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _explained(self, error: Exception) -> str:
        said = root_cause(error)
        try:
            free = shutil.disk_usage(self._storage.location).free
        except OSError:  # as in S3
            return said
        if free < 1 << 20 and REMEDY not in said:  # torch's stream writer loses the reason for a short write
            said = f"{said}; {REMEDY}"
        return f"{said} ({free >> 20} MiB free there)" if REMEDY in said else said


def _size(item: Any) -> int:
    """Return the bytes that an item of a plan takes, with those of the format it is stored in."""
    if item.tensor_data is None:
        return 1 << 16
    return int(item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize) + 4096


class TreeReader(Reader, FileSystemReader):
    """Reads one tree, and of it no other files than ``files`` (name: size in bytes); in S3 several entries at once."""

    def __init__(self, storage: Storage, place: str, files: Mapping[str, int]) -> None:
        super().__init__(place)
        self.files = files
        self._storage = storage
        self.fs = _Files(storage)  # type: ignore[assignment]
        self.path = place
        self._coming: Iterator[bytes] = iter(())

    def preload(self) -> None:
        """Read the metadata. Raises `CheckpointError`."""
        index = posixpath.join(str(self.path), DCP_METADATA)
        try:
            if DCP_METADATA not in self.files:
                raise ValueError("it is missing, a link, or not a file of this checkpoint")
            data = next(self._whole([(DCP_METADATA, 0, self.files[DCP_METADATA])]))
            self._metadata = parsed_index(data, self.files)
        except Exception as error:
            raise CheckpointError(f"{self._storage.location}/{index} cannot be read: {root_cause(error)}") from error

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and load this rank's share, in the order in which `FileSystemReader` asks for it."""
        wanted: dict[str, list[Any]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            wanted.setdefault(stored.relative_path, []).append(stored)
        spans = [(each.relative_path, each.offset, each.length) for file in wanted.values() for each in file]
        MOVED.begin(sum(length for _, _, length in spans))
        if is_s3(self._storage.location):
            self._coming = self._whole(spans)
        return super().read_data(plan, planner)

    def _whole(self, spans: list[tuple[str, int, int]]) -> Iterator[bytes]:
        """Yield each (file, start, length), which may be larger than one request is to bring."""
        part = s3.PART_BYTES
        pieces = self._storage.ranges(
            Range(posixpath.join(str(self.path), file), start + done, min(part, length - done))
            for file, start, length in spans
            for done in range(0, length, part)
        )
        for _, _, length in spans:
            yield b"".join(next(pieces) for _ in range(0, length, part))

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        MOVED.done += sinfo.length
        if is_s3(self._storage.location):
            data = io.BytesIO(next(self._coming))
            if data.getbuffer().nbytes != sinfo.length:
                raise EOFError(f"{sinfo.relative_path} is shorter than its index says")
            refuse_compressed(data)
            return data

        def read(start: int, length: int) -> bytes:
            file.seek(sinfo.offset + start)
            found: bytes = file.read(length)
            return found

        refuse_compressed(io.BufferedReader(RangeFile(sinfo.length, read)))
        found: IO[bytes] = super()._slice_file(file, sinfo)  # torch reads from the file into the tensor: no copy of it
        return found
