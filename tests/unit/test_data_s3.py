"""Shards in S3: what is listed is what is read, whole, or a line names the object, the reason and what to do."""

import gzip
import io
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from smp_train import storage
from smp_train.data import folder_lock, hf_dataset, s3, s3_cache
from smp_train.data.open_data import open_place
from smp_train.data.prepare.cli import main as prepare
from smp_train.data.prepare.writing import finish_arrow, write_block
from smp_train.data.text.files import find_files
from smp_train.data.text.read import documents
from smp_train.data.token_cache import TokenCache
from smp_train.data.token_writer import write_rows
from smp_train.data.utils import list_shards
from smp_train.errors import DataError
from smp_train.storage import client as s3_client
from smp_train.storage import s3 as storage_s3
from tests.chats import chat, write_lines, write_tokenizer
from tests.s3_server import upload
from tests.shards import convert


def line(*ids):
    return json.dumps({"input_ids": ids}).encode() + b"\n"


ONE = line(1, 2, 3)


def big(rows=9000):
    """Rows enough for a body to break off in the middle."""
    return b"".join(line(*range(i, i + 40)) for i in range(rows))


def opened(place, cache, vocab_size=10000):
    return open_place(place, vocab_size=vocab_size, cache_dir=str(cache))


def test_rows_come_from_s3(bucket, tmp_path):
    files = {"a.json": ONE, "b.json": big(), "é +%20=&?.json": line(4, 5)}
    upload(f"{bucket}/d ir", files)
    source = opened(f"{bucket}/d ir", tmp_path)
    assert len(source) == 9002
    assert [source.row(i).input_ids.tolist() for i in (0, 9000, 9001)] == [[1, 2, 3], [*range(8999, 9039)], [4, 5]]
    assert source.name(5) == "b.json:5"
    assert convert(f"{bucket}/d ir", vocab_size=10000, cache_dir=str(tmp_path)) == 0, "a second start fetches nothing"
    assert not list(tmp_path.glob(".*.tmp")), "no copy is left"
    upload(str(tmp_path / "local"), files)
    assert opened(str(tmp_path / "local"), tmp_path).fingerprint == source.fingerprint, "where it is does not matter"
    upload(f"{bucket}/d ir", {"a.json": line(1, 2, 4)})
    after = opened(f"{bucket}/d ir", tmp_path)
    assert after.row(0).input_ids.tolist() == [1, 2, 4], "a changed object is another"
    assert after.fingerprint != source.fingerprint


