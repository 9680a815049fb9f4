"""Data opened by several processes: one list of files for all, each converts its part, an object is fetched once."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from smp_train import distributed
from smp_train.data import hub
from smp_train.data.convert import open_samples, open_token_rows
from smp_train.data.files import Selection, list_sources
from smp_train.data.indexed import TrainingData, ValidationData
from smp_train.data.order import Order
from smp_train.data.rows import Recipe
from smp_train.data.samples import Samples
from smp_train.data.token_file import TokenRows, read_index
from smp_train.distributed import Runtime
from smp_train.distributed.long_work import finish_together
from smp_train.errors import DataError
from smp_train.progress import Progress
from smp_train.storage import client as s3_client
from tests import s3_server
from tests.harness import run
from tests.s3_server import upload
from tests.shards import write_shard


def put_shards(folder: Path, shards: int, rows: int) -> None:
    for number in range(shards):
        write_shard(folder / f"{number}.json", [[number, row % 90, 1] for row in range(rows + number)])


def started(timeout: float = 250, nodes: int = 1) -> Runtime:
    """Form the process group, and return this rank among the ranks of so many nodes."""
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=timeout)
    local = ranks.world_size // nodes
    return replace(
        ranks, local_rank=ranks.rank % local, local_world_size=local, node_rank=ranks.rank // local, num_nodes=nodes
    )


def open_rows(folder: str, ranks: Runtime, cache: str | None = None) -> TokenRows:
    (files,) = list_sources([folder], Selection(), ranks=ranks)
    return open_token_rows(files, Recipe(files.kind, 99), cache_dir=cache, ranks=ranks)


def opened_together(folder: str, cache: str | None):
    """Open shards as two ranks on each of two nodes; return what this rank reads of an epoch."""
    ranks = started(nodes=2)
    rank, world = ranks.rank, ranks.world_size
    source = open_rows(folder, ranks, cache and f"{cache}/{ranks.node_rank}")
    samples = open_samples(source, 3, long="split", short="pack", ranks=ranks)
    order = Order(len(samples), seed=7)
    data = TrainingData(samples, order, seq_len=3, micro_batch=2, accumulation=2, dp_rank=rank, dp_size=world)
    stream = data.batches(0)
    steps = -(-len(source) // data.global_batch)
    names = [name for _ in range(steps) for batch in next(stream) for name in batch.samples]
    stream.close()
    rows = Samples(source, 3)
    held = ValidationData(rows, rows.last_shard().start, seq_len=3, micro_batch=2, dp_rank=rank, dp_size=world)
    validated = [name for batch in held.batches() for name in batch.samples if name]
    distributed.stop()
    return source.fingerprint, names, validated, len(held)


@pytest.mark.parametrize("cache", ["shared", "node-local"])
def test_four_ranks_convert_and_read_everything_once(tmp_path, cache):
    put_shards(tmp_path / "data", shards=6, rows=9)
    folder = str(tmp_path / "nodes") if cache == "node-local" else None
    results = run(opened_together, 4, str(tmp_path / "data"), folder)
    files = [read_index(str(path)[:-4]) for path in tmp_path.rglob("*.idx")]
    expected = 6 if cache == "shared" else 12
    assert sum(len(file.headers) for file in files) == expected, "each of two nodes has all six, of one rank each"
    assert len(list(tmp_path.rglob("*.tab"))) == expected // 6, "tables of packed samples too"
    assert len({fingerprint for fingerprint, *_ in results}) == 1
    rows = [f"{number}.json:{line}" for number in range(6) for line in range(1, 10 + number)]
    seen = [name for _, names, _, _ in results for name in names]
    assert set(seen) == set(rows)
    # 69 rows in steps of 16: the fifth step begins the second epoch with 11 of them.
    assert len(seen) == 80
    assert sorted(name for *_, validated, _ in results for name in validated) == sorted(rows[-14:])
    assert len({batches for *_, batches in results}) == 1


def working_together(fails: bool) -> tuple[object, float]:
    """Return what all ranks got, or the error, and the seconds: rank 0 fails, or works longer than collectives may."""
    ranks = started(timeout=250 if fails else 3)
    began = time.monotonic()

    def work(report):
        if fails and ranks.is_main:
            raise DataError("bad.json:51: no input_ids")
        while fails or time.monotonic() < began + 6 * ranks.is_main:
            report(1)
            time.sleep(0.05)
        return ranks.rank

    try:
        with Progress("working", shown=False) as progress:
            return finish_together("working", work, progress=progress), time.monotonic() - began
    except DataError as failure:
        return str(failure), time.monotonic() - began
    finally:
        distributed.stop()


@pytest.mark.parametrize("fails", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_failing_rank_stops_peers_that_work_and_a_slow_one_is_waited_for(fails):
    """Longer than the time-out of collectives, as while it fetches or converts."""
    for answer, seconds in run(working_together, 3, fails):
        assert "bad.json:51: no input_ids" in answer if fails else answer == [0, 1, 2]
        assert seconds < 60


def list_from(folder: str, location: str) -> list[str]:
    """Return the files of a location that is relative to each rank's folder."""
    ranks = started()
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


