"""``index.bin`` of a tree: what it holds, what it refuses, and what a rank reads by it."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from smp_train.checkpoints.dcp import index
from smp_train.checkpoints.dcp.index import INDEX, MAGIC
from smp_train.checkpoints.dcp.pickled import unpickle
from smp_train.checkpoints.dcp.storage import TreeReader, TreeWriter
from smp_train.checkpoints.dcp.trees import (
    PlainLoadPlanner,
    load_state,
    plain_value,
    plain_values,
    read_tensor,
    save_state,
    saved_entries,
)
from smp_train.errors import CheckpointError
from smp_train.storage import open_storage

TREE = "m-1steps/tree"


def state(fill: bool = True) -> dict[str, Any]:
    w = torch.arange(12.0).reshape(4, 3) if fill else torch.full((4, 3), torch.nan)
    b = torch.full((3,), 2.0 if fill else 0.0, dtype=torch.bfloat16)
    number = torch.tensor(7.0 if fill else 0.0)
    extra = {"count": 3, "words": ["a"]} if fill else {"count": 0, "words": []}
    return {"model": {"w": w, "b": b, "n": number}, "extra": extra}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one tree."""
    there = open_storage(tmp_path)
    there.put(f"{TREE}/.begun", b"{}")
    writer = TreeWriter(there, TREE, begun=f"{TREE}/.begun")
    save_state(state(), writer)
    assert set(writer.records) == {".metadata", INDEX, "__0_0.distcp"}
    for name, record in writer.records.items():
        assert record.size == (tmp_path / TREE / name).stat().st_size
    return tmp_path


def reader(folder: Path, **sizes: int) -> TreeReader:
    there = open_storage(folder)
    files = {name: entry.size for name, entry in there.files(TREE).items()}
    return TreeReader(there, TREE, files | sizes)


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else bool(one == two)