def test_listing(server, bucket, monkeypatch):
    names = ("p/a.json", "p/.hidden.json", "p/_SUCCESS", "p/sub/x.json", "pp/b.json", "p/é +%20.json")
    upload(bucket, {**dict.fromkeys(names, ONE), "p": b"the prefix as a key", "z/a.json": b"", "y/a.json": ONE,
                    "y/a.json.gz": ONE, **{f"pages/{n:04}.json": ONE for n in range(23)}})  # fmt: skip
    s3_client.client().put_object(Bucket=bucket[5:], Key="p/", Body=b"")
    assert [shard.name for shard in list_shards(f"{bucket}/p")] == ["a.json", "é +%20.json"]
    assert [shard.name for shard in list_shards(f"{bucket}/p/a.json")] == ["a.json"]
    for place, message in (
        ("", r"no shard in this folder .*; its subfolders are p, pages, pp"), ("/nothing", "no shard in this folder"),
        ("/z", r"z/a.json: empty shard \(0 bytes\)"), ("/y", r"a\.json is beside it"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            list_shards(f"{bucket}{place}")
    original = s3_client.client().get_paginator("list_objects_v2").paginate
    pages = SimpleNamespace(paginate=lambda **given: original(PaginationConfig={"PageSize": 5}, **given))
    with monkeypatch.context() as patch:
        patch.setattr(s3_client.client(), "get_paginator", lambda name: pages)
        found, _ = s3.list_folder(f"{bucket}/pages")
    assert [shard.name for shard in found] == [f"{n:04}.json" for n in range(23)]
    server.faults["?list"].append("AccessDenied")
    with pytest.raises(DataError, match=r"/t: access denied \(403 AccessDenied\); .* s3:ListBucket on b"):
        list_shards(f"{bucket}/t")
    with pytest.raises(DataError, match=r"s3://no-such-bucket/t: no such bucket \(404 NoSuchBucket\)"):
        list_shards("s3://no-such-bucket/t")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DataError, match="AWS_PROFILE"):
        list_shards(f"{bucket}/t")


def hurry(monkeypatch):
    """Give an answer up after a second; as a busy machine may need longer for any, try as often as it takes."""
    monkeypatch.setattr(s3_client, "READ_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(s3_client, "ATTEMPTS", 1000)
    monkeypatch.setattr(storage_s3, "BODY_ATTEMPTS", 1000)


MENDED = {
    "503 seven times": ["SlowDown"] * 7, "reset once": ["reset"], "reset six times": ["reset"] * 6,
    "short four times": ["short"] * 4, "a stall": ["stall"], "always short": [50_000], "always very short": [3000],
}  # fmt: skip


@pytest.mark.parametrize("faults", MENDED.values(), ids=MENDED)
def test_what_is_mended(server, bucket, tmp_path, monkeypatch, faults):
    if faults == ["stall"]:
        hurry(monkeypatch)
    rows = 800 if isinstance(faults[0], int) else 9000
    upload(f"{bucket}/t", {"a.json": big(rows)})
    if rows == 800:
        server.most = faults[0]
    else:
        server.faults["t/a.json"].extend(faults)
    assert len(opened(f"{bucket}/t", tmp_path)) == rows
    assert not server.faults["t/a.json"], "every fault was met"
    if faults[0] == "short":  # what a reset throws away on its way has to be fetched again
        starts = [int(span[6:].partition("-")[0]) for key, span in server.gets if key == "t/a.json"]
        assert starts == sorted(set(starts)), "resumed where it broke, not begun again"


REFUSED = {
    "403": ["AccessDenied", r"access denied \(403 AccessDenied\); the role in use needs s3:GetObject on b"],
    "404": ["NoSuchKey", r"no such object \(404 NoSuchKey\)"],
    "expired": ["ExpiredToken", r"the AWS credentials have expired \(ExpiredToken\)"],
    "301": ["PermanentRedirect", r"\(301 .*AWS_REGION=eu-west-3"],
    "never": ["SlowDown", r"\(.*SlowDown.*reached max retries: 7"],
    "replaced": ["", r"was replaced while it was being read \(412\)"],
    "replaced in the middle": ["reset", r"was replaced while it was being read \(412\)"],
    "malformed": [None, r"9001: token id -2 is outside"],
}


@pytest.mark.parametrize(("fault", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(server, bucket, tmp_path, fault, message):
    upload(f"{bucket}/t", {"a.json": big() + line(1, -2) * (fault is None)})
    if fault is not None:
        replace = [lambda: upload(f"{bucket}/t", {"a.json": big()[:-1] + b" "})]
        server.faults["t/a.json"].extend([fault] * 60 if "replaced" not in message else [fault] * bool(fault) + replace)
    with pytest.raises(DataError, match=rf"^{bucket}/t/a\.json:.*{message}") as refused:
        opened(f"{bucket}/t", tmp_path)
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob(".*.tmp"))


def test_many_at_once_and_never_more_on_disk(bucket, tmp_path):
    upload(f"{bucket}/t", {f"{n:02}.json": big(20 + n) for n in range(12)})
    shards = list_shards(f"{bucket}/t")
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


def test_no_room(bucket, tmp_path, monkeypatch):
    """A full disk; and a plain file where the folder would be, which stands for any that cannot be made."""
    upload(f"{bucket}/t", {"a.json": ONE})
    upload(f"{bucket}/p", {"a.tok": ONE, "a.idx": ONE, "b.tok": ONE, "b.idx": ONE})
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=rf"s3-\w+-\w+: cannot hold a copy of {bucket}/p \(File exists\); give a"):
        open_place(f"{bucket}/p", vocab_size=9, cache_dir=str(tmp_path / "file"))

    def full(*request):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage_s3.S3Storage, "receive", full)
    with pytest.raises(DataError) as refused:
        opened(f"{bucket}/t", tmp_path)
    assert f"{tmp_path}: cannot hold a copy of {bucket}/t/a.json (No space left on device); free" in str(refused.value)
    assert not list(tmp_path.glob(".stage*"))


def test_a_data_set_of_arrow_files_is_brought_and_checked_in_shares(server, bucket, tmp_path):
    """By two ranks, each part by one of them."""
    made = tmp_path / "made"
    made.mkdir()
    entries = [write_block("arrow", str(made), f"{n}", np.full((5, 4), n + 1), 99, False) for n in range(4)]
    finish_arrow(made, "train", entries)
    upload(f"{bucket}/t", made)
    place, cache = f"{bucket}/t", str(tmp_path / "cache")
    (here,) = {s3_cache.bring(place, cache, rank, 2)[0] for rank in (0, 1)}
    checks = TokenCache(here, 99, cache)
    assert [hf_dataset.check_share(checks, here, rank, 2) for rank in (0, 1)] == [2, 2]
    source = open_place(place, vocab_size=99, cache_dir=cache)
    assert [source.row(5 * n).input_ids.tolist() for n in range(4)] == [[n + 1] * 4 for n in range(4)]
    assert len([key for key, _ in server.gets if key.startswith("t/")]) == 6, "each object once"


def test_a_copy_of_an_earlier_version_goes_when_nobody_reads_it(bucket, tmp_path, monkeypatch, caplog):
    cache = tmp_path / "cache"

    def copies(value):
        """Return the copies there are once a version of the place is open."""
        write_rows("a", str(tmp_path / "a"), 9, np.full((2, 4), value))
        upload(f"{bucket}/t", {name: (tmp_path / name).read_bytes() for name in ("a.tok", "a.idx")})
        source = open_place(f"{bucket}/t", vocab_size=9, cache_dir=str(cache))
        assert source.row(0).input_ids.tolist() == [value] * 4
        return {path.name for path in cache.iterdir() if path.is_dir()}

    (first,) = copies(1)
    reading = folder_lock.take(str(cache / first), shared=True)  # another process's
    assert len(copies(2)) == 2
    reading.release()
    (cache / "s3-another-place").mkdir()
    assert len(copies(3)) == 2
    assert f"removed, as {bucket}/t" in caplog.text
    assert (cache / "s3-another-place").exists()
    with monkeypatch.context() as killed:
        killed.setattr(s3_cache.shutil, "rmtree", lambda path, **how: os.unlink(path / "a.tok"))
        assert len(copies(4)) == 3
    assert len(copies(5)) == 2, "what a killed run has left of it goes too"


def test_one_rank_warns_of_all_that_is_to_be_copied(bucket, tmp_path, monkeypatch, caplog):
    upload(f"{bucket}/t", {f"{name}{suffix}": bytes(10) for name in "abcd" for suffix in (".tok", ".idx")})
    s3_cache.bring(f"{bucket}/t", str(tmp_path), 1, 4)
    monkeypatch.setattr(s3_cache.s3, "staged", lambda missing, folder: ())
    for free, ranks, warnings in ((59, range(4), 1), (60, [0], 1)):  # of 80 bytes, two objects are there
        monkeypatch.setattr(s3_cache.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        for rank in ranks:
            s3_cache.bring(f"{bucket}/t", str(tmp_path), rank, 4)
        assert caplog.text.count("has room for") == warnings


def test_text_is_read_in_pieces_and_mended(server, bucket, tmp_path, monkeypatch):
    """An object is read by requests of `READ_AHEAD` bytes, each tried again where it broke; nothing is on disk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    hurry(monkeypatch)
    monkeypatch.setattr(s3, "READ_AHEAD", 1 << 14)
    texts = [f"document {n} " + "x" * 60 for n in range(1200)]
    body, table = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts), io.BytesIO()
    pq.write_table(pa.table({"text": texts}), table)
    wanted = list(enumerate(texts, 1))
    kept = {"deep/b.jsonl.gz": gzip.compress(body), "d.txt": b"one document"}
    upload(f"{bucket}/t", {"a.jsonl": body, "c.parquet": table.getvalue(), "_SUCCESS": b"", **kept})
    files = {file.name: file for file in find_files([f"{bucket}/t"])}
    assert sorted(files) == ["a.jsonl", "c.parquet", "d.txt", "deep/b.jsonl.gz"]
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
    with pytest.raises(DataError, match=r"t/a\.jsonl: .*\(ExpiredToken\)"):
        list(documents(files["a.jsonl"]))
    upload(f"{bucket}/t", {"a.jsonl": body[:-1] + b" "})
    with pytest.raises(DataError, match=r"t/a\.jsonl: .*\(412\)"):
        list(documents(files["a.jsonl"]))
    for name in ("a.jsonl", "c.parquet"):
        storage.at(f"{bucket}/t").delete(name)
    upload(str(tmp_path / "local"), kept)
    server.faults["t/deep/b.jsonl.gz"].extend(["SlowDown", "short"])
    for place, name in ((str(tmp_path / "local"), "of_files"), (f"{bucket}/t", "of_s3")):
        flags = ["--train_tokenizer", "300", "--seq_len", "32", "--rows_per_shard", "20"]
        prepare(["--input", place, "--output", str(tmp_path / name), *flags])
    shards = sorted(path.relative_to(tmp_path / "of_s3") for path in (tmp_path / "of_s3").rglob("*.gz"))
    assert len(shards) > 3
    assert all((tmp_path / "of_s3" / n).read_bytes() == (tmp_path / "of_files" / n).read_bytes() for n in shards)
    (alone,) = find_files([f"{bucket}/t/d.txt"])
    assert list(documents(alone)) == [(1, "one document")]
    with pytest.raises(DataError, match="no file that matches"):
        find_files([f"{bucket}/nothing"])


def test_chats_are_read_as_from_a_folder(bucket, tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    body = write_lines(tmp_path / "local" / "a.jsonl", [{"messages": chat(n)} for n in range(20)]).read_bytes()
    upload(f"{bucket}/chats", {"a.jsonl": body})
    for place, name in ((str(tmp_path / "local"), "of_files"), (f"{bucket}/chats", "of_s3")):
        flags = ["--tokenizer", str(tokenizer), "--validation_fraction", "0"]
        assert prepare(["--input", place, "--output", str(tmp_path / name), *flags]) == 0
    (shard,) = (tmp_path / "of_s3" / "train").iterdir()
    assert shard.read_bytes() == (tmp_path / "of_files" / "train" / shard.name).read_bytes()
    bad = write_lines(tmp_path / "bad.jsonl", [{"messages": chat(1)}, {"messages": []}])
    upload(f"{bucket}/chats", {"a.jsonl": bad.read_bytes()})
    with pytest.raises(DataError, match=r"s3://.*/chats/a\.jsonl:2: messages is empty"):
        prepare(["--input", f"{bucket}/chats", "--output", str(tmp_path / "bad"), *flags])
