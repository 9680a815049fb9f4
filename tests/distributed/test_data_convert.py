"""Conversion and reading on several processes, each with its own part."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from smp_train.data.index import BESIDE, convert, open_source
from smp_train.data.order import Order
from smp_train.data.pipelines.data_pipeline import TrainingData, ValidationData
from smp_train.errors import DataError
from tests.harness import run


def put_shards(folder: Path, shards: int, rows: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(shards):
        lines = [
            json.dumps({"input_ids": [n, row, 1], "attention_mask": [1, 1, 1]}) for row in range(rows + n)
        ]
        (folder / f"{n}.json").write_text("\n".join(lines) + "\n")


def agree(error: str | None) -> list[str]:
    """Return every rank's error, on every rank: what `runtime.together` does for the training loop."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, error)
    return [one for one in found if one is not None]


def converted_together(folder: str, cache: str | None):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    own = None if cache is None else f"{cache}/{rank // 2}"
    error = None
    try:
        made = convert(folder, vocab_size=99, cache_dir=own, rank=rank, world=world)
    except DataError as failure:
        made, error = 0, str(failure)
    errors = agree(error)
    if errors:
        dist.destroy_process_group()
        return errors[0]
    source = open_source(folder, vocab_size=99, cache_dir=own, rank=rank, world=world)
    order = Order(len(source), seed=7)
    data = TrainingData(source, order, seq_len=3, micro_batch=2, accumulation=2, dp_rank=rank, dp_size=world)
    stream = data.batches(0)
    samples = [
        name for _ in range(-(-len(source) // data.global_batch)) for b in next(stream) for name in b.samples
    ]
    stream.close()
    held = ValidationData(source, seq_len=3, micro_batch=2, dp_rank=rank, dp_size=world, fast=True)
    validated = [name for batch in held.batches() for name in batch.samples if name]
    dist.destroy_process_group()
    return made, source.fingerprint, samples, validated, len(held)


@pytest.mark.parametrize("cache", ["shared", "node-local"])
def test_four_ranks_convert_and_read_everything_once(tmp_path, cache):
    put_shards(tmp_path / "data", shards=6, rows=9)
    where = str(tmp_path / "nodes") if cache == "node-local" else None
    results = run(converted_together, 4, str(tmp_path / "data"), where)
    assert sum(made for made, *_ in results) == 6
    assert len({fingerprint for _, fingerprint, *_ in results}) == 1
    rows = [f"{n}.json:{line}" for n in range(6) for line in range(1, 10 + n)]
    seen = [name for _, _, samples, _, _ in results for name in samples]
    assert set(seen) == set(rows)
    # 69 rows in steps of 16: the fifth step begins the second epoch with 11 of them.
    assert len(seen) == 80
    assert sorted(name for *_, validated, _ in results for name in validated) == sorted(rows[-14:])
    assert len({batches for *_, batches in results}) == 1
    indexes = list((tmp_path / "data" / BESIDE).glob("*.idx")) or list((tmp_path / "nodes").rglob("*.idx"))
    assert len(indexes) == (6 if cache == "shared" else 12), "each of two nodes has all six"


def test_a_bad_shard_stops_every_rank_with_one_message(tmp_path):
    put_shards(tmp_path, shards=4, rows=5)
    bad = tmp_path / "2.json"
    bad.write_text(bad.read_text() + '{"input_ids": [1, 2.5, 3]}\n')
    messages = run(converted_together, 2, str(tmp_path), None)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"{bad}:8: input_ids[1] is 2.5, a float; ")
