"""Data sets in S3 on several processes: an object is fetched once for each disk that it is wanted on."""

import json
import os
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto.server")

from smp_train import runtime
from smp_train.data import s3, token_cache
from smp_train.data.opening import open_data
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
    datasets = pytest.importorskip("datasets")
    client.create_bucket(Bucket="nodes")
    for kind in ("json", "prepared", "arrow"):
        (tmp_path / kind).mkdir()
    for n in range(5):
        row = json.dumps({"input_ids": [n, 1, 2]}).encode() + b"\n"
        (tmp_path / "json" / f"{n}.json").write_bytes(row * (n + 1))
        token_cache.write_rows(str(n), str(tmp_path / "prepared" / str(n)), 99, token_cache.np.full((2, 4), n))
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 20}).save_to_disk(str(tmp_path / "arrow"), num_shards=4)
    kinds = ("json", "prepared", "arrow")
    for kind in kinds:
        put_folder(client, "nodes", f"own/{kind}", tmp_path / kind)
    put_folder(client, "nodes", "shared/prepared", tmp_path / "prepared")
    places = [*((f"s3://nodes/own/{kind}", False) for kind in kinds), ("s3://nodes/shared/prepared", True)]
    found = run(opened_on_two_nodes, 4, environment(server.url), places, str(tmp_path / "cache"))
    assert all(one == found[0] for one in found)
    assert found[0][1] == found[0][3]
    gets = Counter(key for key, _ in server.gets if key != "?list")
    assert {gets[key] for key in gets if key.startswith("shared")} == {1}
    assert {gets[key] for key in gets if key.startswith("own")} == {2}, "once on each of two nodes"
    assert len(gets) == 5 + 10 + 6 + 10
    assert not list((tmp_path / "cache").rglob(".*.tmp"))
