"""Shards in S3: what is listed is what is read, whole, or a line says what is wrong and what to do."""

import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("boto3")
pytest.importorskip("moto.server")


from smp_train.data import folder_lock, hf_dataset, s3, s3_cache
from smp_train.data.open_data import open_place
from smp_train.data.open_data import open_place as open_source
from smp_train.data.prepare.writing import finish_arrow, write_block
from smp_train.data.token_cache import TokenCache
from smp_train.data.token_writer import write_rows
from smp_train.data.utils import list_shards
from smp_train.errors import DataError
from smp_train.storage import client as s3_client
from smp_train.storage import s3 as storage_s3
from smp_train.storage.client import client
from tests import s3_server
from tests.s3_server import serving
from tests.shards import convert


@pytest.fixture(scope="module")
def server():
    with serving() as proxy:
        yield proxy


@pytest.fixture
def bucket(server, monkeypatch, request):
    """Return (client, name) of a bucket of this test's own, on a server that forgot the tests before."""
    name = s3_server.bucket(server, monkeypatch, request.node.nodeid).removeprefix("s3://")
    server.gets.clear()
    return client(), name


def line(*ids):
    return json.dumps({"input_ids": ids}).encode() + b"\n"


def put(bucket, key, body=None):
    bucket[0].put_object(Bucket=bucket[1], Key=key, Body=line(1, 2, 3) if body is None else body)


def big(rows=9000):
    """Rows enough for a body to be cut in the middle."""
    return b"".join(line(*range(i, i + 40)) for i in range(rows))


def test_rows_come_from_s3(bucket, tmp_path):
    body = big()
    put(bucket, "train/b.json", body)
    put(bucket, "train/a.json")
    here = f"s3://{bucket[1]}/train"
    source = open_source(here, vocab_size=10000, cache_dir=str(tmp_path))
    assert len(source) == 9001
    assert source.row(0).input_ids.tolist() == [1, 2, 3]
    assert source.row(9000).input_ids.tolist() == list(range(8999, 9039))
    assert source.name(5) == "b.json:5"
    assert convert(here, vocab_size=10000, cache_dir=str(tmp_path)) == 0, "the second start fetches nothing"
    assert not list(tmp_path.glob(".*.tmp")), "no copy is left"
    local = tmp_path / "local"
    local.mkdir()
    (local / "a.json").write_bytes(line(1, 2, 3))
    (local / "b.json").write_bytes(body)
    assert open_source(str(local), vocab_size=10000).fingerprint == source.fingerprint, "where it is does not matter"


def test_a_changed_object_is_another(bucket, tmp_path):
    put(bucket, "t/a.json", line(1, 2, 3))
    here = f"s3://{bucket[1]}/t/"
    before = open_source(here, vocab_size=9, cache_dir=str(tmp_path))
    put(bucket, "t/a.json", line(1, 2, 4))
    after = open_source(here, vocab_size=9, cache_dir=str(tmp_path))
    assert after.row(0).input_ids.tolist() == [1, 2, 4]
    assert before.fingerprint != after.fingerprint


def test_listing(bucket):
    name = bucket[1]
    for key in ("p/a.json", "p/.hidden.json", "p/_SUCCESS", "p/sub/x.json", "pp/b.json", "p/é +%20.json"):
        put(bucket, key)
    put(bucket, "p/", b"")
    put(bucket, "p", b"the prefix as a key")
    assert [shard.name for shard in list_shards(f"s3://{name}/p")] == ["a.json", "é +%20.json"]
    assert [shard.name for shard in list_shards(f"s3://{name}/p/a.json")] == ["a.json"]
    with pytest.raises(DataError, match=r"no shard in this folder .*; its subfolders are p, pp"):
        list_shards(f"s3://{name}")
    with pytest.raises(DataError, match="no shard in this folder"):
        list_shards(f"s3://{name}/nothing")
    put(bucket, "z/a.json", b"")
    with pytest.raises(DataError, match=r"z/a.json: empty shard \(0 bytes\)"):
        list_shards(f"s3://{name}/z")
    put(bucket, "y/a.json")
    put(bucket, "y/a.json.gz")
    with pytest.raises(DataError, match=r"a\.json is beside it"):
        list_shards(f"s3://{name}/y")


