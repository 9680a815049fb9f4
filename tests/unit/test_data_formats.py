"""Hugging Face data sets on disk and prepared token files, found out by what lies in a folder."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("datasets")

import pyarrow as pa
from datasets import Dataset, DatasetDict, Features, Sequence, Value

from smp_train.data import cli, hf_dataset, targets
from smp_train.data.formats import ARROW, PREPARED, SHARDS, kind_of
from smp_train.data.layout import lay_out
from smp_train.data.open_data import open_place, say
from smp_train.data.source import lengths
from smp_train.data.token_cache import BESIDE
from smp_train.errors import ConfigError, DataError

ROWS = [[n, n + 1, n + 2] + [7] * (n % 4) for n in range(50)]


def save(folder, rows=ROWS, masks=None, shards=2):
    """Save rows with `datasets`; return its files."""
    columns = {"input_ids": rows, "note": ["x"] * len(rows)}
    Dataset.from_dict(columns | ({} if masks is None else {"attention_mask": masks})).save_to_disk(
        str(folder), num_shards=shards
    )
    return sorted(folder.glob("*.arrow"))


def opened(folder, vocab_size=100, **options):
    return open_place(str(folder), vocab_size=vocab_size, **options)


def rows_of(source):
    return [source.row(i).input_ids.tolist() for i in range(len(source))]


def change_state(folder, **fields):
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, **fields}))


def test_rows_of_a_data_set(tmp_path):
    masks = [[1] * len(row) for row in ROWS]
    masks[3] = [0, 1, 1] + [1] * (len(ROWS[3]) - 3)
    masks[9] = [1, 1, 0] + [0] * (len(ROWS[9]) - 3)
    save(tmp_path, masks=masks)
    assert kind_of(str(tmp_path)) == ARROW
    source = opened(tmp_path, dataset_type="hf")
    assert rows_of(source) == ROWS
    assert source.name(26).endswith(".arrow:2")
    assert not source.row(30).input_ids.flags.owndata
    assert str(tmp_path) in Path("/proc/self/maps").read_text(), "a row is a view of the file"
    with pytest.raises(ConfigError, match="--zipped_data 1 "):
        opened(tmp_path, zipped=True)


@pytest.mark.parametrize("kind", ["int32", "uint16", "int64"])
def test_integer_types_and_fixed_lengths(tmp_path, kind):
    features = Features({"input_ids": Sequence(Value(kind), length=3)})
    rows = [[1, 2, 3], [4, 5, 600], [7, 8, 9]]
    Dataset.from_dict({"input_ids": rows}, features=features).save_to_disk(str(tmp_path))
    assert rows_of(opened(tmp_path, vocab_size=601)) == rows
    assert rows_of(opened(tmp_path, max_bad=0.5)) == [rows[0], rows[2]]


def test_what_was_shuffled_and_filtered_before_saving(tmp_path):
    made = Dataset.from_dict({"input_ids": ROWS}).shuffle(seed=3).select(range(5, 45))
    made.save_to_disk(str(tmp_path), num_shards=3)
    assert rows_of(opened(tmp_path)) == made["input_ids"][:]


BAD = {
    "id": ([[1, 2], [3, 100]], None, r"row 2: token id 100 is outside the vocabulary \[0, 100\)"),
    "negative": ([[1, 2], [3, 4], [-1, 4]], None, r"row 3: token id -1 is outside"),
    "single": ([[1, 2], [3]], None, r"row 2: "),
    "mask length": ([[1, 2], [3, 4]], [[1, 1], [1]], r"row 2: input_ids .* attention_mask"),
    "mask value": ([[1, 2], [3, 4]], [[1, 1], [1, 2]], r"row 2: attention_mask.* 2;"),
    "nothing counted": ([[1, 2], [3, 4]], [[1, 1], [1, 0]], r"row 2: attention_mask"),
    "floats": ([[1.5, 2.0]], None, r"column input_ids is list<"),
    "null": ([[1, 2], None], None, r"row 2: input_ids is null"),
    "null in a list": ([[1, 2], [1, None]], None, r"column input_ids .*null"),
    "text": (["a b"], None, r"column input_ids is string"),
}


@pytest.mark.parametrize(("rows", "masks", "message"), BAD.values(), ids=BAD)
def test_bad_columns_are_named(tmp_path, rows, masks, message):
    save(tmp_path, rows, masks, shards=1)
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow: " + message):
        opened(tmp_path)


def cut_between_batches(folder, path):
    whole = path.read_bytes()
    ends = [n for n in range(8, len(whole)) if whole[n : n + 4] == b"\xff\xff\xff\xff"]
    path.write_bytes(whole[: ends[-2]])


def compress(folder, path):
    table = pa.table({"input_ids": [[1, 2, 3] * 1000]})
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table)


def move_out(folder, path, relative):
    path.rename(folder.parent / path.name)
    name = f"../{path.name}" if relative else str(folder.parent / path.name)
    change_state(folder, _data_files=[{"filename": name}])


def forge_offsets(folder, path, offsets):
    written, forged = (np.array(numbers, dtype="<i4").tobytes() for numbers in ([0, 3, 7], offsets))
    assert written in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(written, forged))


DAMAGE = {
    "cut": (lambda folder, path: os.truncate(path, 300), r"\.arrow: "),
    "cut between batches": (cut_between_batches, "not a whole Arrow file"),
    "compressed": (compress, "is compressed; save it again"),
    "gone": (lambda folder, path: path.unlink(), "not a whole data set"),
    "rows in the order of a file of an old `datasets`": (
        lambda folder, path: change_state(folder, _indices_data_files=[{"filename": "i.arrow"}]), "save_to_disk",
    ),
    "a file above": (partial(move_out, relative=True), "outside of the folder"),
    "a file elsewhere": (partial(move_out, relative=False), "outside of the folder"),
    "offsets behind the end": (partial(forge_offsets, offsets=[0, 3, 1 << 30]), r"\.arrow: "),
    "offsets far apart": (partial(forge_offsets, offsets=[0, 30000, 4]), r"\.arrow: "),
    "offsets out of order": (partial(forge_offsets, offsets=[0, 7, 2]), r"\.arrow: "),
    "negative offsets": (partial(forge_offsets, offsets=[-8, 3, 7]), r"\.arrow: "),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_data_sets_are_refused(tmp_path, name):
    damage, message = DAMAGE[name]
    (path,) = save(tmp_path / "set", ROWS * 60, shards=1)
    assert rows_of(opened(tmp_path / "set"))[-50:] == ROWS
    damage(tmp_path / "set", path)
    with pytest.raises(DataError, match=message):
        opened(tmp_path / "set")


def test_what_is_no_data_set(tmp_path):
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(DataError, match=r"input_ids .*text.*smp-train prepare"):
        opened(tmp_path / "text")
    DatasetDict(train=Dataset.from_dict({"input_ids": ROWS})).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="splits train"):
        opened(tmp_path / "splits")
    (tmp_path / "json").mkdir()
    (tmp_path / "json/a.json").write_text('{"input_ids": [1, 2]}\n')
    assert kind_of(str(tmp_path / "json")) == SHARDS
    with pytest.raises(DataError, match=r"--dataset_type hf.*save_to_disk"):
        kind_of(str(tmp_path / "json"), "hf")


def test_columns_beside_and_files_of_other_writers(tmp_path):
    (path,) = save(tmp_path, [[1, 2], [3, 4]], shards=1)
    table = pa.table({"kind": pa.array(["a", "b"]).dictionary_encode(), "input_ids": [[1, 2, 3], [4, 5]]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    assert rows_of(opened(tmp_path)) == [[1, 2, 3], [4, 5]]


def test_lengths_are_of_one_file_at_a_time(tmp_path, monkeypatch):
    """All lengths are one pass over the data, however many files there are."""
    save(tmp_path, masks=[[0] + [1] * (len(row) - 1) for row in ROWS], shards=10)
    source = opened(tmp_path)
    seen = []
    real = targets.attended_spans
    monkeypatch.setattr(targets, "attended_spans", lambda mask, starts: seen.append(len(mask)) or real(mask, starts))
    assert lengths(source).tolist() == [len(row) - 1 for row in ROWS]
    assert seen == [sum(map(len, ROWS[n : n + 5])) for n in range(0, 50, 5)]


def test_bad_rows_are_left_out_and_said(tmp_path, caplog, capsys):
    rows, masks = [list(row) for row in ROWS], [[1] * len(row) for row in ROWS]
    rows[7], rows[31], masks[33] = None, [5, 6, 100], [1] + [0] * (len(ROWS[33]) - 1)
    masks[31] = [1, 1, 1]
    save(tmp_path, rows, masks)
    where = r"data-00000-of-00002\.arrow: row 8: input_ids is null"
    assert cli.main(["verify", str(tmp_path), "--vocab_size", "100"]) == 3
    assert not (tmp_path / BESIDE).exists()
    said = capsys.readouterr().out
    assert [f".arrow: row {row}: " in said for row in (8, 7, 9)] == [True, True, True]
    assert said.endswith(": 47 rows in 2 files, 3 problems\n")
    with pytest.raises(DataError, match=where):
        opened(tmp_path)
    source = opened(tmp_path, max_bad=0.06)
    good = [row for n, row in enumerate(ROWS) if n not in (7, 31, 33)]
    assert rows_of(source) == good
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


def test_files_are_checked_once_unless_what_was_kept_is_damaged_or_of_another_version(tmp_path, monkeypatch):
    save(tmp_path, shards=1)
    opened(tmp_path)
    (kept,) = (tmp_path / BESIDE).glob("*.checked")
    found, written = kept.read_text(), kept.stat().st_mtime_ns
    opened(tmp_path)
    assert kept.stat().st_mtime_ns == written
    for damage in ("", "[]", found[:-9], found.replace('"rows": 50', '"rows": 51')):
        kept.write_text(damage)
        assert len(opened(tmp_path)) == 50
        assert kept.read_text() == found
    monkeypatch.setattr(hf_dataset, "CHECK_VERSION", hf_dataset.CHECK_VERSION + 1)
    assert len(opened(tmp_path)) == 50
    assert kept.read_text() != found


def write_lines(path, lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))


def test_prepared_files_alone(tmp_path):
    for n in range(3):
        write_lines(tmp_path / f"data/{n}.json", [{"input_ids": row} for row in ROWS[n * 10 : n * 10 + 10]])
    first = open_place(str(tmp_path / "data"), vocab_size=100)
    shutil.move(tmp_path / "data" / BESIDE, tmp_path / "tokens")
    shutil.rmtree(tmp_path / "data")
    assert kind_of(str(tmp_path / "tokens")) == PREPARED
    source = opened(tmp_path / "tokens", vocab_size=120)
    assert source.fingerprint == first.fingerprint
    assert rows_of(source) == ROWS[:30]
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


def test_prepared_files_that_lack_lines(tmp_path, caplog, capsys):
    lines = [{"input_ids": row} for row in ROWS]
    write_lines(tmp_path / "data/a.json", [*lines[:2], "{", *lines[3:]])
    open_place(str(tmp_path / "data"), vocab_size=100, max_bad=0.1)
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


@pytest.mark.parametrize("holed", [False, True])
def test_rows_with_holes_are_not_packed(tmp_path, caplog, holed):
    """Refused before the first step, not where such a row comes up."""
    caplog.set_level("INFO")
    masks = [[1] * len(row) for row in ROWS]
    masks[3][0] = masks[4][2] = 0
    if holed:
        masks[30][1] = 0
    save(tmp_path / "arrow", masks=masks)
    rows = [{"input_ids": ids, "attention_mask": mask} for ids, mask in zip(ROWS, masks, strict=True)]
    write_lines(tmp_path / "json/a.json", rows)
    for kind, name in (("arrow", r"\.arrow:6"), ("json", r"a\.json:31")):
        source = opened(tmp_path / kind)
        if holed:
            with pytest.raises(DataError, match=name + ": attention_mask .*--short pad"):
                lay_out(source, 8, long="split", short="pack")
        else:
            assert len(lay_out(source, 8, long="split", short="pack")) < 50
            say("here", source)
            assert f"here: 50 rows in {len(source.files)} files, 223 tokens of which 221 count" in caplog.text
