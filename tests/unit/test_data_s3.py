"""Objects in S3: what is listed is read, whole, or a line names the object, the reason and what to do."""

from __future__ import annotations

import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from smp_train.data import s3
from smp_train.data.files import list_files
from smp_train.data.readers import records
from smp_train.errors import DataError
from smp_train.storage import client as s3_client
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


def test_listing(server, bucket):
    objects = ("p/a.json", "p/.hidden.json", "p/_SUCCESS", "p/sub/x.json", "pp/b.json", "p/é +%20.json")
    upload(bucket, {**dict.fromkeys(objects, ONE), "p": b"the prefix as a key", "z/a.json": b"", "y/a.json": ONE,
                    "y/a.json.gz": ONE})  # fmt: skip
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
    server.faults["?list"].append("AccessDenied")
    with pytest.raises(DataError, match=r"/t: access denied \(403 AccessDenied\); .* s3:ListBucket on b"):
        list_files(f"{bucket}/t")


# --- fetching


@pytest.mark.parametrize("fault", ["short", "AccessDenied", "replaced"])
def test_a_fetch_is_resumed_where_it_broke_or_names_the_object(server, bucket, tmp_path, fault):
    """All other faults are those of the storage."""
    upload(f"{bucket}/t", {"a.json": big()})
    files = list_files(f"{bucket}/t").files
    server.gets.clear()
    if fault == "short":
        server.faults["t/a.json"].extend([fault] * 4)
        assert fetched(files, tmp_path) == {"a.json": big()}
        starts = [int(span[6:].partition("-")[0]) for key, span in server.gets if key == "t/a.json"]
        assert starts == sorted(set(starts)), "not begun again"
        return
    replace = [lambda: upload(f"{bucket}/t", {"a.json": big()[:-1] + b" "})]
    server.faults["t/a.json"].extend(["reset", *replace] if fault == "replaced" else [fault] * 60)
    with pytest.raises(DataError, match=rf"^{bucket}/t/a\.json:.*(403 AccessDenied|was replaced while)") as refused:
        fetched(files, tmp_path)
    assert "\n" not in str(refused.value)


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


# --- reading without a copy


def test_records_are_read_in_pieces_and_mended(server, bucket, monkeypatch):
    """Each request of `READ_AHEAD` bytes is tried again where it broke; nothing is written to disk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(s3, "READ_AHEAD", 1 << 14)
    texts = [f"document {n} " + "x" * 60 for n in range(1200)]
    body, table = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts), io.BytesIO()
    pq.write_table(pa.table({"text": texts}), table)
    upload(f"{bucket}/t", {"a.jsonl": body, "c.parquet": table.getvalue(), "b.jsonl.gz": gzip.compress(body)})
    files = {file.name: file for file in list_files(f"{bucket}/t").files}
    server.gets.clear()

    def texts_of(name: str, **options: Any) -> list[str]:
        found = [record for _, _, record in records(files[name], ("text",), **options)]
        return [(json.loads(record) if isinstance(record, bytes) else record)["text"] for record in found]

    for name, faults in (("a.jsonl", ["reset", "short", "SlowDown"]), ("c.parquet", ["short", "reset"]),
                         ("b.jsonl.gz", ["SlowDown", "short"])):  # fmt: skip
        server.faults[f"t/{name}"].extend(faults)
        assert texts_of(name) == texts, name
    assert not any(server.faults.values()), "every fault occurred"
    ranges = [given for key, given in server.gets if key == "t/a.jsonl"]
    assert None not in ranges
    assert len(ranges) > len(body) >> 14
    assert texts_of("a.jsonl", first=1100) == texts[1100:]
    upload(f"{bucket}/t", {"a.jsonl": body[:-1] + b" "})
    with pytest.raises(DataError, match=r"t/a\.jsonl: .*\(412\)"):
        texts_of("a.jsonl")