def test_keys_with_odd_names_are_read(bucket, tmp_path):
    put(bucket, "d ir/é +%20=&?.json", line(4, 5))
    source = open_source(f"s3://{bucket[1]}/d ir", vocab_size=9, cache_dir=str(tmp_path))
    assert source.row(0).input_ids.tolist() == [4, 5]


def test_more_than_one_page(bucket, monkeypatch):
    for n in range(23):
        put(bucket, f"p/{n:04}.json")
    original = bucket[0].get_paginator("list_objects_v2").paginate

    class Pages:
        def paginate(self, **given):
            return original(PaginationConfig={"PageSize": 5}, **given)

    monkeypatch.setattr(bucket[0], "get_paginator", lambda name: Pages())
    found, _ = s3.list_folder(f"s3://{bucket[1]}/p")
    assert [shard.name for shard in found] == [f"{n:04}.json" for n in range(23)]


def hurry(monkeypatch):
    """Give an answer up after a second; as a busy machine may need longer for any, try as often as it takes."""
    monkeypatch.setattr(s3_client, "READ_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(s3_client, "ATTEMPTS", 1000)
    monkeypatch.setattr(storage_s3, "BODY_ATTEMPTS", 1000)


MENDED = {
    "503 twice": ["SlowDown"] * 2,
    "503 seven times": ["SlowDown"] * 7,
    "reset once": ["reset"],
    "reset six times": ["reset"] * 6,
    "short four times": ["short"] * 4,
    "a stall": ["stall"],
}


@pytest.mark.parametrize("faults", MENDED.values(), ids=MENDED)
def test_what_is_mended(server, bucket, tmp_path, monkeypatch, faults):
    if faults[0] == "stall":
        hurry(monkeypatch)
    put(bucket, "t/a.json", big())
    server.faults["t/a.json"].extend(faults)
    source = open_source(f"s3://{bucket[1]}/t", vocab_size=10000, cache_dir=str(tmp_path))
    assert len(source) == 9000
    assert not server.faults["t/a.json"], "every fault was met"
    if faults[0] in ("reset", "short"):
        ranges = [found for key, found in server.gets if key == "t/a.json"]
        # What a reset throws away on its way has to be fetched again; of the other kinds nothing is.
        if faults[0] != "reset":
            starts = [int(span.removeprefix("bytes=").partition("-")[0]) for span in ranges]
            assert starts == sorted(set(starts)), "resumed where it broke, not begun again"


@pytest.mark.parametrize("most", [100_000, 3000])
def test_connections_that_are_always_short(server, bucket, tmp_path, most):
    put(bucket, "t/a.json", big(2000))
    server.most = most
    source = open_source(f"s3://{bucket[1]}/t", vocab_size=10000, cache_dir=str(tmp_path))
    assert len(source) == 2000


REFUSED = {
    "403": ["AccessDenied", r"t/a.json: access denied \(403 AccessDenied\); the role in use needs s3:GetObject on b"],
    "404": ["NoSuchKey", r"t/a.json: no such object \(404 NoSuchKey\)"],
    "expired": ["ExpiredToken", r"t/a.json: the AWS credentials have expired \(ExpiredToken\); renew"],
    "301": ["PermanentRedirect", r"t/a.json: the bucket is in another region \(301 .*set AWS_REGION=eu-west-3"],
    "never": ["SlowDown", r"t/a.json: S3 does not answer as it should \(.*SlowDown.*reached max retries: 7"],
}


@pytest.mark.parametrize(("fault", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(server, bucket, tmp_path, fault, message):
    put(bucket, "t/a.json", big(10))
    server.faults["t/a.json"].extend([fault] * 60)
    with pytest.raises(DataError, match=message) as refused:
        open_source(f"s3://{bucket[1]}/t", vocab_size=10000, cache_dir=str(tmp_path))
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob(".*.tmp"))


def test_listing_refused(server, bucket, monkeypatch):
    server.faults["?list"].append("AccessDenied")
    with pytest.raises(DataError, match=r"/t: access denied \(403 AccessDenied\); .* s3:ListBucket on b"):
        list_shards(f"s3://{bucket[1]}/t")
    with pytest.raises(DataError, match=r"s3://no-such-bucket/t: no such bucket \(404 NoSuchBucket\)"):
        list_shards("s3://no-such-bucket/t")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DataError, match="no AWS credentials found; set AWS_PROFILE"):
        list_shards(f"s3://{bucket[1]}/t")


def test_an_object_replaced_after_the_listing(server, bucket, tmp_path):
    put(bucket, "t/a.json", big(10))
    server.faults["t/a.json"].append(lambda: put(bucket, "t/a.json", big(11)))
    with pytest.raises(DataError, match=r"t/a\.json: was replaced while it was being read \(412\)"):
        open_source(f"s3://{bucket[1]}/t", vocab_size=10000, cache_dir=str(tmp_path))


def test_an_object_replaced_in_the_middle(server, bucket, tmp_path):
    put(bucket, "t/a.json", big())
    server.faults["t/a.json"].extend(["reset", lambda: put(bucket, "t/a.json", big()[:-1] + b" ")])
    with pytest.raises(DataError, match=r"t/a\.json: was replaced while it was being read \(412\)"):
        open_source(f"s3://{bucket[1]}/t", vocab_size=10000, cache_dir=str(tmp_path))


def test_many_at_once_and_never_more_on_disk(server, bucket, tmp_path):
    for n in range(12):
        put(bucket, f"t/{n:02}.json", big(20 + n))
    shards = list_shards(f"s3://{bucket[1]}/t")
    found = []
    for shard, copy in s3.staged(shards, str(tmp_path), at_once=4):
        assert len(list(tmp_path.iterdir())) <= 4
        found.append(shard.name)
        assert os.path.getsize(copy) == shard.size
        os.unlink(copy)
    assert found == [shard.name for shard in shards], "in the order asked for"
    coming = s3.staged(shards, str(tmp_path), at_once=4)
    os.unlink(next(coming)[1])
    coming.close()
    assert not list(tmp_path.iterdir()), "what was fetched ahead goes"


def test_a_full_disk(server, bucket, tmp_path, monkeypatch):
    put(bucket, "t/a.json", big(20))

    def full(*request):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage_s3.S3Storage, "receive", full)
    place = f"s3://{bucket[1]}/t"
    with pytest.raises(DataError) as refused:
        open_source(place, vocab_size=10000, cache_dir=str(tmp_path))
    assert f"{tmp_path}: cannot hold a copy of {place}/a.json (No space left on device); free" in str(refused.value)
    assert not list(tmp_path.glob(".stage*"))


