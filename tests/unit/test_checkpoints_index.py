"""``index.bin`` of a tree: what it holds, and what it refuses."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save

from smp_train.checkpoints.dcp import index
from smp_train.checkpoints.dcp.index import INDEX
from smp_train.checkpoints.dcp.storage import TreeReader, TreeWriter
from smp_train.checkpoints.dcp.trees import load_state, save_state
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


@pytest.mark.parametrize("gone", ["absent", "cut", "another program's", "of another .metadata"])
def test_the_index_of_dcp_is_read_where_ours_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    path = folder / TREE / INDEX
    if gone == "absent":
        path.unlink()
    elif gone == "another program's":
        path.write_bytes(save({"header": np.zeros(3, np.uint8)}))
    elif gone == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        change(folder, lambda header, columns: header.update(metadata=header["metadata"] + 1))
    names = reads_of(monkeypatch, folder)
    target = state(fill=False)
    load_state(target, reader(folder), "it")
    assert same(target, state())
    assert names[-1] == ".metadata"


def test_trees_are_those_of_torch(folder: Path, tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path / "theirs" / TREE)
    for read in (
        lambda target: dcp.load(target, checkpoint_id=folder / TREE),
        lambda target: load_state(target, reader(tmp_path / "theirs"), "it"),
    ):
        target = state(fill=False)
        read(target)
        assert same(target, state())


# --- an index that is wrong


def change(folder: Path, edit: Callable[[dict[str, Any], list[Any]], Any]) -> None:
    """Write the index again with other contents; ``edit`` gets header and arrays."""
    path = folder / TREE / INDEX
    decoded = index.decode(path.read_bytes(), (folder / TREE / ".metadata").stat().st_size)
    assert decoded is not None
    header, columns = decoded
    edit(header, columns)
    path.write_bytes(index.encode(header, columns))


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
    "a file number outside the list": (column(2, 200), "out of bounds"),
    "a start outside the file": (column(3, 1 << 40), "does not have"),
    "an endless record": (column(4, (1 << 63) - 1), "does not have"),
    "a chunk outside the tensor": (column(0, 1), "outside its shape"),
    "a chunk larger than the tensor": (column(1, 5), "outside its shape"),
    "an enormous tensor": (entry("model.w", 2, [10**7, 10**6]), "all files together have"),
    "a negative shape": (entry("model.w", 2, [-4, 3]), "and shape"),
    "a negative number of chunks": (entry("model.w", 3, -1), "-1 chunks"),
    "too many chunks": (entry("model.n", 3, 10**15), "arrays"),
    "a type that is none": (entry("model.w", 1, "load"), "of type load"),
    "an entry too few": (lambda header, columns: header["entries"].pop(), "other lengths"),
    "entries that are none": (lambda header, columns: header.update(entries=[1, 2]), "TypeError"),
    "a header that is not whole": (lambda header, columns: header.clear(), "KeyError"),
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
