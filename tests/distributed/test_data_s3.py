"""Data sets in S3 on several processes: an object is fetched once for each disk that it is wanted on."""

import gzip
import json
import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from smp_train import runtime
from smp_train.data import s3, token_cache
from smp_train.data.index import open_source
from smp_train.data.opening import open_data
from smp_train.data.order import Order
from smp_train.errors import DataError
from tests.harness import run
from tests.s3_server import environment, serving


@pytest.fixture(scope="module")
def server():
    with serving() as proxy:
        yield proxy


@pytest.fixture
def client(server, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment(server.url).items():
        monkeypatch.setenv(name, value)
    server.faults.clear()
    server.gets.clear()
    return s3.connect()


def put_folder(client, bucket, key, folder):
    for path in folder.iterdir():
        client.put_object(Bucket=bucket, Key=f"{key}/{path.name}", Body=path.read_bytes())


def arguments(place, cache, **changed):
    given = {
        "dataset": None, "use_synthetic_data": 0, "training_dir": [place], "test_dir": None, "data_cache_dir": cache,
        "zipped_data": None, "dataset_type": "gpt_jsonl", "data_num_workers": 1, "bad_rows": "stop", "max_bad": 0.0,
        "short": "pad", "long": None, "seed": 0, "shuffle": "global", "train_batch_size": 1,
        "gradient_accumulation_steps": 1, "data_audit": False,
    }  # fmt: skip
    return SimpleNamespace(**{**given, **changed})


def on_nodes_of_two():
    """Return this rank as one of nodes with two each, after meeting the others."""
    ranks = runtime.detect()
    runtime.start(ranks, timeout_seconds=60)
    nodes = max(1, ranks.world_size // 2)
    return replace(
        ranks, local_rank=ranks.rank % 2, local_world_size=min(2, ranks.world_size), node_rank=ranks.rank // 2,
        num_nodes=nodes,
    )  # fmt: skip


def opened_on_two_nodes(variables, places, cache):
    os.environ.update(variables)
    ranks = on_nodes_of_two()
    found = []
    for place, shared in places:
        here = cache if shared else f"{cache}/{ranks.node_rank}"
        data, _ = open_data(
            arguments(place, here), vocab_size=99, seq_len=4, ranks=ranks, dp_rank=ranks.rank, dp_size=4
        )
        found.append(data.source.fingerprint)
    runtime.stop()
    return found


def test_every_object_is_fetched_once_for_a_disk(server, client, tmp_path):
    client.create_bucket(Bucket="nodes")
    kinds = ("json", "prepared")
    for kind in kinds:
        (tmp_path / kind).mkdir()
    for n in range(5):
        row = json.dumps({"input_ids": [n, 1, 2]}).encode() + b"\n"
        (tmp_path / "json" / f"{n}.json").write_bytes(row * (n + 1))
        token_cache.write_rows(str(n), str(tmp_path / "prepared" / str(n)), 99, np.full((2, 4), n))
    for kind in kinds:
        put_folder(client, "nodes", f"own/{kind}", tmp_path / kind)
    put_folder(client, "nodes", "shared/prepared", tmp_path / "prepared")
    places = [*((f"s3://nodes/own/{kind}", False) for kind in kinds), ("s3://nodes/shared/prepared", True)]
    found = run(opened_on_two_nodes, 4, environment(server.url), places, str(tmp_path / "cache"))
    assert all(one == found[0] for one in found)
    assert found[0][1] == found[0][2]
    gets = Counter(key for key, _ in server.gets if key != "?list")
    assert {gets[key] for key in gets if key.startswith("shared")} == {1}
    assert {gets[key] for key in gets if key.startswith("own")} == {2}, "once on each of two nodes"
    assert len(gets) == 5 + 10 + 10
    assert not list((tmp_path / "cache").rglob(".*.tmp"))


def trained_on_windows(variables, place, cache, shared):
    """Read three quarters of an epoch, voting at each step; return what was opened and read, or the error."""
    os.environ.update(variables)
    ranks = on_nodes_of_two()
    args = arguments(place, cache if shared else f"{cache}/{ranks.node_rank}", shuffle="window:2", data_audit=True)
    data, _ = open_data(args, vocab_size=99, seq_len=4, ranks=ranks, dp_rank=ranks.rank, dp_size=4)
    opened = (data.source.fingerprint, len(data.source), data.source.stager.world)
    names, batches = [], data.batches(0)
    try:
        for _ in range(3 * len(data.source) // 4 // data.global_batch):
            with runtime.together("reading the training data"):
                names += next(batches)[0].samples
    except DataError as error:
        return opened, str(error)
    finally:
        batches.close()
        runtime.stop()
    return opened, names


def put_windows(client, bucket):
    client.create_bucket(Bucket=bucket)
    for n in range(9):
        lines = b"".join(json.dumps({"input_ids": [n, r, 1]}).encode() + b"\n" for r in range(12))
        client.put_object(Bucket=bucket, Key=f"t/{n}.json.gz", Body=gzip.compress(lines))


def test_nodes_count_together_and_stage_each_for_itself(server, client, tmp_path):
    put_windows(client, "windows")
    place = "s3://windows/t"
    results = run(trained_on_windows, 4, environment(server.url), place, str(tmp_path / "own"), False)
    assert {opened for opened, _ in results} == {(results[0][0][0], 108, 2)}
    whole = open_source(place, vocab_size=99, cache_dir=str(tmp_path / "whole"))
    assert results[0][0][0] == whole.fingerprint
    rows = Order(108, 0, "window:2", whole.shards).rows(np.arange(80))[1]
    steps = zip(*(names for _, names in results), strict=True)
    assert [name for step in steps for name in step] == [whole.name(row) for row in rows.tolist()]
    gets = Counter(key for key, _ in server.gets if key.endswith(".gz"))
    # To count, to open it whole, and at most once for each of two nodes: three shards are behind what was read.
    assert set(gets) == {f"t/{n}.json.gz" for n in range(9)}
    assert max(gets.values()) <= 4
    assert sum(gets.values()) <= 9 + 9 + 2 * 9


def test_a_stage_that_fails_stops_all_nodes_with_one_line(server, client, tmp_path):
    """On a disk that all nodes share, each shard is staged by one rank of all."""
    put_windows(client, "failing")
    place = "s3://failing/t"
    order = Order(108, 0, "window:2", [range(n, n + 12) for n in range(0, 108, 12)])
    bad = order.window(order.window(order.window(0)[0])[0])[1][0]
    server.faults[f"t/{bad}.json.gz"].extend([lambda: None] + ["NoSuchKey"] * 20)
    results = run(trained_on_windows, 4, environment(server.url), place, str(tmp_path / "shared"), True)
    assert {opened[2] for opened, _ in results} == {4}
    line = f"{place}/{bad}.json.gz: no such object (404 NoSuchKey)"
    assert all(line in message for _, message in results)
    gets = Counter(key for key, _ in server.gets if key.endswith(".gz"))
    assert max(gets.values()) == 2, "counted once, staged once"
