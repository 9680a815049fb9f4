"""Which files of a folder are shards, and what is said of those that cannot be."""

import gzip
import os
from pathlib import Path

import pytest

from smp_train.data.lines import is_gzip, read_lines
from smp_train.data.utils import list_shards
from smp_train.errors import DataError

LINE = b'{"input_ids": [1, 2], "attention_mask": [1, 1]}\n'


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(gzip.compress(LINE) if name.endswith(".gz") else LINE)


def refuses(location, *parts, **options):
    with pytest.raises(DataError) as caught:
        list_shards(str(location), **options)
    for part in parts:
        assert str(part) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_lists_by_name_and_leaves_out_what_is_no_shard(tmp_path):
    shards = ["10.json", "9.jsonl.gz", "a.jsonl", "b.json.gz", "é ü.json"]
    put(tmp_path, *reversed(shards), ".hidden.json", "_manifest.json", "_SUCCESS", "notes.txt", "c.json.tmp")
    put(tmp_path, "sub/d.json", "folder.json/x.json")
    (tmp_path / "circle").symlink_to("circle")
    assert [shard.name for shard in list_shards(str(tmp_path))] == shards
    assert [shard.name for shard in list_shards(str(tmp_path / "a.jsonl"))] == ["a.jsonl"], "one file"


def test_names_in_capitals_and_what_is_left_out(tmp_path, caplog):
    put(tmp_path, "b.ndjson", "A.JSON", "c.Jsonl.gz", "d.json.zst", "notes.txt", "sub/e.json")
    assert [shard.name for shard in list_shards(str(tmp_path))] == ["A.JSON", "b.ndjson", "c.Jsonl.gz"]
    list_shards(str(tmp_path))
    (said,) = [record.getMessage() for record in caplog.records]
    assert all(name in said for name in (str(tmp_path), "*.zst", "*.txt", "sub/"))
    put(tmp_path, "A.jsonl")
    refuses(tmp_path, "A.jsonl", "twice")


def test_nothing_there(tmp_path):
    refuses(tmp_path / "missing", "missing: no such data folder", "--training_dir")
    refuses(tmp_path, tmp_path, "no shard in this folder", "*.json.gz")
    put(tmp_path, "train/a.json")
    refuses(tmp_path, "its subfolders are train")
    refuses("s3://", "s3://: names no bucket", "s3://bucket/prefix")


def test_unusable_shards(tmp_path):
    put(tmp_path, "a.json")
    (tmp_path / "b.json").touch()
    refuses(tmp_path, tmp_path / "b.json", "empty shard (0 bytes)")
    (tmp_path / "b.json").unlink()
    (tmp_path / "b.json.gz").symlink_to(tmp_path / "gone")
    refuses(tmp_path, tmp_path / "b.json.gz", "cannot be read (No such file or directory)")
    (tmp_path / "b.json.gz").unlink()
    os.mkfifo(tmp_path / "b.json")
    refuses(tmp_path, "b.json: is not a regular file")


def test_rows_that_would_count_twice(tmp_path):
    put(tmp_path, "a.json", "b.json", "b.json.gz")
    refuses(tmp_path, tmp_path / "b.json.gz", "b.json is beside it", "count twice")
    (tmp_path / "b.json.gz").unlink()
    for link in (os.symlink, os.link):
        link(tmp_path / "a.json", tmp_path / "c.json")
        refuses(tmp_path, tmp_path / "c.json", "the same file as a.json")
        (tmp_path / "c.json").unlink()


def test_gzip_is_told_by_content(tmp_path):
    (tmp_path / "plain.json.gz").write_bytes(LINE)
    (tmp_path / "zipped.json").write_bytes(gzip.compress(LINE))
    assert not is_gzip(str(tmp_path / "plain.json.gz"))
    assert is_gzip(str(tmp_path / "zipped.json"))
    for shard in list_shards(str(tmp_path)):
        assert list(read_lines(shard.path)) == [(1, LINE)]


