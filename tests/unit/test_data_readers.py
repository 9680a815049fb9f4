"""Records of files: lines, gzip, tables and whole texts; damage is named, never read as less."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smp_train.data.bad_records import BadRecords
from smp_train.data.files import DataFile, reader_of
from smp_train.data.kinds import TOKENS
from smp_train.data.readers import parse_object, records
from smp_train.data.rows import Recipe, RowMaker, read_rows
from smp_train.errors import DataError

LINE = b'{"input_ids": [1, 2]}\n'


def data_file(path: Path) -> DataFile:
    return DataFile(str(path), path.name, path.stat().st_size, "1", reader_of(path.name) or "text")


def put(path: Path, content: bytes) -> DataFile:
    path.write_bytes(content)
    return data_file(path)


def lines(file: DataFile) -> list[tuple[int, bytes]]:
    return [(number, record) for _, number, record in records(file) if isinstance(record, bytes)]


def test_blank_lines_count_and_only_newline_ends_a_line(tmp_path):
    file = put(tmp_path / "a.json", b"\n  \r\none\n\ntwo\xe2\x80\xa8still\rtwo\nlast")
    assert lines(file) == [(3, b"one\n"), (5, b"two\xe2\x80\xa8still\rtwo\n"), (6, b"last")]
    assert [index for index, _, _ in records(file)] == [0, 1, 2]
    counted: list[int] = []
    list(records(file, tick=counted.append))
    assert sum(counted) == file.size


def test_a_file_that_changed_after_it_was_listed(tmp_path):
    file = put(tmp_path / "a.json", LINE)
    (tmp_path / "a.json").write_bytes(LINE * 2)
    with pytest.raises(DataError, match=r"a\.json: has 44 bytes, and had 22 when it was listed"):
        lines(file)
    (tmp_path / "a.json").unlink()
    with pytest.raises(DataError, match=r"a\.json: cannot be read \(No such file"):
        lines(file)


ROWS = b"".join(b'{"input_ids": [%d, 2]}\n' % n for n in range(5000))
ZIP = gzip.compress(ROWS, mtime=0)
TWO = gzip.compress(ROWS[:5000], mtime=0) + gzip.compress(ROWS[5000:], mtime=0)
DAMAGE = {
    "whole": (ZIP, None),
    "not zipped, whatever its name": (ROWS, None),
    "two members": (TWO, None),
    "cut in the middle": (ZIP[: len(ZIP) // 2], "cut short"),
    "second member cut": (TWO[:-2000], "cut short"),
    "cut in the trailer": (ZIP[:-3], "cut short"),
    "trailing garbage": (ZIP + b"garbage", "damaged"),
    "bad checksum": (ZIP[:-8] + b"\1\2\3\4" + ZIP[-4:], "damaged"),
    "bad length": (ZIP[:-4] + b"\1\2\3\4", "damaged"),
    "flipped bit": (ZIP[:3000] + bytes([ZIP[3000] ^ 16]) + ZIP[3001:], "damaged"),
    "magic alone": (b"\x1f\x8b", "damaged or cut short"),
}


@pytest.mark.parametrize("decoder", ["installed", "gzip"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_gzip_is_never_read_as_less(tmp_path, monkeypatch, name, decoder):
    if decoder == "gzip":
        monkeypatch.setattr("smp_train.data.readers.GzipFile", gzip.GzipFile)
    content, reason = DAMAGE[name]
    file = put(tmp_path / "a.json.gz", content)
    if reason is None:
        assert b"".join(line for _, line in lines(file)) == ROWS
        return
    with pytest.raises(DataError) as caught:
        lines(file)
    assert file.path + ": gzip stream is" in str(caught.value)
    assert reason in str(caught.value)
    assert "copy the file again" in str(caught.value)


# --- objects


REPEATED = {
    '{"text": "a", "text": "b"}': "text", '{"messages": [{"role": "user", "content": "a", "role": "x"}]}': "role",
    r'{"a": 1, "\u0061": 2}': "a", '{"a": {}, "b": [{"c": null, "c": null}]}': "c",
}  # fmt: skip


@pytest.mark.parametrize("line", REPEATED)
def test_a_key_that_occurs_twice_is_refused(line):
    with pytest.raises(ValueError, match=rf"\({REPEATED[line]} is given twice\)"):
        parse_object(line.encode())


# --- tables and texts


def document(number: int) -> str:
    return f"<{number}>" + "".join(f" w{number}x{k}" for k in range(number * 7 % 23))


def json_lines(numbers: Any) -> bytes:
    return b"".join(json.dumps({"text": document(n)}).encode() + b"\n" for n in numbers)


def write_tables(folder: Path, column: Any) -> None:
    """Write a column of text as parquet, and as Arrow in both formats."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"id": list(range(len(column))), "text": column})
    pq.write_table(table, folder / "c.parquet", row_group_size=37)
    with pa.OSFile(str(folder / "d.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=40)
    with pa.OSFile(str(folder / "e.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=41)


def text_of(record: Any) -> Any:
    record = parse_object(record) if isinstance(record, bytes) else record
    return record["text"] if isinstance(record, dict) else record


def test_first_and_step(tmp_path):
    """A reader yields each `step`-th record from `first` on, of all kinds of files."""
    (tmp_path / "a.jsonl").write_bytes(json_lines(range(90)).rstrip())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json_lines(range(90)).replace(b"\n", b"\n\n")))
    (tmp_path / "f.txt").write_text(document(0))
    write_tables(tmp_path, [document(n) for n in range(90)])
    for path in sorted(tmp_path.iterdir()):
        whole = list(records(data_file(path), ("text",)))
        assert [text_of(record) for _, _, record in whole] == [document(n) for n in range(len(whole))]
        assert len(whole) == (1 if path.suffix == ".txt" else 90)
        for first, step in ((0, 3), (2, 3), (41, 1), (80, 7), (1000, 1), (37, 37)):
            assert list(records(data_file(path), ("text",), first=first, step=step)) == whole[first::step], path.name


def test_a_text_that_is_not_utf_8_is_a_problem_of_its_record(tmp_path):
    pa = pytest.importorskip("pyarrow")
    binary = pa.array([b"good", b"\xff\xfe", None, b"good too"], pa.binary())
    write_tables(tmp_path, pa.Array.from_buffers(pa.string(), len(binary), binary.buffers(), binary.null_count))
    for name in ("c.parquet", "d.arrow", "e.arrow"):
        good, broken, null, last = (text_of(record) for _, _, record in records(data_file(tmp_path / name)))
        assert (good, null, last) == ("good", None, "good too")
        assert isinstance(broken, UnicodeDecodeError)
    ((_, _, record),) = records(put(tmp_path / "b.txt", b"latin \xe9"))
    assert isinstance(record, UnicodeDecodeError)


@pytest.mark.parametrize("kind", ["int32", "uint16", "int64"])
@pytest.mark.parametrize(("rows", "size"), [([[1, 2, 3], [4], [], [5, 600]], -1), ([[1, 2], [3, 4], [5, 6]], 2)])
def test_lists_of_integers_are_arrays(tmp_path, kind, rows, size):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    column = pa.array(rows, pa.list_(getattr(pa, kind)(), size))
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "a.parquet")
    found = [record["input_ids"] for _, _, record in records(data_file(tmp_path / "a.parquet"), first=1)]
    assert [array.tolist() for array in found] == rows[1:]
    assert all(isinstance(array, np.ndarray) for array in found)


def forge_offsets(path, offsets):
    written, forged = (np.array(numbers, dtype="<i4").tobytes() for numbers in ([0, 3, 7], offsets))
    assert written in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(written, forged))


