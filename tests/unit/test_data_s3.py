"""Objects in S3: what is listed is read, whole, or a line names the object, the reason and what to do."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smp_train.data import s3
from smp_train.data.files import DataFile, list_files, list_held_out
from smp_train.data.readers import records
from smp_train.errors import DataError
from smp_train.storage import client as s3_client
from smp_train.storage import s3 as storage_s3
from tests.s3_server import upload


def line(*ids: int) -> bytes:
    return json.dumps({"input_ids": ids}).encode() + b"\n"


ONE = line(1, 2, 3)


def big(rows: int = 9000) -> bytes:
    """Return rows enough for a body to break off in the middle."""
    return b"".join(line(*range(i, i + 40)) for i in range(rows))


def names(location: str) -> list[str]:
    return [file.name for file in list_files(location).files]


def fetched(files: Any, folder: Path, **options: Any) -> dict[str, bytes]:
    """Fetch files as a conversion does; return their contents."""
    contents = {}
    with s3.fetch(files, str(folder), **options) as copies:
        for file, copy in copies:
            contents[file.name] = Path(copy).read_bytes()
            os.unlink(copy)
    return contents


# --- listing


def test_listing(server, bucket, monkeypatch):
    objects = ("p/a.json", "p/.hidden.json", "p/_SUCCESS", "p/sub/x.json", "pp/b.json", "p/é +%20.json")
    upload(bucket, {**dict.fromkeys(objects, ONE), "p": b"the prefix as a key", "z/a.json": b"", "y/a.json": ONE,
                    "y/a.json.gz": ONE, **{f"pages/{n:04}.json": ONE for n in range(23)}})  # fmt: skip
    s3_client.client().put_object(Bucket=bucket[5:], Key="p/", Body=b"")
    assert names(f"{bucket}/p") == ["a.json", "sub/x.json", "é +%20.json"]
    assert names(f"{bucket}/p/a.json") == ["a.json"]
    (file,) = list_files(f"{bucket}/p/a.json").files
    assert (file.path, file.size, file.remote, bool(file.version)) == (f"{bucket}/p/a.json", len(ONE), True, True)
    for location, reason in (
        ("/nothing", "no object below this prefix"), ("/z", r"z/a.json: is empty \(0 bytes\)"),
        ("/y", r"a\.json\.gz: lies next to .*a\.json"), ("/z/nothing.csv", "no object below"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=reason):
            list_files(f"{bucket}{location}")
    original = s3_client.client().get_paginator("list_objects_v2").paginate
    pages = SimpleNamespace(paginate=lambda **given: original(PaginationConfig={"PageSize": 5}, **given))
    with monkeypatch.context() as patch:
        patch.setattr(s3_client.client(), "get_paginator", lambda name: pages)
        assert names(f"{bucket}/pages") == [f"{n:04}.json" for n in range(23)]
    server.faults["?list"].append("AccessDenied")
    with pytest.raises(DataError, match=r"/t: access denied \(403 AccessDenied\); .* s3:ListBucket on b"):
        list_files(f"{bucket}/t")
    with pytest.raises(DataError, match=r"s3://no-such-bucket/t: no such bucket \(404 NoSuchBucket\)"):
        list_files("s3://no-such-bucket/t")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DataError, match="AWS_PROFILE"):
        list_files(f"{bucket}/t")


def test_splits_and_data_sets(bucket, tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict({"text": [f"text {n}" for n in range(6)]})
    datasets.DatasetDict(train=texts, test=texts.select([3])).save_to_disk(str(tmp_path / "d"))
    upload(f"{bucket}/d", tmp_path / "d")
    fileset = list_files(f"{bucket}/d")
    assert (fileset.location, fileset.kind.name) == (f"{bucket}/d/train", "text")
    assert [record["text"] for _, _, record in records(fileset.files[0])] == texts["text"][:]
    held_out = list_held_out(f"{bucket}/d")
    assert held_out is not None
    assert [record for _, _, record in records(held_out.files[0])] == [{"text": "text 3"}]


# --- fetching


MENDED = {
    "503 seven times": ["SlowDown"] * 7, "reset once": ["reset"], "reset six times": ["reset"] * 6,
    "short four times": ["short"] * 4, "a stall": ["stall"], "always short": [50_000], "always very short": [3000],
}  # fmt: skip


def hurry(monkeypatch):
    """Wait one second for an answer; but try as often as needed, as a busy machine may take longer."""
    monkeypatch.setattr(s3_client, "READ_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(s3_client, "ATTEMPTS", 1000)
    monkeypatch.setattr(storage_s3, "BODY_ATTEMPTS", 1000)


@pytest.mark.parametrize("faults", MENDED.values(), ids=MENDED)
def test_faults_that_are_mended(server, bucket, tmp_path, monkeypatch, faults):
    if faults == ["stall"]:
        hurry(monkeypatch)
    content = big(800 if isinstance(faults[0], int) else 9000)
    upload(f"{bucket}/t", {"a.json": content})
    files = list_files(f"{bucket}/t").files
    server.gets.clear()
    if isinstance(faults[0], int):
        server.most = faults[0]
    else:
        server.faults["t/a.json"].extend(faults)
    counted: list[int] = []
    assert fetched(files, tmp_path, tick=counted.append) == {"a.json": content}
    assert sum(counted) == len(content)
    assert not server.faults["t/a.json"], "every fault occurred"
    if faults[0] == "short":  # a reset may discard bytes on their way, which are then fetched again
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
}


@pytest.mark.parametrize(("fault", "reason"), REFUSED.values(), ids=REFUSED)
def test_faults_that_end_the_fetch(server, bucket, tmp_path, fault, reason):
    upload(f"{bucket}/t", {"a.json": big()})
    files = list_files(f"{bucket}/t").files
    replace = [lambda: upload(f"{bucket}/t", {"a.json": big()[:-1] + b" "})]
    server.faults["t/a.json"].extend([fault] * 60 if "replaced" not in reason else [fault] * bool(fault) + replace)
    with pytest.raises(DataError, match=rf"^{bucket}/t/a\.json:.*{reason}") as refused:
        fetched(files, tmp_path)
    assert "\n" not in str(refused.value)


def test_several_at_once_in_order_and_never_more_on_disk(bucket, tmp_path):
    contents = {f"{n:02}.json": big(20 + n) for n in range(12)}
    upload(f"{bucket}/t", contents)
    files = list_files(f"{bucket}/t").files
    found = []
    with s3.fetch(files, str(tmp_path), at_once=4) as copies:
        for file, copy in copies:
            assert len(list(tmp_path.iterdir())) <= 4
            assert Path(copy).read_bytes() == contents[file.name]
            found.append(file)
            os.unlink(copy)
    assert found == list(files)
    assert not list(tmp_path.iterdir())


def test_a_copy_is_continued_after_a_restart(server, bucket, tmp_path):
    """If the object has still the same version; else it is fetched anew."""
    content = big()
    upload(f"{bucket}/t", {"a.json": content})
    files = list_files(f"{bucket}/t").files
    done: list[int] = []

    def fail_halfway(count: int) -> None:
        done.append(count)
        if sum(done) > len(content) // 2:
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fetched(files, tmp_path, tick=fail_halfway)
    server.gets.clear()
    counted: list[int] = []
    assert fetched(files, tmp_path, tick=counted.append) == {"a.json": content}
    ((_, span),) = server.gets
    assert span == f"bytes={sum(done)}-{len(content) - 1}"
    assert (counted[0], sum(counted)) == (sum(done), len(content))
    assert not list(tmp_path.iterdir())
    done.clear()
    with pytest.raises(ArithmeticError):
        fetched(files, tmp_path, tick=fail_halfway)
    changed = content[:-2] + b" \n"
    upload(f"{bucket}/t", {"a.json": changed})
    assert fetched(list_files(f"{bucket}/t").files, tmp_path) == {"a.json": changed}


def test_two_processes_do_not_write_one_copy(bucket, tmp_path):
    upload(f"{bucket}/t", {"a.json": big(), "b.json": ONE})
    files = list_files(f"{bucket}/t").files
    with s3.fetch(files, str(tmp_path)) as copies:
        _, first = next(copies)
        assert fetched(files, tmp_path) == {"a.json": big(), "b.json": ONE}, "while one copy is used, and one waits"
        assert Path(first).read_bytes() == big()
        assert Path(next(copies)[1]).read_bytes() == ONE
    assert not Path(first).exists(), "a copy that was taken stays in no case"


def test_no_room(bucket, tmp_path, monkeypatch):
    upload(f"{bucket}/t", {"a.json": ONE})

    def full(*request):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage_s3.S3Storage, "receive", full)
    file = DataFile(f"{bucket}/t/a.json", "a.json", len(ONE), "x", "lines")
    with pytest.raises(DataError) as refused:
        fetched([file], tmp_path)
    assert f"{tmp_path}: cannot hold a copy of {bucket}/t/a.json (No space left on device); free" in str(refused.value)


# --- reading without a copy


def test_records_are_read_in_pieces_and_mended(server, bucket, tmp_path, monkeypatch):
    """Each request of `READ_AHEAD` bytes is tried again where it broke; nothing is written to disk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    hurry(monkeypatch)
    monkeypatch.setattr(s3, "READ_AHEAD", 1 << 14)
    texts = [f"document {n} " + "x" * 60 for n in range(1200)]
    body, table = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts), io.BytesIO()
    pq.write_table(pa.table({"text": texts}), table)
    upload(f"{bucket}/t", {"a.jsonl": body, "c.parquet": table.getvalue(), "deep/b.jsonl.gz": gzip.compress(body),
                           "d.txt": b"one document"})  # fmt: skip
    files = {file.name: file for file in list_files(f"{bucket}/t").files}
    server.gets.clear()

    def texts_of(name: str, **options: Any) -> list[str]:
        found = [record for _, _, record in records(files[name], ("text",), **options)]
        return [record if isinstance(record, str) else (json.loads(record) if isinstance(record, bytes) else record)
                ["text"] for record in found]  # type: ignore[index,call-overload]  # fmt: skip

    server.faults["t/a.jsonl"].extend(["reset", "short", "SlowDown", "stall", "SlowDown", "short"])
    server.faults["t/c.parquet"].extend(["short", "reset"])
    server.faults["t/deep/b.jsonl.gz"].extend(["SlowDown", "short"])
    for name in ("a.jsonl", "c.parquet", "deep/b.jsonl.gz"):
        assert texts_of(name) == texts, name
    assert not any(server.faults.values()), "every fault occurred"
    ranges = [given for key, given in server.gets if key == "t/a.jsonl"]
    assert None not in ranges
    assert len(ranges) > len(body) >> 14
    assert texts_of("a.jsonl", first=1100) == texts[1100:]
    assert texts_of("d.txt") == ["one document"]
    server.faults["t/a.jsonl"].extend([lambda: None, "ExpiredToken"])
    with pytest.raises(DataError, match=r"t/a\.jsonl: .*\(ExpiredToken\)"):
        texts_of("a.jsonl")
    upload(f"{bucket}/t", {"a.jsonl": body[:-1] + b" "})
    with pytest.raises(DataError, match=r"t/a\.jsonl: .*\(412\)"):
        texts_of("a.jsonl")
