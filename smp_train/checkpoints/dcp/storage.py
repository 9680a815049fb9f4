"""torch.distributed.checkpoint on a `Storage`: files are checksummed while DCP writes them."""

from __future__ import annotations

import io
import os
import pickle
import posixpath
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any, BinaryIO

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from smp_train.checkpoints.collective import REMEDY, root_cause
from smp_train.checkpoints.dcp import index
from smp_train.checkpoints.dcp.index import INDEX
from smp_train.checkpoints.dcp.pickled import unpickle
from smp_train.checkpoints.format import METADATA
from smp_train.distributed.agree import with_rank
from smp_train.errors import CheckpointError
from smp_train.models.weight_files import refuse_compressed
from smp_train.progress import MOVED
from smp_train.storage import Storage, is_s3, wait_for
from smp_train.storage.checksum import FileRecord, checksum_of
from smp_train.storage.s3 import parts
from smp_train.storage.streams import RangeFile


class _Checksummed(io.RawIOBase):
    """Writes to a file and computes the file's `FileRecord`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.record = FileRecord()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.record.size

    def write(self, data: Any) -> int:
        with memoryview(data).cast("B") as view:
            self.record = self.record.extended(view)
            self._file.write(view)
            MOVED.done += len(view)
            return len(view)


class _Files:
    """The file system that DCP writes to and reads from."""

    concat_path = staticmethod(posixpath.join)

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.records: dict[str, FileRecord] = {}
        self.expected_bytes = 0

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IO[bytes]]:
        """Yield a stream to or from a file. `TreeReader` reads from S3 by itself, so a stream from S3 is empty."""
        if mode == "rb":
            folder = self._storage.location
            with io.BytesIO() if is_s3(folder) else open(f"{folder}/{path}", "rb") as file:
                yield file
        else:
            with self._storage.writer(str(path), self.expected_bytes) as file:
                checksummed: Any = _Checksummed(file)
                yield checksummed
            self.records[str(path)] = checksummed.record

    def put(self, path: str, data: bytes) -> None:
        self._storage.put(path, data)
        self.records[path] = checksum_of([data])


class TreeWriter(dcp.FileSystemWriter):
    """Writes one file per rank into a tree; rank 0 also writes the tree's two indexes.

    Ranks with a ``part`` write several trees in one save: the first name of each entry is the sub-folder of its tree.
    """

    def __init__(self, storage: Storage, folder: str, begun: str, part: str = "") -> None:
        """``folder`` is the attempt's folder; ``begun`` is the file that rank 0 has written to reserve the attempt."""
        super().__init__(folder, single_file_per_rank=True, sync_files=False)
        self._storage, self._begun, self._folder, self._part = storage, begun, folder, part
        self.path, self._files = posixpath.join(folder, part) if part else folder, _Files(storage)
        self.fs = self._files  # type: ignore[assignment]
        self.on_stage: Callable[[str], None] = lambda stage: None
        """Called with ``write``, then ``checksum``, when this rank reaches that stage."""

    @property
    def records(self) -> dict[str, FileRecord]:
        """The records of the files that this rank has written, by path in the attempt."""
        return {posixpath.relpath(name, self._folder): record for name, record in self._files.records.items()}

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        """Refuse to write if this rank does not see the attempt that rank 0 has begun."""
        if not wait_for(lambda: self._storage.exists(self._begun)):
            unshared = f"the nodes do not share {self._storage.location}; give a --checkpoint_dir that they do"
            raise CheckpointError(with_rank(f"does not see {self._begun}, which rank 0 made: {unshared}"))
        return plan

    def prepare_global_plan(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        """Name each rank's file. In S3 the name begins with a hex digit, as S3 splits load by first characters."""
        spread = is_s3(self._storage.location)
        names = [f"{i % 16:x}/__{i}_" if spread else f"__{i}_" for i in range(len(plans))]
        return [replace(plan, storage_data=_StoragePrefix(name)) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and keep its `FileRecord`."""
        try:
            self.on_stage("write")
            tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
            content = sum(tensor.chunk.sizes.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
            self._files.expected_bytes = content + 4096 * len(tensors) + 65536 * (len(plan.items) - len(tensors))
            MOVED.begin(self._files.expected_bytes)
            results = super().write_data(plan, planner)
            self.on_stage("checksum")
        except Exception as error:
            # DCP pickles the error for the other ranks. Not every error can be pickled: raise one with only a message.
            raise CheckpointError(with_rank(self._explained(error))) from error
        return results

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write both indexes on rank 0: DCP's own for other programs, and ``index.bin``, which loads faster."""
        metadata.storage_data = {result.index: result.storage_data for share in results for result in share}
        metadata.storage_meta = StorageMeta(save_id=self.save_id)  # no path: a checkpoint may be copied elsewhere
        for part, tree in _by_part(metadata).items() if self._part else [("", metadata)]:
            data = pickle.dumps(tree)
            header, columns = index.pack(tree)
            self._files.put(posixpath.join(self._folder, part, METADATA), data)
            header["metadata"] = len(data)
            self._files.put(posixpath.join(self._folder, part, INDEX), index.encode(header, columns))

    def _explained(self, error: Exception) -> str:
        message, free = root_cause(error), 1 << 20
        with suppress(OSError):  # S3 has no disk
            free = shutil.disk_usage(self._storage.location).free
        if free < 1 << 20 and REMEDY not in message:  # torch's stream writer loses the reason for a short write
            message += f"; {REMEDY}"
        return f"{message} ({free >> 20} MiB free there)" if REMEDY in message else message


def _by_part(metadata: dcp.Metadata) -> dict[str, dcp.Metadata]:
    """Return the metadata of each tree by its sub-folder, which is the first name of every entry in ``metadata``."""
    trees: dict[str, dcp.Metadata] = {}
    for key, entry in metadata.state_dict_metadata.items():
        part, _, name = key.partition(".")
        if part not in trees:
            trees[part] = replace(metadata, state_dict_metadata={}, planner_data={}, storage_data={})
        trees[part].state_dict_metadata[name] = entry
    for key, path in (metadata.planner_data or {}).items():
        part, _, name = key.partition(".")
        trees[part].planner_data[name] = path[1:]
    for entry_index, location in metadata.storage_data.items():
        part, _, name = entry_index.fqn.partition(".")
        trees[part].storage_data[replace(entry_index, fqn=name)] = location
    return trees


class Reader(dcp.FileSystemReader):
    """A DCP reader that can read its index before DCP does, so that a failure gives one clear message."""

    _metadata: dcp.Metadata | None = None

    def preload(self) -> None:
        """Read the index. Raises `CheckpointError`."""
        raise NotImplementedError

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Return the index; it is read once."""
        if self._metadata is None:
            self.preload()
        assert self._metadata is not None
        return self._metadata


class TreeReader(Reader):
    """Reads one tree, using only the ``files`` (name: size in bytes) in it. Reads entries from S3 in parallel."""

    def __init__(self, storage: Storage, folder: str, files: Mapping[str, int]) -> None:
        super().__init__(folder)
        self.files, self.path = files, folder
        self.index_file = INDEX if INDEX in files else METADATA
        self._storage, self._folder = storage, folder
        self.fs = _Files(storage)  # type: ignore[assignment]
        self._next_entries: Iterator[bytes] = iter(())

    def preload(self) -> None:
        """Read ``index.bin`` if the tree has one for this ``.metadata``, else DCP's. Raises `CheckpointError`."""
        name = self.index_file
        try:
            if METADATA not in self.files:
                raise ValueError(f"{METADATA} is missing, a link, or not a file of this checkpoint")
            packed = index.decode(self.whole_file(INDEX), self.files[METADATA]) if name == INDEX else None
            if packed is None:
                name = METADATA
                packed = index.pack(unpickle(self.whole_file(METADATA)))
            self._metadata = index.unpack(*packed, self.files)
        except Exception as error:
            path = posixpath.join(self._storage.location, self._folder, name)
            raise CheckpointError(f"{path} cannot be read: {root_cause(error)}") from error

    def whole_file(self, name: str) -> bytes:
        """Return the content of one file."""
        return next(self._read_spans([(name, 0, self.files[name])]))

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        """Read this rank's entries, file by file as `FileSystemReader` does."""
        by_file: dict[str, list[tuple[str, int, int]]] = {}
        for info in (self.storage_data[item.storage_index] for item in plan.items):
            by_file.setdefault(info.relative_path, []).append((info.relative_path, info.offset, info.length))
        spans = [span for spans in by_file.values() for span in spans]
        MOVED.begin(sum(length for _, _, length in spans))
        if is_s3(self._storage.location):
            self._next_entries = self._read_spans(spans)
        return super().read_data(plan, planner)

    def _read_spans(self, spans: list[tuple[str, int, int]]) -> Iterator[bytes]:
        """Yield the bytes of each span (file, start, length); a span larger than one part takes several requests."""
        divided = [list(parts(posixpath.join(self._folder, file), start, length)) for file, start, length in spans]
        pieces = self._storage.ranges(piece for pieces in divided for piece in pieces)
        for pieces_of_span in divided:
            yield b"".join(next(pieces) for _ in pieces_of_span)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        MOVED.done += sinfo.length
        if is_s3(self._storage.location):
            data = io.BytesIO(next(self._next_entries))
            refuse_compressed(data)
            return data
        entry = RangeFile(sinfo.length, lambda start, length: os.pread(file.fileno(), length, sinfo.offset + start))
        refuse_compressed(io.BufferedReader(entry))
        view: IO[bytes] = super()._slice_file(file, sinfo)  # torch reads into the tensor without a copy of the entry
        return view
