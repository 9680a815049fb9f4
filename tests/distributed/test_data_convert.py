"""Conversion and reading on several processes, each with its own part."""

import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from smp_train import distributed
from smp_train.data import convert
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
from tests.harness import run
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


def bad_and_good(folder: str):
    """Rank 0 meets a malformed line while rank 1 works for ever; return the error, and the time rank 1 took."""
    ranks = started()

    def work(report):
        if ranks.is_main:
            raise DataError(f"{folder}/bad.json:51: no input_ids")
        while True:
            report(1)
            time.sleep(0.01)

    began = time.monotonic()
    try:
        with Progress("working", shown=False) as progress:
            finish_together("working", work, progress=progress)
    except DataError as failure:
        return str(failure), time.monotonic() - began
    finally:
        distributed.stop()
    return "not stopped", 0.0


def test_a_bad_shard_stops_peers_that_are_still_working(tmp_path):
    for message, seconds in run(bad_and_good, 2, str(tmp_path)):
        assert "bad.json:51: no input_ids" in message
        assert seconds < 60


def slower_than_a_collective(_: str):
    """Rank 0 works longer than collectives may take; return what all ranks got."""
    ranks = started(timeout=3)

    def work(report):
        until = time.monotonic() + 6 * ranks.is_main
        while time.monotonic() < until:
            report(1)
            time.sleep(0.1)
        return ranks.rank

    with Progress("working", shown=False) as progress:
        results = finish_together("working", work, progress=progress)
    distributed.stop()
    return results


@pytest.mark.slow
def test_ranks_wait_longer_than_the_time_out_of_collectives(tmp_path):
    """A start used to end where one rank fetched or converted for longer than that."""
    assert run(slower_than_a_collective, 3, str(tmp_path)) == [[0, 1, 2]] * 3


def killed_worker(folder: str):
    """Convert on two ranks; the worker process of rank 1 is killed."""
    ranks = started()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # the harness's ranks are
    convert.WORTH_BYTES["tokens"] = 0
    convert.FILE_BYTES = 0
    wait = convert.wait

    def kill(pending, **options):
        for child in multiprocessing.active_children() if ranks.rank == 1 else ():
            os.kill(child.pid, 9)
        return wait(pending, **options)

    convert.wait = kill
    (files,) = list_sources([folder], Selection(), ranks=ranks)
    try:
        open_token_rows(files, Recipe(files.kind, 99), ranks=ranks, processes=2)
    except Exception as failure:
        return type(failure).__name__, str(failure)
    finally:
        distributed.stop()


def test_a_killed_worker_stops_every_rank_with_the_name_of_its_file(tmp_path):
    put_shards(tmp_path, shards=4, rows=20_000)
    for kind, message in run(killed_worker, 2, str(tmp_path)):
        assert kind == "SmpTrainError", message
        assert ".json: a process that converted one of these files was killed" in message
    assert not list(tmp_path.rglob("*.partial"))


def opened_on_a_damaged_node(folder: str):
    """Pack rows whose index only the second rank cannot read."""
    ranks = started()
    source = open_rows(folder, ranks)
    if ranks.rank == 1:

        def damaged(rows):
            raise DataError(f"{folder}: its index is damaged; remove it")

        source.lengths = damaged
    try:
        for _ in range(2):  # one of the two ranks makes the only table
            open_samples(source, 8, long="split", short="pack", ranks=replace(ranks, rank=1 - ranks.rank))
    except DataError as failure:
        return str(failure)
    finally:
        distributed.stop()


def test_rows_that_one_rank_cannot_pack_stop_every_rank(tmp_path):
    put_shards(tmp_path, shards=2, rows=3)
    for message in run(opened_on_a_damaged_node, 2, str(tmp_path)):
        assert "its index is damaged" in message
