"""Objects in S3: what is listed is read, whole, or a line names the object, the reason and what to do."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smp_train.data import convert, s3
from smp_train.data.convert import open_token_rows
from smp_train.data.files import FileSet, list_files
from smp_train.data.readers import records
from smp_train.data.rows import Recipe
from smp_train.data.token_file import TokenRows
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


def converted(files: FileSet, folder: Path, **options: Any) -> TokenRows:
    return open_token_rows(files, Recipe(files.kind, 10_000), cache_dir=str(folder), **options)


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


# --- converting


@pytest.mark.parametrize("fault", ["short", "AccessDenied", "replaced"])
def test_a_conversion_resumes_a_broken_transfer_or_names_the_object(server, bucket, tmp_path, monkeypatch, fault):
    """All other faults are those of the storage."""
    monkeypatch.setattr(s3, "CHUNK_BYTES", 1 << 16)
    upload(f"{bucket}/t", {"a.json": big()})
    files = list_files(f"{bucket}/t")
    server.gets.clear()
    if fault == "short":
        server.faults["t/a.json"].extend([fault] * 4)
        rows = converted(files, tmp_path)
        assert (len(rows), rows.row(8999).input_ids.tolist()) == (9000, [*range(8999, 9039)])
        starts = [span[6:].partition("-")[0] for key, span in server.gets if key == "t/a.json"]
        assert len(starts) == len(set(starts)) > len(big()) >> 16, "not begun again"
        return
    replace = [lambda: upload(f"{bucket}/t", {"a.json": big()[:-1] + b" "})]
    server.faults["t/a.json"].extend(["reset", *replace] if fault == "replaced" else [fault] * 60)
    with pytest.raises(DataError, match=rf"^{bucket}/t/a\.json:.*(403 AccessDenied|was replaced while)") as refused:
        converted(files, tmp_path)
    assert "\n" not in str(refused.value)


def test_a_conversion_continues_after_its_last_token_file(server, bucket, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "FILE_BYTES", 0)
    upload(f"{bucket}/t", {"a.json": 2 * ONE, "b.json": ONE})
    files = list_files(f"{bucket}/t")
    server.faults["t/b.json"].append("AccessDenied")
    with pytest.raises(DataError):
        converted(files, tmp_path)
    server.gets.clear()
    assert len(converted(files, tmp_path)) == 3
    assert [key for key, _ in server.gets] == ["t/b.json"]
    upload(f"{bucket}/t", {"a.json": line(4, 5, 6) + ONE})
    assert converted(list_files(f"{bucket}/t"), tmp_path).row(0).input_ids.tolist() == [4, 5, 6]


def test_objects_of_all_kinds_are_read_one_after_another(server, bucket, tmp_path, monkeypatch):
    """Lines are fetched ahead, small tables as a whole, large tables by their columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(s3, "CHUNK_BYTES", 1 << 16)
    monkeypatch.setitem(convert.WORTH_BYTES, "tokens", 0)
    rows = [[*np.random.default_rng(n).integers(0, 10_000, 40).tolist()] for n in range(2000)]
    lines = b"".join(line(*row) for row in rows)
    objects = {"a.jsonl": lines, "d.jsonl.gz": gzip.compress(lines), "e.json": ONE}
    for name, ids in (("b", rows[:10]), ("c", rows)):
        table = io.BytesIO()
        pq.write_table(pa.table({"input_ids": ids, "other": [str(row) for row in ids]}), table)
        objects[f"{name}.parquet"] = table.getvalue()
    upload(f"{bucket}/t", objects)
    files = list_files(f"{bucket}/t")
    assert sum(file.size > s3.CHUNK_BYTES for file in files.files) == 3
    in_sequence = zip(files.files, s3.open_in_sequence(files.files), strict=True)
    assert all(objects[file.name].startswith(raw.read(9)) for file, raw in in_sequence), "also after a part of a file"
    alone, together = (converted(files, tmp_path / str(n), processes=n) for n in (1, 2))
    assert [alone.row(index).input_ids.tolist() for index in range(len(alone))] == [
        *rows, *rows[:10], *rows, *rows, [1, 2, 3]
    ]  # fmt: skip
    assert together.fingerprint == alone.fingerprint


# --- streaming


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
