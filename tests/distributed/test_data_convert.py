"""Conversion and reading on several processes, each with its own part."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from smp_train import distributed
from smp_train.data import rounds
from smp_train.data.conversion import convert as convert_shards
from smp_train.data.open_data import open_data, open_place
from smp_train.data.order import Order
from smp_train.data.pipelines.data_pipeline import TrainingData, ValidationData
from smp_train.data.rounds import in_rounds
from smp_train.data.token_cache import TokenCache
from smp_train.data.token_dataset import TokenShards
from smp_train.data.token_file import read_index
from smp_train.data.utils import list_shards
from smp_train.errors import DataError
from tests.harness import run
from tests.shards import write_shard


def put_shards(folder: Path, shards: int, rows: int) -> None:
    for n in range(shards):
        write_shard(folder / f"{n}.json", [[n, row, 1] for row in range(rows + n)])


def opened_together(folder: str, cache: str | None):
    """Open shards as two ranks on each of two nodes; return what this rank reads of an epoch."""
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=250)
    rank, world = ranks.rank, ranks.world_size
    ranks = replace(ranks, local_rank=rank % 2, local_world_size=2, node_rank=rank // 2, num_nodes=2)
    source = open_place(folder, vocab_size=99, cache_dir=cache and f"{cache}/{rank // 2}", ranks=ranks)
    order = Order(len(source), seed=7)
    data = TrainingData(source, order, seq_len=3, micro_batch=2, accumulation=2, dp_rank=rank, dp_size=world)
    stream = data.batches(0)
    samples = [
        name for _ in range(-(-len(source) // data.global_batch)) for b in next(stream) for name in b.samples
    ]
    stream.close()
    held = ValidationData(source, seq_len=3, micro_batch=2, dp_rank=rank, dp_size=world, fast=True)
    validated = [name for batch in held.batches() for name in batch.samples if name]
    distributed.stop()
    return source.fingerprint, samples, validated, len(held)


@pytest.mark.parametrize("cache", ["shared", "node-local"])
def test_four_ranks_convert_and_read_everything_once(tmp_path, cache):
    put_shards(tmp_path / "data", shards=6, rows=9)
    where = str(tmp_path / "nodes") if cache == "node-local" else None
    results = run(opened_together, 4, str(tmp_path / "data"), where)
    made = [read_index(str(path)[:-4]) for path in tmp_path.rglob("*.idx")]
    wanted = 6 if cache == "shared" else 12
    assert sum(len(file.headers) for file in made) == wanted, "each of two nodes has all six, of one rank each"
    assert len({fingerprint for fingerprint, *_ in results}) == 1
    rows = [f"{n}.json:{line}" for n in range(6) for line in range(1, 10 + n)]
    seen = [name for _, samples, _, _ in results for name in samples]
    assert set(seen) == set(rows)
    # 69 rows in steps of 16: the fifth step begins the second epoch with 11 of them.
    assert len(seen) == 80
    assert sorted(name for *_, validated, _ in results for name in validated) == sorted(rows[-14:])
    assert len({batches for *_, batches in results}) == 1


def bad_and_good(folder: str):
    """Rank 0 meets a malformed line, rank 1 has many shards to convert; return the error, and how many came."""
    rounds.ROUND_SECONDS = 0.0
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=250)
    cache, shards = TokenCache(folder, 99, None), list_shards(folder)
    mine = [shard for shard in shards if ("bad" in shard.name) == ranks.is_main]
    done = []

    def steps():
        for number in convert_shards(cache.destination, mine, file_bytes=0):
            done.append(number)
            yield number

    try:
        in_rounds("reading", steps())
    except DataError as failure:
        return str(failure), len(done)
    finally:
        distributed.stop()
    return "not stopped", len(done)


def test_a_bad_shard_stops_peers_behind_the_shard_that_they_are_in(tmp_path):
    write_shard(tmp_path / "bad.json", [[1, 2]] * 50 + [{}])
    for number in range(9):
        write_shard(tmp_path / f"good{number}.json", [[1, 2]])
    results = run(bad_and_good, 2, str(tmp_path))
    assert all("bad.json:51: no input_ids" in message for message, _ in results)
    assert [number for _, number in results] == [0, 1]


def opening_args(folder: str, **changed) -> SimpleNamespace:
    given = {
        "dataset": None, "use_synthetic_data": 0, "training_dir": [folder], "test_dir": None, "data_cache_dir": None,
        "zipped_data": None, "dataset_type": "gpt_jsonl", "data_num_workers": 1, "bad_rows": "stop", "max_bad": 0.0,
        "short": "pad", "long": None, "seed": 0, "shuffle": "global", "train_batch_size": 1,
        "gradient_accumulation_steps": 1, "data_audit": False, "epochs": None,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changed})


def opened_on_a_damaged_node(folder: str):
    """Open data to be packed, whose index only the second rank cannot read."""
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=250)
    if ranks.rank == 1:

        def damaged(self, shard):
            raise DataError(f"{folder}: its index does not match its checksum; remove it")

        TokenShards.lengths = damaged
    args = opening_args(folder, short="pack")
    try:
        open_data(args, vocab_size=99, seq_len=8, ranks=ranks, dp_rank=ranks.rank, dp_size=2)
    except DataError as failure:
        return str(failure)
    finally:
        distributed.stop()


def test_rows_that_one_rank_cannot_lay_out_stop_every_rank(tmp_path):
    put_shards(tmp_path, shards=2, rows=3)
    for message in run(opened_on_a_damaged_node, 2, str(tmp_path)):
        assert "its index does not match its checksum" in message


def opened_on_nodes_that_differ(folder: Path):
    """Open on two nodes what each has a folder of its own of; return how each time ended."""
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=250)
    ranks = replace(ranks, local_rank=0, local_world_size=1, node_rank=ranks.rank, num_nodes=2)
    found = []
    for case, shuffle, cache in (
        ("few", "window:1", "cache"),
        ("fewer", "window:1", "cache"),
        ("longer", "window:1", "cache"),
        ("longer", "global", "cache"),
        ("same", "window:1", "blocked"),
        ("same", "window:1", "cache"),
    ):
        place, where = (str(folder / name / str(ranks.rank)) for name in (case, cache))
        if cache == "blocked" and ranks.rank == 1:
            # A plain file where the folder of windows would be: of this node alone.
            to = TokenCache(place, 99, where).destination
            Path(to.folder, f"window-{to.prefix}").touch()
        args = opening_args(place, shuffle=shuffle, data_cache_dir=where)
        try:
            data, _ = open_data(args, vocab_size=99, seq_len=8, ranks=ranks, dp_rank=ranks.rank, dp_size=2)
            found.append((0, str(len(data.source))))
        except DataError as failure:
            found.append((failure.exit_code, str(failure)))
    distributed.stop()
    return found


def test_nodes_whose_data_differ_stop_with_one_message(tmp_path):
    """Where one would have no windows, or another number of shards, or shards of other sizes, or other rows."""
    for case, shards, rows in (("few", 2, 3), ("fewer", 4, 3), ("longer", 5, 4), ("same", 5, 3)):
        put_shards(tmp_path / case / "0", shards=5, rows=3)
        put_shards(tmp_path / case / "1", shards=shards, rows=rows)
    for found in run(opened_on_nodes_that_differ, 2, tmp_path):
        *differing, unwritable, same = found
        for code, message in differing:
            assert code == 3
            assert "/0: the data changed while ranks listed it, or is not the same on every node" in message
        assert unwritable[0] == 3
        assert "(File exists); give a --data_cache_dir" in unwritable[1]
        assert same == (0, "25")
