"""Who writes which tree, as SMP's replication ranks have it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from smp_train.backends.smp_saver import Library, LibrarySaver, each_tree_once
from smp_train.checkpoints.folder import open_folder


def test_one_group_writes_each_tree() -> None:
    assert each_tree_once([("", True, (0, 1)), ("", True, (0, 1))])
    assert each_tree_once([("", True, (0, 1)), ("", True, (0, 1)), ("", False, (2, 3)), ("", False, (2, 3))])
    assert each_tree_once(
        [("tp0_ep0", True, (0, 2)), ("tp1_ep0", True, (1, 3)), ("tp0_ep0", True, (0, 2)), ("tp1_ep0", True, (1, 3))]
    )


def test_nothing_is_written_twice_or_left_out() -> None:
    # torch's own hybrid sharding: two nodes, and SMP takes every rank for the first replica.
    assert not each_tree_once([("", True, (0, 1)), ("", True, (0, 1)), ("", True, (2, 3)), ("", True, (2, 3))])
    assert not each_tree_once([("", True, (0, 1)), ("", False, (0, 1))])
    assert not each_tree_once([("", False, (0, 1)), ("", False, (0, 1))])


class Writes(Library):
    """A library that writes one file."""

    asynchronous = True

    def begin(self, state: dict[str, Any], folder: str) -> None:
        Path(folder, "__0_0.distcp").write_bytes(b"data")


def test_what_a_library_wrote_itself_is_brought_to_the_disk_with_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    folder, tree = open_folder(tmp_path), tmp_path / "m-3steps" / "tp0_ep0"
    tree.parent.mkdir()
    saver = LibrarySaver(library=Writes(), part="tp0_ep0")
    saver.begin({}, folder, "m-3steps", lambda records: [])
    records = saver.secured(folder, "m-3steps", {"__0_0.distcp": 4})
    assert {name: record.size for name, record in records.items()} == {"tp0_ep0/__0_0.distcp": 4}
    assert synced == [str(tree.parent), str(tree / "__0_0.distcp"), str(tree)]