def reads_of(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Return the list of files that are read whole from now on."""
    names: list[str] = []
    once = TreeReader.whole_file
    monkeypatch.setattr(TreeReader, "whole_file", lambda self, name: (names.append(name), once(self, name))[1])
    return names


@pytest.mark.core
def test_the_index_alone_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = reads_of(monkeypatch, folder)
    target = state(fill=False)
    load_state(target, reader(folder), "it")
    assert same(target, state())
    assert names == [INDEX]


@pytest.mark.parametrize("gone", ["absent", "another program's", "of another .metadata"])
def test_the_index_of_dcp_is_read_where_ours_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    path = folder / TREE / INDEX
    if gone == "absent":
        path.unlink()
    elif gone == "another program's":
        path.write_bytes(b"vectors")
    else:
        change(folder, lambda header, columns: header.update(metadata=header["metadata"] + 1))
    names = reads_of(monkeypatch, folder)
    target = state(fill=False)
    load_state(target, reader(folder), "it")
    assert same(target, state())
    assert names[-1] == ".metadata"


def test_torch_reads_the_tree(folder: Path) -> None:
    target = state(fill=False)
    dcp.load(target, checkpoint_id=folder / TREE)
    assert same(target, state())


def test_a_tree_of_torch_is_read(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / TREE)
    target = state(fill=False)
    load_state(target, reader(tmp_path), "it")
    assert same(target, state())


def test_entries_are_described_and_read_one_by_one(folder: Path) -> None:
    entries = saved_entries(reader(folder))
    assert {name: list(entry.size) for name, entry in entries.items() if hasattr(entry, "size")} == {
        "model.w": [4, 3], "model.b": [3], "model.n": [],
    }  # fmt: skip
    assert entries["model.b"].properties.dtype == torch.bfloat16
    assert plain_values(reader(folder)) == {"extra.count": 3}
    assert plain_value(reader(folder), "extra.words") == ["a"]
    assert same(read_tensor(reader(folder), "model.w"), state()["model"]["w"])
    with pytest.raises(CheckpointError, match=r"extra\.none cannot be read"):
        plain_value(reader(folder), "extra.none")


# --- an index that is wrong


def change(folder: Path, edit: Callable[[dict[str, Any], list[Any]], Any]) -> None:
    """Write the index again with other contents and a right checksum; ``edit`` gets header and arrays."""
    path = folder / TREE / INDEX
    decoded = index.decode(path.read_bytes(), (folder / TREE / ".metadata").stat().st_size)
    assert decoded is not None
    header, columns = decoded
    edit(header, columns)
    header.pop("arrays")
    path.write_bytes(index.encode(header, columns))


def rewrite(folder: Path, edit: Callable[[dict[str, Any], bytearray], Any]) -> None:
    """Write the index again with another header or other bytes of arrays, and a right checksum."""
    path = folder / TREE / INDEX
    text, arrays = path.read_bytes()[len(MAGIC) + 8 :].split(b"\n", 1)
    header, content = json.loads(text), bytearray(arrays)
    edit(header, content)
    body = json.dumps(header).encode() + b"\n" + content
    path.write_bytes(MAGIC + index.checksum_of([body]).crc32.encode() + body)


Edit = Callable[[dict[str, Any], list[Any]], Any]


def entry(name: str, position: int, value: Any) -> Edit:
    """Return an edit of one field of an entry: name, dtype, shape, number of chunks."""

    def edit(header: dict[str, Any], columns: list[Any]) -> None:
        (chosen,) = (listed for listed in header["entries"] if listed[0] == name)
        chosen[position] = value

    return edit


def column(number: int, value: int) -> Edit:
    """Return an edit of the first number of an array: offsets, sizes, file numbers, starts, lengths."""
    return lambda header, columns: columns[number].__setitem__(0, value)


def file(name: str) -> Edit:
    return lambda header, columns: header["files"].__setitem__(0, name)


EDITS: dict[str, tuple[Edit, str]] = {
    "a file above the folder": (file("../../elsewhere"), "not a file of this checkpoint"),
    "an absolute file": (file("/etc/passwd"), "not a file of this checkpoint"),
    "a file number outside the list": (column(2, 200), "out of bounds"),
    "a start outside the file": (column(3, 1 << 40), "does not have"),
    "an endless record": (column(4, (1 << 63) - 1), "does not have"),
    "a chunk outside the tensor": (column(0, 1), "outside its shape"),
    "a chunk larger than the tensor": (column(1, 5), "outside its shape"),
    "an enormous tensor": (entry("model.w", 2, [10**7, 10**6]), "all files together have"),
    "a negative shape": (entry("model.w", 2, [-4, 3]), "and shape"),
    "a shape of words": (entry("model.w", 2, ["a"]), "TypeError"),
    "a negative number of chunks": (entry("model.w", 3, -1), "-1 chunks"),
    "too many chunks": (entry("model.n", 3, 10**15), "arrays"),
    "more chunks than there is memory": (entry("model.w", 3, 10**30), ""),
    "a type that is none": (entry("model.w", 1, "load"), "of type load"),
    "an entry too few": (lambda header, columns: header["entries"].pop(), "other lengths"),
    "no entries": (lambda header, columns: header.pop("entries"), "entries"),
    "entries that are none": (lambda header, columns: header.update(entries=[1, 2]), "TypeError"),
}


def refused(folder: Path, message: str) -> None:
    """Expect one clear error, and no large allocation."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"{INDEX} cannot be read: .*{message}") as error:
            load_state(state(fill=False), reader(folder), "it")
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", EDITS)
def test_a_wrong_index_is_refused(folder: Path, name: str) -> None:
    edit, message = EDITS[name]
    change(folder, edit)
    refused(folder, message)


def negative(header: dict[str, Any], arrays: bytearray) -> None:
    """Make the first offset of a chunk 2**64 - 1, which is -1 in a signed type."""
    kind, length = header["arrays"][0]
    size = np.dtype(kind).itemsize * length
    header["arrays"][0] = ["<u8", length]
    arrays[:size] = np.full(length, -1, np.int64).tobytes()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (negative, "outside its shape"),
        (lambda header, arrays: header["arrays"][0].__setitem__(1, 10**15), "smaller than requested"),
        (lambda header, arrays: header["arrays"][0].__setitem__(1, 10**30), ""),
        (lambda header, arrays: header["arrays"][0].__setitem__(0, "O"), "array of type O"),
        (lambda header, arrays: header["arrays"].pop(), "not enough values"),
        (lambda header, arrays: header.pop("arrays"), "arrays"),
    ],
    ids=["negative", "too long", "absurdly long", "objects", "one too few", "none at all"],
)  # fmt: skip
def test_wrong_arrays_are_refused(folder: Path, edit: Any, message: str) -> None:
    rewrite(folder, edit)
    refused(folder, message)


@pytest.mark.parametrize("length", [len(MAGIC), len(MAGIC) + 4, len(MAGIC) + 8, 100, -1])
def test_a_truncated_index_is_refused(folder: Path, length: int) -> None:
    path = folder / TREE / INDEX
    path.write_bytes(path.read_bytes()[:length])
    refused(folder, "its checksum is not that of its contents")