def cut(path, end=300):
    path.write_bytes(path.read_bytes()[:end])


DAMAGED_TABLES = [
    ("d.arrow", cut), ("d.arrow", lambda path: path.write_bytes(b"no table at all")),
    ("d.arrow", lambda path: path.write_bytes(b"")), ("c.parquet", partial(cut, end=-100)),
    *(("d.arrow", partial(forge_offsets, offsets=offsets)) for offsets in ([0, 3, 1 << 30], [0, 7, 2], [-8, 3, 7])),
    ("a.txt.gz", lambda path: path.write_bytes(gzip.compress(b"a text", mtime=0)[:-3])),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage"), DAMAGED_TABLES)
def test_damaged_tables_and_texts(tmp_path, name, damage):
    write_tables(tmp_path, [[1, 2, 3], [4, 5, 6, 7], [8] * 500])
    damage(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}: .*copy (it|the file) again") as caught:
        list(records(data_file(tmp_path / name)))
    assert "\n" not in str(caught.value)


# --- malformed records


def token_maker() -> RowMaker:
    return Recipe(TOKENS, 100).open()


def test_a_malformed_record_stops_the_run_or_is_left_out(tmp_path, caplog):
    content = LINE * 3 + b"broken\n" + LINE + b'{"input_ids": [1, 2], "labels": [1, 2]}\n' + LINE
    file = put(tmp_path / "a.jsonl", content)
    with pytest.raises(DataError, match=r"a\.jsonl:4: broken JSON .*--bad_rows skip"):
        list(read_rows(file, token_maker(), BadRecords()))
    bad = BadRecords(max_bad=1)
    assert [number for number, _ in read_rows(file, token_maker(), bad)] == [1, 2, 3, 5, 7]
    assert (bad.count, bad.first_number) == (2, 4)
    assert "a.jsonl:6: has labels, but earlier rows have no labels" in caplog.text
    BadRecords(0.3, bad.count, bad.first).judge_all(7)
    assert "2 of 7 records are bad" in caplog.text
    with pytest.raises(DataError, match=r"2 of 7 records .*more than --max_bad 20.*a\.jsonl:4: broken JSON"):
        BadRecords(0.2, bad.count, bad.first).judge_all(7)
    with pytest.raises(DataError, match=r"^.*a\.jsonl:4: broken JSON"):
        BadRecords(None, bad.count, bad.first).judge_all(7)


def test_records_before_the_damage_come_first(tmp_path, monkeypatch):
    """So that all problems of a file are reported, and the rows before the damage are there."""
    for limit in ("LINE_BYTES", "TEXT_BYTES"):
        monkeypatch.setattr(f"smp_train.data.readers.{limit}", 1 << 10)
    file = put(tmp_path / "a.jsonl", LINE * 2 + b"x\n" + LINE + b"y" * (1 << 10) + LINE)
    bad, numbers = BadRecords(max_bad=1), list[int]()
    with pytest.raises(DataError, match=r"a\.jsonl:5: the line has more than"):
        numbers.extend(number for number, _ in read_rows(file, token_maker(), bad))
    assert (numbers, bad.first_number) == ([1, 2, 4], 3)
    with pytest.raises(DataError, match=r"b\.txt\.gz: is one text of more than"):
        list(records(put(tmp_path / "b.txt.gz", gzip.compress(b"x" * 2000))))
