"""torch.distributed.checkpoint made strict: files accounted for, keys checked, nothing unpickled freely."""

from __future__ import annotations

import gc
import io
import logging
import math
import pickle
from collections.abc import Callable, Container, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from smp_train.checkpoints.collective import gather, root_cause
from smp_train.checkpoints.format import METADATA
from smp_train.checkpoints.save_planner import SavePlanner
from smp_train.checkpoints.state import State, present
from smp_train.distributed.agree import ALL_RANKS, group, is_alone, unless
from smp_train.errors import CheckpointError, first_few

if TYPE_CHECKING:
    from smp_train.checkpoints.dcp_storage import TreeWriter

logger = logging.getLogger(__name__)

DCP_METADATA = METADATA
NOT_NEEDED = ("optim.param_groups",)
"""Part of torch's own optimizer state dicts; hyper-parameters come from the arguments of the run."""


class Reader(StorageReader):
    """A DCP reader whose metadata is read ahead, so that a failure to read it has one clear message.

    It is read once: with many ranks it is large, and slow to take apart.
    """

    _metadata: Metadata | None = None

    def preload(self) -> None:
        """Set the metadata. Raises `CheckpointError`."""
        raise NotImplementedError

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that was read ahead."""
        if self._metadata is None:
            self.preload()
        assert self._metadata is not None
        return self._metadata


def parsed_index(data: bytes, files: Mapping[str, int]) -> Metadata:
    """Return the index of a tree that consists of ``files`` (name: size in bytes). Raises any exception where it is
    invalid."""
    collecting = gc.isenabled()
    gc.disable()  # a third of the time: it goes through all records again and again, and finds nothing
    try:
        metadata: Metadata = _MetadataUnpickler(io.BytesIO(data)).load()
        _check(metadata, files)
    finally:
        if collecting:
            gc.enable()
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    return metadata


class _MetadataUnpickler(pickle._Unpickler):
    """DCP keeps its index as a pickle; only instances of the plain records it is made of may be built from it.

    In Python, at a seventh of the speed of the one in C: that one sets attributes on whatever a pickle asks it to,
    classes and functions too, and allocates what a few bytes ask for.
    """

    RECORDS = (Metadata, MetadataIndex, StorageMeta, BytesStorageMetadata, TensorStorageMetadata, ChunkStorageMetadata,
               _StorageInfo)  # fmt: skip
    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load(self) -> Any:
        """Return the object; `pickle._Unpickler.load` without its buffer of frames, as all bytes are in memory."""
        self.read, self.readline, self.readinto = self._file_read, self._file_readline, None  # type: ignore[attr-defined]
        self.metastack: list[Any] = []
        self.stack = []
        self.append, self.proto = self.stack.append, 0
        read, dispatch = self.read, self.dispatch
        try:
            while key := read(1):
                dispatch[key[0]](self)
        except pickle._Stop as stop:  # type: ignore[attr-defined]
            return stop.value
        raise EOFError("it ends early")

    def load_frame(self) -> None:
        """Go on: a frame is a hint for readers of files."""
        self.read(8)

    def load_build(self) -> None:
        """Fill a record with its fields; refuse to set anything on what is no such record."""
        record, state = self.stack[-2:]
        if type(record) in self.RECORDS and type(state) is dict:
            vars(record).update(state)
            self.stack.pop()
        elif type(record) is TensorProperties:
            super().load_build()  # type: ignore[misc]
        else:
            raise pickle.UnpicklingError("it sets attributes on an object that is not a record of a checkpoint's index")

    del dispatch[pickle.BYTEARRAY8[0]]  # it allocates whatever length it is given; no index has one
    dispatch |= {pickle.FRAME[0]: load_frame, pickle.BUILD[0]: load_build}

    ALLOWED: Mapping[str, Container[str]] = {
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.distributed.checkpoint.metadata": (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        ),
        "torch.serialization": ("_get_layout",),
        "torch": ("Size",),
        "collections": ("OrderedDict",),
        "pathlib": ("Path", "PosixPath", "PurePosixPath"),
        "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        """Return the named record type, or a torch dtype; refuse anything else."""
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if name in self.ALLOWED.get(module, ()):
            if module == "pathlib._local":  # written by Python 3.13
                module = "pathlib"
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which has no place in a checkpoint's index")


def _check(metadata: Any, files: Mapping[str, int]) -> None:
    """Raise ValueError where an index is none, names other files, or a tensor larger than all ``files`` together."""
    if not (
        isinstance(metadata, Metadata)
        and isinstance(metadata.state_dict_metadata, dict)
        and isinstance(metadata.storage_data, dict)
        and all(isinstance(key, MetadataIndex) for key in metadata.storage_data)
        and all(isinstance(info, _StorageInfo) for info in metadata.storage_data.values())
    ):
        raise ValueError("it is not an index of torch.distributed.checkpoint")
    if any(getattr(info, "transform_descriptors", None) for info in metadata.storage_data.values()):
        raise ValueError("its entries are transformed, by compression or otherwise, which is not read here")
    for info in metadata.storage_data.values():
        if info.relative_path not in files:
            raise ValueError(f"it names {info.relative_path!r}, which is not a file of this checkpoint")
        if min(info.offset, info.length) < 0 or info.offset + info.length > files[info.relative_path]:
            raise ValueError(f"it names bytes that {info.relative_path} does not have")
    total = sum(files.values())
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        size = [int(length) for length in entry.size]
        if min(size, default=0) < 0 or math.prod(size) * entry.properties.dtype.itemsize > total:
            raise ValueError(f"{key} would have {size} numbers, and all files together have {total} bytes")


class PlainLoadPlanner(DefaultLoadPlanner):
    """Unpickles no arbitrary objects."""

    unpickle = staticmethod(partial(torch.load, weights_only=True))

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor: numbers, strings, and containers of them."""
        plain = io.BytesIO()
        torch.save(self.unpickle(value), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


class StrictLoadPlanner(PlainLoadPlanner):
    """Refuses a checkpoint that does not hold exactly what is asked for; unpickles no arbitrary objects."""

    def __init__(self, ignored: Container[str] = ()) -> None:
        """``ignored``: entries that may be there unasked for."""
        super().__init__()
        self.ignored = ignored

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Compare what is asked for with what was saved. Raises `CheckpointError`."""
        assert metadata is not None
        saved = metadata.state_dict_metadata
        wanted, _ = flatten_state_dict(state_dict)
        super().set_up_planner(present(state_dict), metadata, is_coordinator)
        self.original_state_dict = state_dict  # into which what is no tensor is put
        if any(key.startswith("optim.") for key in wanted) and all(key.startswith("model.") for key in saved):
            raise CheckpointError("it holds weights only; start from it with --finetune 1 --pretrained_checkpoint_file")
        problems = compare(wanted, saved, self.ignored)
        if problems:
            raise CheckpointError(
                f"{'; '.join(problems)} "
                "(saved from another model, or with another --num_layers, --hidden_width or --vocab_size?)"
            )
        if any(key.startswith("optim.") for key in wanted):  # a run that goes on, and not a model to use
            _warn_of_other_dtypes(wanted, saved)


def compare(wanted: Mapping[str, Any], saved: Mapping[str, Any], ignored: Container[str] = ()) -> list[str]:
    """Say, in up to three phrases, how the flat state ``wanted`` differs from the ``saved`` one's metadata.

    Saved entries of a kind that is not asked for at all (``optim.*`` when only ``model.*`` is loaded) are no
    difference, nor are ``ignored`` ones.
    """
    kinds = {key.split(".")[0] for key in wanted}
    missing = [key for key in wanted if key not in saved]
    surplus = [key for key in saved.keys() - wanted.keys() if key not in ignored and not key.startswith(NOT_NEEDED)]
    extra = sorted(key for key in surplus if key.split(".")[0] in kinds)
    other = []
    for key, value in wanted.items():
        entry, is_tensor = saved.get(key), isinstance(value, torch.Tensor)
        if entry is not None and isinstance(entry, TensorStorageMetadata) != is_tensor:
            other.append(f"{key} is a tensor on one side only")
        elif entry is not None and is_tensor and entry.size != value.size():
            other.append(f"{key} is {list(entry.size)} there and {list(value.size())} here")
    found = (("it lacks ", missing), ("it has unexpected entries ", extra), ("", other))
    return [label + first_few(keys) for label, keys in found if keys]


def _warn_of_other_dtypes(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor) and value.dtype != (dtype := saved[key].properties.dtype):
            what = f"{key} was saved as {dtype} and is {value.dtype} here"
            logger.warning("%s: values are converted, the run does not continue exactly", what, extra=ALL_RANKS)
            return


def save_together(state: dict[str, Any], *, storage_writer: StorageWriter) -> None:
    """Write one tree of all ranks; collective."""
    # Not `dcp.save`: that of torch 2.5 always communicates where there is a process group.
    planner = DefaultSavePlanner() if is_alone() else SavePlanner()
    _save_state_dict(
        state, storage_writer=storage_writer, process_group=group(), no_dist=is_alone(), planner=planner
    )


def load_together(state: dict[str, Any], *, storage_reader: StorageReader, planner: Any) -> None:
    """Fill ``state`` from one tree, which all ranks read; collective."""
    _load_state_dict(state, storage_reader, process_group=group(), planner=planner, no_dist=is_alone())


def save_state(state: dict[str, Any], writer: TreeWriter, save: Callable[..., None] = save_together) -> None:
    """Write ``state`` (nested dicts of tensors, DTensors and plain values) by ``save``. Collective.

    Raises `CheckpointError` on every rank that takes part when any of them failed.
    """
    try:
        save(state, storage_writer=writer)
    except CheckpointException as error:
        raise CheckpointError(root_cause(error)) from error


def load_state(
    state: dict[str, Any],
    reader: Reader,
    label: str,
    ignored: Container[str] = (),
    load: Callable[..., None] = load_together,
) -> None:
    """Fill ``state`` in place from what ``reader`` reads, on whatever mesh it is laid out. Collective.

    Where the checkpoint has names that parameters have in memory, it is read under these (`State.named_as`). Entries in
    ``ignored`` may be there unasked for; it is read by ``load``. Raises `CheckpointError` on
    every rank when any rank failed, or when ``state`` and checkpoint do not match.
    """
    gather(f"cannot load {label}", reader.preload)
    if isinstance(state, State):
        state = state.named_as(saved_entries(reader))
    failure: Exception | None = None
    try:
        load(state, storage_reader=reader, planner=StrictLoadPlanner(ignored))
    except CheckpointException as error:
        failure = CheckpointError(root_cause(error))
    gather(f"cannot load {label}", partial(unless, failure, None))  # ranks that read another tree do not know of it


def saved_entries(reader: Reader) -> Mapping[str, Any]:
    """Return the metadata of every entry of a checkpoint by its flat name. Raises `CheckpointError`. Not collective."""
    entries: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    return entries


def plain_values(reader: Reader) -> dict[str, Any]:
    """Return the numbers, strings and the like that another program stored beside its tensors, by flat name.

    Left out is what is no plain value, and the optimizer's. Not collective.
    """
    found: dict[str, Any] = {}
    for key, entry in saved_entries(reader).items():
        if not isinstance(entry, BytesStorageMetadata) or key.startswith(("optim", "model")):
            continue
        try:
            value = plain_value(reader, key)
        except CheckpointError:
            continue
        if isinstance(value, (int, float, str, bool)):
            found[key] = value
    return found


def plain_value(reader: Reader, key: str, planner: type[PlainLoadPlanner] = PlainLoadPlanner) -> Any:
    """Return one entry that is not a tensor. Not collective. Raises `CheckpointError` where it cannot be read."""
    state: dict[str, Any] = {key: None}
    try:
        _load_state_dict(state, storage_reader=reader, planner=planner(), no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{key} cannot be read: {root_cause(error)}") from error
    return state[key]


def read_tensor(reader: Reader, key: str) -> torch.Tensor:
    """Read one entry whole. Not collective, so also within a load. Raises `CheckpointError` where it cannot be read."""
    metadata, planner = reader.read_metadata(), DefaultLoadPlanner()
    entry: Any = metadata.state_dict_metadata[key]
    value = torch.empty(entry.size, dtype=entry.properties.dtype)
    try:
        reader.set_up_storage_reader(metadata, is_coordinator=False)
        planner.set_up_planner({key: value}, metadata)
        reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
    except Exception as error:
        raise CheckpointError(f"{key} cannot be read: {root_cause(error)}") from error
    return value