def test_a_data_set_of_arrow_files_is_brought_and_checked_in_shares(server, bucket, tmp_path):
    """By two ranks, each part by one of them."""
    made = tmp_path / "made"
    made.mkdir()
    entries = [write_block("arrow", str(made), f"{n}", np.full((5, 4), n + 1), 99, False) for n in range(4)]
    finish_arrow(made, "train", entries)
    for path in made.iterdir():
        put(bucket, f"t/{path.name}", path.read_bytes())
    place = f"s3://{bucket[1]}/t"
    cache = str(tmp_path / "cache")
    here = {s3_cache.bring(place, cache, rank, 2)[0] for rank in (0, 1)}
    checks = TokenCache(*here, 99, cache)
    assert [hf_dataset.check_share(checks, *here, rank, 2) for rank in (0, 1)] == [2, 2]
    source = open_place(place, vocab_size=99, cache_dir=cache)
    assert [source.row(5 * n).input_ids.tolist() for n in range(4)] == [[n + 1] * 4 for n in range(4)]
    assert len([key for key, _ in server.gets if key.startswith("t/")]) == 6, "each object once"


def prepared_tokens(bucket, folder, value):
    write_rows("a", str(folder / "a"), 9, np.full((2, 4), value))
    for suffix in (".tok", ".idx"):
        put(bucket, f"t/a{suffix}", (folder / f"a{suffix}").read_bytes())
    return f"s3://{bucket[1]}/t"


