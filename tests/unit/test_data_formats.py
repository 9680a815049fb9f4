"""Hugging Face data sets on disk and prepared token files, found out by what lies in a folder."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("datasets")

from datasets import Dataset, DatasetDict, Features, Sequence, Value

from smp_train.data import cli, hf_dataset
from smp_train.data.formats import ARROW, PREPARED, SHARDS, kind_of
from smp_train.data.layout import lay_out
from smp_train.data.open_data import open_place, say
from smp_train.data.source import lengths
from smp_train.data.token_cache import BESIDE
from smp_train.data.token_dataset import open_source
from smp_train.errors import ConfigError, DataError

ROWS = [[n, n + 1, n + 2] + [7] * (n % 4) for n in range(50)]


def save(folder, rows=ROWS, masks=None, shards=2, **change):
    columns = {"input_ids": rows, "note": ["x"] * len(rows)}
    if masks is not None:
        columns["attention_mask"] = masks
    made = Dataset.from_dict(columns, **change)
    made.save_to_disk(str(folder), num_shards=shards)
    return made


def opened(folder, vocab_size=100, **options):
    return open_place(str(folder), vocab_size=vocab_size, **options)


def test_rows_of_a_data_set(tmp_path):
    masks = [[1] * len(row) for row in ROWS]
    masks[3] = [0, 1, 1] + [1] * (len(ROWS[3]) - 3)
    masks[9] = [1, 1, 0] + [0] * (len(ROWS[9]) - 3)
    save(tmp_path, masks=masks)
    assert kind_of(str(tmp_path)) == ARROW
    source = opened(tmp_path, dataset_type="hf")
    assert [source.row(i).input_ids.tolist() for i in range(50)] == ROWS
    assert source.row(4).counted is None
    assert source.row(3).counted.tolist() == [bool(m) for m in masks[3]]
    assert lengths(source)[[3, 9, 10]].tolist() == [len(ROWS[3]) - 1, 2, len(ROWS[10])]
    assert source.shards == [range(25), range(25, 50)]
    assert source.name(26).endswith(".arrow:2")
    assert source.report()["longest"] == 6
    assert source.report()["counted_tokens"] == sum(map(sum, masks))
    assert not source.row(30).input_ids.flags.owndata
    assert str(tmp_path) in Path("/proc/self/maps").read_text(), "a row is a view of the file"
    into = np.zeros((2, 3), dtype=np.int64)
    assert source.fill([4, 8], into)
    assert into.tolist() == [ROWS[4], ROWS[8]]
    assert not source.fill([4, 5], into)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / BESIDE).glob("*.checked")}
    opened(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / BESIDE).glob("*.checked")} == before, "checked once"


@pytest.mark.parametrize("kind", ["int32", "uint16", "int64"])
def test_integer_types_and_fixed_lengths(tmp_path, kind):
    features = Features({"input_ids": Sequence(Value(kind), length=3)})
    Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]]}, features=features).save_to_disk(str(tmp_path))
    assert opened(tmp_path).row(1).input_ids.tolist() == [4, 5, 6]


def test_shuffled_and_filtered_before_saving(tmp_path):
    made = Dataset.from_dict({"input_ids": ROWS}).shuffle(seed=3).select(range(5, 20))
    made.save_to_disk(str(tmp_path / "flat"))
    assert [opened(tmp_path / "flat").row(i).input_ids.tolist() for i in range(15)] == made["input_ids"][:]
    # An old `datasets` kept the order of the rows in a file of its own.
    state = json.loads((tmp_path / "flat/state.json").read_text())
    (tmp_path / "flat/state.json").write_text(json.dumps({**state, "_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(DataError, match="save it again with save_to_disk"):
        opened(tmp_path / "flat")


BAD = {
    "id": ([[1, 2], [3, 100]], None, r"row 2: token id 100 is outside the vocabulary \[0, 100\)"),
    "negative": ([[1, 2], [3, 4], [-1, 4]], None, r"row 3: token id -1 is outside"),
    "single": ([[1, 2], [3]], None, r"row 2: a row of fewer than two tokens"),
    "mask length": ([[1, 2], [3, 4]], [[1, 1], [1]], r"row 2: input_ids and attention_mask differ in length"),
    "mask value": ([[1, 2], [3, 4]], [[1, 1], [1, 2]], r"row 2: attention_mask holds 2; use 0 or 1"),
    "nothing counted": ([[1, 2], [3, 4]], [[1, 1], [1, 0]], r"row 2: attention_mask counts no token"),
    "floats": ([[1.5, 2.0]], None, r"column input_ids is list<.*lists of integers are needed"),
    "null": ([[1, 2], None], None, r"row 2: input_ids is null; remove the row"),
    "text": (["a b"], None, r"column input_ids is string"),
}


@pytest.mark.parametrize(("rows", "masks", "message"), BAD.values(), ids=BAD)
def test_bad_columns_are_named(tmp_path, rows, masks, message):
    save(tmp_path, rows, masks, shards=1)
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow: " + message):
        opened(tmp_path)


def test_what_is_no_data_set(tmp_path):
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(DataError, match=r"input_ids .*text.*smp-train prepare"):
        opened(tmp_path / "text")
    DatasetDict(train=Dataset.from_dict({"input_ids": ROWS})).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="splits train"):
        opened(tmp_path / "splits")
    save(tmp_path / "cut")
    path = next((tmp_path / "cut").glob("*.arrow"))
    os.truncate(path, 300)
    with pytest.raises(DataError, match=r"\.arrow: "):
        opened(tmp_path / "cut")
    path.unlink()
    with pytest.raises(DataError, match=r"not a whole data set"):
        opened(tmp_path / "cut")
    (tmp_path / "json").mkdir()
    (tmp_path / "json/a.json").write_text('{"input_ids": [1, 2]}\n')
    assert kind_of(str(tmp_path / "json")) == SHARDS
    with pytest.raises(DataError, match=r"--dataset_type hf.*save_to_disk"):
        kind_of(str(tmp_path / "json"), "hf")


def shards(folder):
    folder.mkdir()
    for n in range(3):
        lines = [json.dumps({"input_ids": row}) for row in ROWS[n * 10 : n * 10 + 10]]
        (folder / f"{n}.json").write_text("\n".join(lines) + "\n")
    return open_source(str(folder), vocab_size=100)


def test_prepared_files_alone(tmp_path):
    first = shards(tmp_path / "data")
    shutil.copytree(tmp_path / "data" / BESIDE, tmp_path / "tokens")
    shutil.rmtree(tmp_path / "data")
    assert kind_of(str(tmp_path / "tokens")) == PREPARED
    source = opened(tmp_path / "tokens", vocab_size=120)
    assert source.fingerprint == first.fingerprint
    assert [source.row(i).input_ids.tolist() for i in range(30)] == ROWS[:30]
    assert source.name(11) == "1.json:2"
    with pytest.raises(DataError, match=r"100.* 50"):
        opened(tmp_path / "tokens", vocab_size=50)
    one = next((tmp_path / "tokens").glob("*.idx"))
    shutil.copy(one, tmp_path / "tokens/other.idx")
    shutil.copy(str(one)[:-4] + ".tok", tmp_path / "tokens/other.tok")
    with pytest.raises(DataError, match=r"0\.json"):
        opened(tmp_path / "tokens")
    (tmp_path / "tokens/other.tok").unlink()
    with pytest.raises(DataError, match=r"other\.idx: "):
        opened(tmp_path / "tokens")
    (tmp_path / "tokens/x.json").write_text("")
    with pytest.raises(DataError, match=r"holds JSON-lines shards and prepared tokens; keep one kind"):
        opened(tmp_path / "tokens")


def test_lengths_are_of_one_file_at_a_time(tmp_path, monkeypatch):
    """All lengths are one pass over the data, however many files there are."""
    masks = [[0] + [1] * (len(row) - 1) for row in ROWS]
    save(tmp_path, masks=masks, shards=10)
    source = opened(tmp_path)
    seen = []
    real = hf_dataset.attended_spans
    monkeypatch.setattr(hf_dataset, "attended_spans", lambda mask, starts: seen.append(len(mask)) or real(mask, starts))
    assert lengths(source).tolist() == [len(row) - 1 for row in ROWS]
    assert seen == [sum(map(len, ROWS[n : n + 5])) for n in range(0, 50, 5)]


def test_bad_rows_are_left_out_and_said(tmp_path, caplog):
    rows, masks = [list(row) for row in ROWS], [[1] * len(row) for row in ROWS]
    rows[7], rows[31], masks[33] = None, [5, 6, 100], [1] + [0] * (len(ROWS[33]) - 1)
    masks[31] = [1, 1, 1]
    save(tmp_path, rows, masks, shards=2)
    where = r"data-00000-of-00002\.arrow: row 8: input_ids is null"
    with pytest.raises(DataError, match=where):
        opened(tmp_path)
    source = opened(tmp_path, max_bad=0.06)
    good = [row for n, row in enumerate(ROWS) if n not in (7, 31, 33)]
    assert [source.row(i).input_ids.tolist() for i in range(len(source))] == good
    assert source.shards == [range(24), range(24, 47)]
    assert lengths(source).tolist() == [len(row) for row in good]
    assert [source.name(i).rpartition(":")[2] for i in (6, 7, 23, 24, 29, 30)] == ["7", "9", "25", "1", "6", "8"]
    assert source.report()["lines_left_out"] == 3
    assert "left out 3 of 50 lines" in caplog.text
    with pytest.raises(DataError, match=r"3 of 50 .*--max_bad 5\.0.*row 8: input"):
        opened(tmp_path, max_bad=0.05)
    with pytest.raises(DataError, match=where):
        opened(tmp_path)
    save(tmp_path / "none", [[1], [2]], shards=1)
    with pytest.raises(DataError, match="the data set has no row"):
        opened(tmp_path / "none", max_bad=1)


def test_what_another_version_kept_is_checked_again(tmp_path):
    save(tmp_path, shards=1)
    opened(tmp_path)
    (kept,) = (tmp_path / BESIDE).glob("*.checked")
    found = json.loads(kept.read_text())
    damaged = ({**found, "version": 1}, {**found, "left_out": [-1]}, {**found, "rows": "50"}, {"rows": 50}, [])
    for damage in damaged:
        kept.write_text(json.dumps(damage))
        opened(tmp_path)
        assert json.loads(kept.read_text()) == found


def test_verify_names_every_row_of_a_data_set(tmp_path, capsys):
    save(tmp_path, [[1, 2], [3], [4, 5], [-6, 7]], shards=1)
    assert cli.main(["verify", str(tmp_path)]) == 3
    said = capsys.readouterr().out
    assert ".arrow: row 2: a row of fewer" in said
    assert ".arrow: row 4: token id -6" in said
    assert said.endswith(": 2 rows in 1 files, 2 problems\n")
    assert not (tmp_path / BESIDE).exists()


def test_columns_beside_and_files_of_other_writers(tmp_path):
    import pyarrow as pa

    save(tmp_path, [[1, 2], [3, 4]], shards=1)
    (path,) = tmp_path.glob("*.arrow")
    table = pa.table({"kind": pa.array(["a", "b"]).dictionary_encode(), "input_ids": [[1, 2, 3], [4, 5]]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    source = opened(tmp_path)
    assert [source.row(i).input_ids.tolist() for i in range(2)] == [[1, 2, 3], [4, 5]]
    squeezed = pa.ipc.IpcWriteOptions(compression="lz4")
    table = pa.table({"input_ids": [[1, 2, 3] * 1000]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=squeezed) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="is compressed; save it again"):
        opened(tmp_path)


def test_a_file_that_was_cut_between_two_batches(tmp_path):
    save(tmp_path, ROWS * 60, shards=1)
    (path,) = tmp_path.glob("*.arrow")
    whole = path.read_bytes()
    ends = [n for n in range(8, len(whole)) if whole[n : n + 4] == b"\xff\xff\xff\xff"]
    path.write_bytes(whole[: ends[-2]])
    with pytest.raises(DataError, match="not a whole Arrow file"):
        opened(tmp_path)


def test_nothing_is_read_outside_of_a_data_set(tmp_path):
    save(tmp_path / "set", shards=1)
    (path,) = (tmp_path / "set").glob("*.arrow")
    state = json.loads((tmp_path / "set/state.json").read_text())
    shutil.move(path, tmp_path)
    for name in (f"../{path.name}", str(tmp_path / path.name)):
        (tmp_path / "set/state.json").write_text(json.dumps({**state, "_data_files": [{"filename": name}]}))
        with pytest.raises(DataError, match="outside of the folder"):
            opened(tmp_path / "set")


@pytest.mark.parametrize("offsets", [[0, 3, 1 << 30], [0, 30000, 4], [0, 4, 2], [-8, 2, 4]])
def test_offsets_that_lead_out_of_a_file(tmp_path, offsets):
    save(tmp_path, [[1, 2], [3, 4]], shards=1)
    (path,) = tmp_path.glob("*.arrow")
    content = path.read_bytes()
    written, forged = (np.array(numbers, dtype="<i4").tobytes() for numbers in ([0, 2, 4], offsets))
    assert written in content
    path.write_bytes(content.replace(written, forged))
    with pytest.raises(DataError, match=r"\.arrow: "):
        opened(tmp_path)


def test_prepared_files_that_lack_lines(tmp_path, caplog, capsys):
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"input_ids": row}) for row in ROWS]
    lines[2] = "{"
    (tmp_path / "data/a.json").write_text("\n".join(lines) + "\n")
    open_source(str(tmp_path / "data"), vocab_size=100, max_bad=0.1)
    shutil.move(tmp_path / "data" / BESIDE, tmp_path / "tokens")
    with pytest.raises(DataError, match=r"\.tok: a\.json:3: .*--bad_rows skip"):
        opened(tmp_path / "tokens")
    caplog.clear()
    assert len(opened(tmp_path / "tokens", max_bad=0.1)) == 49
    assert "left out 1 of 50 lines" in caplog.text
    with pytest.raises(DataError, match="more than --max_bad"):
        opened(tmp_path / "tokens", max_bad=0.01)
    assert cli.main(["inspect", str(tmp_path / "tokens")]) == 0
    assert "left out when this was made, as no rows: 1 lines" in capsys.readouterr().out


def test_rows_with_holes_are_not_packed(tmp_path, caplog):
    """Refused before the first step, not where such a row comes up."""
    masks = [[1] * len(row) for row in ROWS]
    masks[3] = [0, *masks[3][1:]]
    masks[4] = [1, 1, 0]
    caplog.set_level("INFO")
    for holed in (False, True):
        if holed:
            masks[30][1] = 0
        save(tmp_path / f"arrow {holed}", masks=masks)
        (tmp_path / f"json {holed}").mkdir()
        lines = [json.dumps({"input_ids": i, "attention_mask": m}) for i, m in zip(ROWS, masks, strict=True)]
        (tmp_path / f"json {holed}/a.json").write_text("\n".join(lines))
        for kind, name in (("arrow", r"\.arrow:6"), ("json", r"a\.json:31")):
            source = opened(tmp_path / f"{kind} {holed}")
            if not holed:
                assert len(lay_out(source, 8, long="split", short="pack")) < 50
                say("here", source)
                assert f"here: 50 rows in {len(source.files)} files, 223 tokens of which 221 count" in caplog.text
                continue
            with pytest.raises(DataError, match=name + ": attention_mask .*--short pad"):
                lay_out(source, 8, long="split", short="pack")


def test_flags_that_mean_nothing_to_a_kind_are_refused(tmp_path):
    save(tmp_path)
    with pytest.raises(ConfigError, match="--zipped_data 1 "):
        opened(tmp_path, zipped=True)


def test_random_access_is_exact(tmp_path):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 100, rng.integers(2, 30)).tolist() for _ in range(2500)]
    save(tmp_path, rows, shards=3)
    source = opened(tmp_path)
    for i in rng.integers(0, 2500, 300).tolist():
        assert source.row(i).input_ids.tolist() == rows[i]