def test_zipped_flag_checks(tmp_path):
    put(tmp_path, "a.json.gz")
    assert len(list_shards(str(tmp_path), zipped=True)) == 1
    refuses(tmp_path, tmp_path / "a.json.gz", "is gzipped, but --zipped_data is 0", zipped=False)
    put(tmp_path, "b.json")
    refuses(tmp_path, tmp_path / "b.json", "is plain, but --zipped_data is 1", zipped=True)


def test_blank_lines_count_and_only_newline_ends_a_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b"\n  \r\none\n\ntwo\xe2\x80\xa8still\rtwo\nlast")
    assert list(read_lines(str(path))) == [(3, b"one\n"), (5, b"two\xe2\x80\xa8still\rtwo\n"), (6, b"last")]


BEGINNINGS = {
    b"\xef\xbb\xbf": "1: .*byte order mark", b"\xff\xfe{\0": "1: .*UTF-16", b"\xfe\xff\0{": "1: .*UTF-16",
    b"\x28\xb5\x2f\xfd": " .*zstd", b"BZh9": " .*bzip2", b"\xfd7zXZ\0": " .*xz", b"PK\3\4": " .*zip",
    b"\x04\x22\x4d\x18": " .*lz4",
}  # fmt: skip


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_other_encodings_and_compressions_are_named(tmp_path, beginning):
    (tmp_path / "a.json").write_bytes(beginning + LINE)
    with pytest.raises(DataError, match=rf"a\.json:{BEGINNINGS[beginning]}"):
        list(read_lines(str(tmp_path / "a.json")))


ROWS = b"".join(b'{"input_ids": [%d, 2]}\n' % n for n in range(5000))
ZIP = gzip.compress(ROWS, mtime=0)
TWO = gzip.compress(ROWS[:5000], mtime=0) + gzip.compress(ROWS[5000:], mtime=0)
DAMAGE = {
    "whole": (ZIP, None),
    "two members": (TWO, None),
    "trailing zeros": (ZIP + b"\0" * 64, None),
    "cut in the middle": (ZIP[: len(ZIP) // 2], "cut short"),
    "second member cut": (TWO[:-2000], "cut short"),
    "cut in the header": (ZIP[:7], "a.json.gz:1: gzip stream is damaged or cut short"),
    "cut in the trailer": (ZIP[:-3], "cut short"),
    "trailing garbage": (ZIP + b"garbage", "damaged"),
    "bad checksum": (ZIP[:-8] + b"\1\2\3\4" + ZIP[-4:], "damaged"),
    "bad length": (ZIP[:-4] + b"\1\2\3\4", "damaged"),
    "flipped bit": (ZIP[:3000] + bytes([ZIP[3000] ^ 16]) + ZIP[3001:], "damaged"),
    "magic alone": (b"\x1f\x8b", "damaged or cut short"),
    "not deflate": (b"\x1f\x8b\x08\0\0\0\0\0\0\3" + b"\xff" * 100, "damaged"),
    "no gzip inside": (b"\x1f\x8bhello", "damaged"),
}


AT = {
    "cut in the middle": (1000, 4000), "second member cut": (ROWS[:5000].count(b"\n"), 4999),
    "flipped bit": (100, 6000), "cut in the header": (1, 1), "magic alone": (1, 1), "not deflate": (1, 1),
    "no gzip inside": (1, 1),
}  # fmt: skip
"""The line that is named, at least and at most; of damage behind the last line, the one after it."""


@pytest.mark.parametrize("decoder", ["installed", "gzip"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_gzip_is_never_read_as_less(tmp_path, monkeypatch, name, decoder):
    if decoder == "gzip":
        monkeypatch.setattr("smp_train.data.lines.GzipFile", gzip.GzipFile)
    content, reason = DAMAGE[name]
    path = tmp_path / "a.json.gz"
    path.write_bytes(content)
    if reason is None:
        assert b"".join(line for _, line in read_lines(str(path))) == ROWS
        return
    with pytest.raises(DataError) as caught:
        list(read_lines(str(path)))
    assert str(path) + ":" in str(caught.value)
    assert reason in str(caught.value)
    assert "copy the shard again" in str(caught.value)
    line = int(str(caught.value)[len(str(path)) + 1 :].partition(":")[0])
    first, last = AT.get(name, (5001, 5001))
    assert first <= line <= last
