"""Data sets in S3 on two nodes of two ranks: an object is fetched once for each disk that it is wanted on."""

import gzip
import json
import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from smp_train import distributed
from smp_train.data.open_data import open_data, open_place
from smp_train.data.order import Order
from smp_train.data.token_writer import write_rows
from smp_train.errors import DataError
from smp_train.storage import client as s3_client
from tests import s3_server
from tests.distributed.test_data_convert import opening_args
from tests.harness import run
from tests.s3_server import upload

SHARDS, ROWS = 9, 12
ORDER = Order(SHARDS * ROWS, 0, "window:2", [range(n, n + ROWS) for n in range(0, SHARDS * ROWS, ROWS)])
BAD = ORDER.window(ORDER.window(ORDER.window(0)[0])[0])[1][0]
"""A shard of the fourth window."""


def open_on(ranks, place, cache, shared, **changed):
    changed = {"data_cache_dir": cache if shared else f"{cache}/{ranks.node_rank}", "data_audit": True, **changed}
    args = opening_args(place, **changed)
    return open_data(args, vocab_size=99, seq_len=4, ranks=ranks, dp_rank=ranks.rank, dp_size=4)[0]


def train_on_windows(ranks, place, cache, shared):
    """Read most of an epoch, voting at each step; return what was opened, and what was read or the error."""
    data = open_on(ranks, place, cache, shared, shuffle="window:2")
    stager = data.source.stager
    opened = (data.source.fingerprint, len(data.source), stager and stager.nodes)
    names, batches = [], data.batches(0)
    try:
        for _ in range(20):
            with distributed.together("reading the training data"):
                names += next(batches)[0].samples
    except DataError as error:
        return opened, str(error)
    finally:
        batches.close()
    return opened, names


def on_two_nodes(variables, bucket, cache):
    os.environ.update(variables)
    # Fetches are counted: a server that was held up is to be waited for.
    s3_client.READ_TIMEOUT_SECONDS = s3_server.PATIENCE_SECONDS
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=250)
    ranks = replace(
        ranks, local_rank=ranks.rank % 2, local_world_size=2, node_rank=ranks.rank // 2, num_nodes=2
    )
    whole = [
        open_on(ranks, f"{bucket}/{place}", cache, place.startswith("shared")).source.fingerprint
        for place in ("own/json", "own/prepared", "shared/prepared")
    ]
    windows = train_on_windows(ranks, f"{bucket}/windows", cache, shared=False)
    failing = train_on_windows(ranks, f"{bucket}/failing", cache, shared=True)
    distributed.stop()
    return whole, windows, failing


@pytest.fixture(scope="module")
def nodes(server, tmp_path_factory):
    """Return (what each rank came to, how often each object was asked for, the same of the set opened whole)."""
    folder = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch:
        place = s3_server.bucket(server, patch, "nodes")
        for n in range(5):
            upload(f"{place}/own/json", {f"{n}.json": json.dumps({"input_ids": [n, 1, 2]}).encode() + b"\n"})
            write_rows(str(n), str(folder / str(n)), 99, np.full((2, 4), n))
        for disk in ("own", "shared"):
            upload(f"{place}/{disk}/prepared", folder)
        for n in range(SHARDS):
            lines = b"".join(json.dumps({"input_ids": [n, r, 1]}).encode() + b"\n" for r in range(ROWS))
            for key in ("windows", "failing"):
                upload(f"{place}/{key}", {f"{n}.json.gz": gzip.compress(lines)})
        server.gets.clear()
        # It is read once to be counted; then it is gone.
        server.faults[f"failing/{BAD}.json.gz"].extend([lambda: None] + ["NoSuchKey"] * 20)
        results = run(on_two_nodes, 4, s3_server.environment(server.url), place, str(folder / "cache"))
        gets = Counter(key for key, _ in server.gets if key != "?list" and "manifest" not in key)
        whole = open_place(f"{place}/windows", vocab_size=99, cache_dir=str(folder / "whole"))
        assert not list((folder / "cache").rglob(".*.tmp"))
        slots = {path.name for path in (folder / "cache").rglob("slot-*") if path.is_dir()}
        assert slots == {"slot-0"}, "one for all ranks of a disk"
        yield results, gets, whole


def test_every_object_is_fetched_once_for_a_disk(nodes):
    results, gets, _ = nodes
    found = [whole for whole, *_ in results]
    assert all(one == found[0] for one in found)
    assert found[0][1] == found[0][2]
    assert {gets[key] for key in gets if key.startswith("own")} == {2}, "once on each of two nodes"
    assert {gets[key] for key in gets if key.startswith("shared")} == {1}
    assert len([key for key in gets if key.startswith(("own", "shared"))]) == 5 + 10 + 10


def test_nodes_count_together_and_stage_each_for_itself(nodes):
    results, gets, whole = nodes
    assert [windows[0] for _, windows, *_ in results] == [(whole.fingerprint, SHARDS * ROWS, n) for n in (1, None) * 2]
    steps = zip(*(windows[1] for _, windows, *_ in results), strict=True)
    rows = ORDER.rows(np.arange(80))[1]
    assert [name for step in steps for name in step] == [whole.name(row) for row in rows.tolist()]
    counts = [gets[f"windows/{n}.json.gz"] for n in range(SHARDS)]
    assert min(counts) >= 1
    assert max(counts) <= 3, "once to be counted for both, and once on each"


def test_a_stage_that_fails_stops_all_nodes_with_one_line(nodes):
    """On a disk that all nodes share, each shard is staged by one node."""
    results, gets, _ = nodes
    assert [failing[0][2] for _, _, failing in results] == [2, None] * 2
    line = f"/failing/{BAD}.json.gz: no such object (404 NoSuchKey)"
    assert all(line in failing[1] for _, _, failing in results)
    assert max(gets[f"failing/{n}.json.gz"] for n in range(SHARDS) if n != BAD) == 2, "counted once, staged once"