def test_a_copy_of_an_earlier_version_goes_when_nobody_reads_it(bucket, tmp_path, monkeypatch, caplog):
    cache = tmp_path / "cache"

    def opened(value):
        place = prepared_tokens(bucket, tmp_path, value)
        source = open_place(place, vocab_size=9, cache_dir=str(cache))
        assert source.row(0).input_ids.tolist() == [value] * 4
        return {path.name for path in cache.iterdir() if path.is_dir()}

    (first,) = opened(1)
    # Another process reads it meanwhile.
    reading = folder_lock.take(str(cache / first), shared=True)
    both = opened(2)
    assert len(both) == 2
    reading.release()
    (cache / "s3-another-place").mkdir()
    assert len(opened(3)) == 2
    assert "removed, as s3://" in caplog.text
    assert (cache / "s3-another-place").exists()
    monkeypatch.setattr(s3_cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    opened(4)
    assert "remove copies of other places that no run reads (s3-* beside it)" in caplog.text


def test_what_a_killed_run_left_of_an_earlier_copy_goes_too(bucket, tmp_path, monkeypatch):
    cache = tmp_path / "cache"

    def others(value):
        here = s3_cache.bring(prepared_tokens(bucket, tmp_path, value), str(cache))[0]
        return [path.name for path in cache.iterdir() if path.is_dir() and str(path) != here]

    assert not others(1)
    with monkeypatch.context() as killed:
        killed.setattr(s3_cache.shutil, "rmtree", lambda path, **how: os.unlink(path / "a.tok"))
        assert len(others(2)) == 1
    assert not others(3)
    assert open_place(prepared_tokens(bucket, tmp_path, 1), vocab_size=9, cache_dir=str(cache)).row(0)


def test_one_rank_warns_of_all_that_is_to_be_copied(bucket, tmp_path, monkeypatch, caplog):
    for name in "abcd":
        put(bucket, f"t/{name}.tok", bytes(10))
        put(bucket, f"t/{name}.idx", bytes(10))
    s3_cache.bring(f"s3://{bucket[1]}/t", str(tmp_path), 1, 4)
    monkeypatch.setattr(s3_cache.s3, "staged", lambda missing, folder: ())
    monkeypatch.setattr(s3_cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=59))
    for rank in range(4):
        s3_cache.bring(f"s3://{bucket[1]}/t", str(tmp_path), rank, 4)
    assert caplog.text.count("has room for") == 1
    monkeypatch.setattr(s3_cache.shutil, "disk_usage", lambda folder: SimpleNamespace(free=60))
    s3_cache.bring(f"s3://{bucket[1]}/t", str(tmp_path), 0, 4)
    assert caplog.text.count("has room for") == 1, "of 80 bytes, two objects are there"


def test_a_place_that_cannot_hold_what_is_brought(bucket, tmp_path):
    """A plain file where the folder would be stands for any that cannot be made."""
    write_rows("a", str(tmp_path / "a"), 9, np.ones((2, 4), dtype=int))
    for suffix in (".tok", ".idx"):
        put(bucket, f"t/a{suffix}", (tmp_path / f"a{suffix}").read_bytes())
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"s3-\w+-\w+: cannot hold a copy of s3://b\d+/t \(File exists\); give a"):
        open_place(f"s3://{bucket[1]}/t", vocab_size=9, cache_dir=str(tmp_path / "file"))


def test_bad_lines_are_named_by_their_object(bucket, tmp_path):
    put(bucket, "t/a.json", line(1, 2) + line(1, -2))
    with pytest.raises(DataError, match=rf"^s3://{bucket[1]}/t/a\.json:2: token id -2 is outside"):
        open_source(f"s3://{bucket[1]}/t", vocab_size=9, cache_dir=str(tmp_path))