def test_every_flipped_bit_is_noticed(folder: Path) -> None:
    path = folder / TREE / INDEX
    data = path.read_bytes()
    for position in range(len(MAGIC), len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(CheckpointError, match="checksum"):
            reader(folder).preload()


def test_json_that_is_nested_very_deep_is_refused(folder: Path) -> None:
    body = b"[" * 200_000 + b"\n"
    (folder / TREE / INDEX).write_bytes(MAGIC + index.checksum_of([body]).crc32.encode() + body)
    refused(folder, "RecursionError")


def test_a_pickle_is_never_opened(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return print, ("code from a checkpoint ran",)

    change(folder, lambda header, columns: header.update(entries=pickle.dumps(Evil()).decode("latin-1")))
    refused(folder, "")


# --- what a rank reads


@pytest.fixture
def mesh() -> Iterator[Callable[..., Any]]:
    """Return a function that makes the mesh of one of many ranks, none of which is there."""

    def make(rank: int, *shape: int) -> Any:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=int(np.prod(shape)))
        return init_device_mesh("cpu", shape)

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


def saved_by(mesh: Callable[..., Any], ranks: int, rows: int) -> tuple[Metadata, dict[str, int]]:
    """Return the index of a tree that many ranks have written, and its files."""
    plans = []
    for rank in range(ranks):
        planner = DefaultSavePlanner()
        planner.set_up_planner(sharded(mesh(rank, ranks), rows), is_coordinator=rank == 0)
        plans.append(planner.create_local_plan())
    plans, metadata = DefaultSavePlanner.create_global_plan(planner, plans)
    metadata.storage_data = {
        item.index: _StorageInfo(f"__{rank}_0.distcp", 1000 * number, 1000)
        for rank, plan in enumerate(plans)
        for number, item in enumerate(plan.items)
    }
    return metadata, {f"__{rank}_0.distcp": 100_000 for rank in range(ranks)}


def sharded(mesh: Any, rows: int) -> dict[str, Any]:
    def of(shape: tuple[int, ...], placement: Any) -> Any:
        return distribute_tensor(torch.zeros(shape), mesh, [placement], src_data_rank=None)

    return {
        "rows": of((rows, 6), Shard(0)), "columns": of((5, rows), Shard(1)), "vector": of((rows,), Shard(0)),
        "whole": of((rows, 2), Replicate()), "number": torch.zeros(()), "plain": {"value": 3},
    }  # fmt: skip


@pytest.mark.parametrize("rows", [16, 7, 3])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 4), (4, 1), (4, 3), (4, 4)])
def test_each_rank_asks_for_what_torch_asks_for(
    mesh: Callable[..., Any], before: int, after: int, rows: int
) -> None:
    """The requests of every rank are those of DCP's planner over the whole index, and each is found in its file."""
    metadata, files = saved_by(mesh, before, rows)
    header, columns = index.pack(metadata)
    decoded = index.decode(index.encode(header | {"metadata": 5}, columns), 5)
    assert decoded is not None
    ours = index.unpack(*decoded, files)
    assert ours.state_dict_metadata.keys() == metadata.state_dict_metadata.keys()
    for rank in range(after):
        target = sharded(mesh(rank, after), rows)
        theirs = DefaultLoadPlanner()
        theirs.set_up_planner(dict(target), metadata)
        planner = PlainLoadPlanner()
        planner.set_up_planner(dict(target), ours)
        local = planner.create_local_plan()
        assert local.items == [], "plans of other ranks would go through rank 0"
        expected = theirs.create_local_plan().items
        assert sorted(map(repr, map(unhinted, planner.finish_plan(local).items))) == sorted(
            map(repr, map(unhinted, expected))
        )
        for item in expected:
            assert ours.storage_data[item.storage_index] == metadata.storage_data[item.storage_index]


def unhinted(item: Any) -> tuple[Any, ...]:
    """Return a request without the position of the chunk in the index, which is a hint."""
    storage_index = (item.storage_index.fqn, item.storage_index.offset)
    return item.type, item.dest_index, item.dest_offsets, storage_index, item.storage_offsets, item.lengths


def test_a_part_that_no_chunk_holds_is_refused(mesh: Callable[..., Any]) -> None:
    metadata, files = saved_by(mesh, 4, 16)
    del metadata.state_dict_metadata["rows"].chunks[2]
    ours = index.unpack(*index.pack(metadata), files)
    for rank, lacks in enumerate([False, True]):
        planner = PlainLoadPlanner()
        target = {"rows": sharded(mesh(rank, 2), 16)["rows"]}
        planner.set_up_planner(target, ours)
        with pytest.raises(ValueError, match="rows: only 24 of 48 numbers are saved") if lacks else nullcontext():
            planner.create_local_plan()


def test_values_of_dcp_are_kept(folder: Path) -> None:
    data = (folder / TREE / ".metadata").read_bytes()
    theirs, ours = unpickle(data), reader(folder).read_metadata()
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    for key, info in theirs.storage_data.items():
        assert ours.storage_data[key] == info
    for name, one in theirs.state_dict_metadata.items():
        if hasattr(one, "chunks"):
            assert ours.state_dict_metadata[name].chunks == one.chunks
