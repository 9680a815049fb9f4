"""One list of files for all ranks: rank 0 makes it, and each node checks its files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from smp_train import distributed
from smp_train.data import files, hub
from smp_train.data.convert import open_token_rows
from smp_train.data.files import Selection, list_sources
from smp_train.data.rows import Recipe
from smp_train.errors import DataError
from tests.harness import run


def list_from(folder: str, location: str) -> list[str]:
    """Return the files of a location that is relative to each rank's folder."""
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=120)
    os.chdir(f"{folder}/{ranks.rank}")
    try:
        (fileset,) = list_sources([location], Selection(flag="--dataset"), ranks=ranks)
        assert len(open_token_rows(fileset, Recipe(fileset.kind, 99), ranks=ranks)) == len(fileset.files)
    except DataError as error:
        return [str(error)]
    return [file.path for file in fileset.files]


def test_ranks_in_other_folders_read_the_files_of_rank_0(tmp_path: Path) -> None:
    """Each rank has other files under the same relative name."""
    for rank, names in ((0, ("a.jsonl", "b.jsonl")), (1, ("a.jsonl", "c.jsonl"))):
        (tmp_path / str(rank) / "data").mkdir(parents=True)
        for name in names:
            (tmp_path / str(rank) / "data" / name).write_text(json.dumps({"input_ids": [rank, 1]}) + "\n")
    expected = [f"{tmp_path}/0/data/a.jsonl", f"{tmp_path}/0/data/b.jsonl"]
    assert run(list_from, 2, str(tmp_path), "data") == [expected, expected]
    (tmp_path / "1" / "only").mkdir()
    (tmp_path / "1" / "only" / "a.txt").write_text("a")
    messages = run(list_from, 2, str(tmp_path), "only")
    assert all("--dataset only" in found or "only: no such file or folder" in found for (found,) in messages)


def list_on_two_nodes(folder: str) -> str:
    """Return why rank 1, alone on its node, cannot read the files that rank 0 listed."""
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=120)
    if ranks.rank == 1:
        ranks = replace(ranks, local_rank=0, node_rank=1)
        stat, missing = os.stat, f"{folder}/b.json"

        def of_this_node(path, **options):
            if path == missing:
                raise FileNotFoundError(2, "No such file or directory")
            return stat(path, **options)

        files.os.stat = of_this_node  # type: ignore[attr-defined]
    try:
        list_sources([folder], Selection(), ranks=ranks)
    except DataError as error:
        return str(error)
    return ""


def test_a_node_without_the_files(tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text('{"input_ids": [1, 2]}\n')
    for message in run(list_on_two_nodes, 2, str(tmp_path)):
        assert f"{tmp_path}/b.json: is missing on this node" in message


def look_for_validation(folder: str, failing_rank: int) -> list[str]:
    """Return the validation files of a data set on the hub, which does not answer one rank."""
    datasets = pytest.importorskip("datasets")
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=120)
    load = datasets.load_dataset_builder

    def answer(name, config, **options):
        if ranks.rank == failing_rank:
            raise OSError("the hub cannot be reached")
        return load(folder, config, **options)

    datasets.load_dataset_builder = answer
    hub.open_splits.cache_clear()
    try:
        filesets = list_sources(["acme/words"], Selection(), ranks=ranks, held_out=True)
    except DataError as error:
        return [str(error)]
    return [file.name for fileset in filesets for file in fileset.files]


def test_only_rank_0_asks_the_hub_for_splits(tmp_path: Path) -> None:
    """A rank whose question fails must not conclude that there is no validation split."""
    for name in ("train.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    assert run(look_for_validation, 2, str(tmp_path), 1) == [["validation-0"]] * 2
    for (message,) in run(look_for_validation, 2, str(tmp_path), 0):
        assert "the hub cannot be reached" in message