def look_for_validation(folder: str, failing_rank: int) -> list[str]:
    """Return the validation files of a data set on the hub, which does not answer one rank."""
    datasets = pytest.importorskip("datasets")
    ranks, load = started(), datasets.load_dataset_builder

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


SETS = ("own/rows", "shared/rows")


def on_two_nodes(bucket, cache):
    """Open each data set; return the fingerprints, the rows of the last one, and the error of a set that fails."""
    # Fetches are counted: a server that was held up is to be waited for.
    s3_client.READ_TIMEOUT_SECONDS = s3_server.PATIENCE_SECONDS
    ranks = started(nodes=2)
    own = f"{cache}/{ranks.node_rank}"
    sources = [open_rows(f"{bucket}/{name}", ranks, cache if name.startswith("shared") else own) for name in SETS]
    rows = [sources[-1].row(index).input_ids.tolist() for index in range(len(sources[-1]))]
    with pytest.raises(DataError) as failure:
        open_rows(f"{bucket}/failing", ranks, own)
    distributed.stop()
    return [source.fingerprint for source in sources], rows, str(failure.value)


@pytest.fixture(scope="module")
def nodes(server, tmp_path_factory):
    """Return what each rank returned, and how often each object was fetched."""
    folder = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch:
        place = s3_server.bucket(server, patch, "nodes")
        for number in range(5):
            lines = json.dumps({"input_ids": [number] * 4}).encode() + b"\n"
            for name in (*SETS, "failing"):
                upload(f"{place}/{name}", {f"{number}.json": 2 * lines})
        server.gets.clear()
        # It is read once when its kind is looked at; then it is gone.
        server.faults["failing/3.json"].extend(["NoSuchKey"] * 20)
        results = run(s3_server.there, 4, server.url, on_two_nodes, place, str(folder / "cache"))
        gets = Counter(key for key, _ in server.gets if key != "?list" and "manifest" not in key)
        assert not list((folder / "cache").rglob(".probe*"))
        yield results, gets


def test_every_object_is_fetched_once_for_a_disk(nodes):
    results, gets = nodes
    assert all(result[:2] == results[0][:2] for result in results)
    fingerprints, rows, _ = results[0]
    assert fingerprints[0] == fingerprints[1]
    assert rows == [[number] * 4 for number in range(5) for _ in range(2)]
    # Rank 0 also looks at the beginning of one object to know the kind of the records.
    for disk, fetches in (("own", 2), ("shared", 1)):
        counts = sorted(count for key, count in gets.items() if key.startswith(disk))
        assert counts in ([fetches] * 5, [fetches] * 4 + [fetches + 1])


def test_an_object_that_is_gone_stops_all_ranks_with_one_line(nodes):
    results, _ = nodes
    assert all("/failing/3.json: " in failure and "404" in failure for *_, failure in results)
