"""Data sets in S3 on two nodes of two ranks: an object is fetched once for each disk that needs it."""

import json
import os
from collections import Counter
from dataclasses import replace

import pytest

from smp_train import distributed
from smp_train.data.convert import open_token_rows
from smp_train.data.files import Selection, list_sources
from smp_train.data.rows import Recipe
from smp_train.errors import DataError
from smp_train.storage import client as s3_client
from tests import s3_server
from tests.harness import run
from tests.s3_server import upload

SETS = ("own/rows", "shared/rows")


def on_two_nodes(variables, bucket, cache):
    """Open each data set; return the fingerprints, the rows of the last one, and the error of a set that fails."""
    os.environ.update(variables)
    # Fetches are counted: a server that was held up is to be waited for.
    s3_client.READ_TIMEOUT_SECONDS = s3_server.PATIENCE_SECONDS
    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=250)
    ranks = replace(ranks, local_rank=ranks.rank % 2, local_world_size=2, node_rank=ranks.rank // 2, num_nodes=2)

    def opened(name):
        (files,) = list_sources([f"{bucket}/{name}"], Selection(), ranks=ranks)
        folder = cache if name.startswith("shared") else f"{cache}/{ranks.node_rank}"
        return open_token_rows(files, Recipe(files.kind, 99), cache_dir=folder, ranks=ranks)

    sources = [opened(name) for name in SETS]
    rows = [sources[-1].row(index).input_ids.tolist() for index in range(len(sources[-1]))]
    try:
        opened("failing")
    except DataError as error:
        failure = str(error)
    distributed.stop()
    return [source.fingerprint for source in sources], rows, failure


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
        results = run(on_two_nodes, 4, s3_server.environment(server.url), place, str(folder / "cache"))
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