def text_lines(count):
    return b"".join(json.dumps({"text": f"document {n} " + "x" * 60}).encode() + b"\n" for n in range(count))


def test_text_is_read_in_pieces_and_mended(server, bucket, tmp_path, monkeypatch):
    """An object is read by requests of `READ_AHEAD` bytes, each tried again where it broke; nothing is on disk."""
    import gzip
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    from smp_train.data.prepare.cli import main as prepare
    from smp_train.data.text.files import find_files
    from smp_train.data.text.read import documents

    hurry(monkeypatch)
    monkeypatch.setattr(s3, "READ_AHEAD", 1 << 14)
    body = text_lines(1200)
    table = io.BytesIO()
    pq.write_table(pa.table({"text": [json.loads(line)["text"] for line in body.splitlines()]}), table)
    put(bucket, "t/a.jsonl", body)
    put(bucket, "t/deep/b.jsonl.gz", gzip.compress(body))
    put(bucket, "t/c.parquet", table.getvalue())
    put(bucket, "t/d.txt", b"one document")
    put(bucket, "t/_SUCCESS", b"")
    files = {file.name: file for file in find_files([f"s3://{bucket[1]}/t"])}
    assert sorted(files) == ["a.jsonl", "c.parquet", "d.txt", "deep/b.jsonl.gz"]
    wanted = [(n + 1, json.loads(line)["text"]) for n, line in enumerate(body.splitlines())]
    server.faults["t/a.jsonl"].extend(["reset", "short", "SlowDown", "stall", "SlowDown", "short"])
    server.faults["t/c.parquet"].extend(["short", "reset"])
    server.faults["t/deep/b.jsonl.gz"].extend(["SlowDown", "short"])
    for name in ("a.jsonl", "c.parquet", "deep/b.jsonl.gz"):
        assert list(documents(files[name])) == wanted, name
    assert not any(server.faults.values()), "every fault was met"
    ranges = [given for key, given in server.gets if key == "t/a.jsonl"]
    assert None not in ranges
    assert len(ranges) > len(body) >> 14
    assert list(documents(files["a.jsonl"], start=1100)) == wanted[1100:]
    server.faults["t/a.jsonl"].extend([lambda: None, "ExpiredToken"])
    with pytest.raises(DataError, match=r"t/a\.jsonl: the AWS credentials have expired \(ExpiredToken\)"):
        list(documents(files["a.jsonl"]))
    put(bucket, "t/a.jsonl", body[:-1] + b" ")
    with pytest.raises(DataError, match=r"t/a\.jsonl: was replaced while it was being read \(412\)"):
        list(documents(files["a.jsonl"]))
    local = tmp_path / "text"
    (local / "deep").mkdir(parents=True)
    (local / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(body))
    (local / "d.txt").write_bytes(b"one document")
    bucket[0].delete_objects(Bucket=bucket[1], Delete={"Objects": [{"Key": "t/a.jsonl"}, {"Key": "t/c.parquet"}]})
    server.faults["t/deep/b.jsonl.gz"].extend(["SlowDown", "short"])
    for place, name in ((str(local), "of_files"), (f"s3://{bucket[1]}/t", "of_s3")):
        flags = ["--train_tokenizer", "300", "--seq_len", "32", "--rows_per_shard", "20"]
        prepare(["--input", place, "--output", str(tmp_path / name), *flags])
    shards = sorted(path.relative_to(tmp_path / "of_s3") for path in (tmp_path / "of_s3").rglob("*.gz"))
    assert len(shards) > 3
    assert all((tmp_path / "of_s3" / n).read_bytes() == (tmp_path / "of_files" / n).read_bytes() for n in shards)
    (alone,) = find_files([f"s3://{bucket[1]}/t/d.txt"])
    assert list(documents(alone)) == [(1, "one document")]
    with pytest.raises(DataError, match="no file that matches"):
        find_files([f"s3://{bucket[1]}/nothing"])
