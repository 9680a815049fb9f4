"""Hugging Face data sets on disk and prepared token files, found out by what lies in a folder."""

import json
import os
import shutil

import numpy as np
import pytest

pytest.importorskip("datasets")

from datasets import Dataset, DatasetDict, Features, Sequence, Value

from smp_train.data.formats import ARROW, PREPARED, SHARDS, convert_place, kind_of, open_place
from smp_train.data.index import BESIDE, open_source
from smp_train.data.source import lengths
from smp_train.errors import DataError

ROWS = [[n, n + 1, n + 2] + [7] * (n % 4) for n in range(50)]


def save(folder, rows=ROWS, masks=None, shards=2, **change):
    columns = {"input_ids": rows, "note": ["x"] * len(rows)}
    if masks is not None:
        columns["attention_mask"] = masks
    made = Dataset.from_dict(columns, **change)
    made.save_to_disk(str(folder), num_shards=shards)
    return made


def opened(folder, vocab_size=100, **options):
    convert_place(str(folder), vocab_size=vocab_size, **options)
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
    base = source.row(30).input_ids
    assert not base.flags.writeable, "a view of the file"
    assert not base.flags.owndata
    assert convert_place(str(tmp_path), vocab_size=100) == 0, "checked once"


@pytest.mark.parametrize("kind", ["int32", "uint16", "int64"])
def test_integer_types_and_fixed_lengths(tmp_path, kind):
    features = Features({"input_ids": Sequence(Value(kind), length=3)})
    Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6]]}, features=features).save_to_disk(str(tmp_path))
    assert opened(tmp_path).row(1).input_ids.tolist() == [4, 5, 6]


def test_shuffled_and_filtered_before_saving(tmp_path):
    made = Dataset.from_dict({"input_ids": ROWS}).shuffle(seed=3).select(range(5, 20))
    made.save_to_disk(str(tmp_path / "flat"))
    assert [opened(tmp_path / "flat").row(i).input_ids.tolist() for i in range(15)] == made["input_ids"][:]
    # An older `datasets` keeps the index beside the rows.
    import pyarrow as pa

    save(tmp_path / "kept", shards=1)
    state = json.loads((tmp_path / "kept/state.json").read_text())
    table = pa.table({"indices": pa.array([5, 1, 30], pa.uint64())})
    with pa.OSFile(str(tmp_path / "kept/indices.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "kept/state.json").write_text(json.dumps(state))
    source = opened(tmp_path / "kept")
    assert [source.row(i).input_ids.tolist() for i in range(len(source))] == [ROWS[5], ROWS[1], ROWS[30]]


BAD = {
    "id": ([[1, 2], [3, 100]], None, r"row 2: token id 100 is outside the vocabulary \[0, 100\)"),
    "negative": ([[1, 2], [3, 4], [-1, 4]], None, r"row 3: token id -1 is outside"),
    "single": ([[1, 2], [3]], None, r"row 2: a row of fewer than two tokens"),
    "mask length": ([[1, 2], [3, 4]], [[1, 1], [1]], r"row 2: input_ids and attention_mask differ in length"),
    "mask value": ([[1, 2], [3, 4]], [[1, 1], [1, 2]], r"row 2: attention_mask holds 2; use 0 or 1"),
    "nothing counted": ([[1, 2], [3, 4]], [[1, 1], [1, 0]], r"row 2: attention_mask counts no token"),
    "floats": ([[1.5, 2.0]], None, r"column input_ids is list<.*lists of integers are needed"),
    "null": ([[1, 2], None], None, r"column input_ids has empty places \(null\)"),
    "text": (["a b"], None, r"column input_ids is string"),
}


@pytest.mark.parametrize(("rows", "masks", "message"), BAD.values(), ids=BAD)
def test_bad_columns_are_named(tmp_path, rows, masks, message):
    save(tmp_path, rows, masks, shards=1)
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow: " + message):
        opened(tmp_path)


def test_what_is_no_data_set(tmp_path):
    Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(DataError, match=r"no column input_ids \(it has text\); .*smp-train prepare"):
        opened(tmp_path / "text")
    DatasetDict(train=Dataset.from_dict({"input_ids": ROWS})).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match=r"holds the splits train; give the folder of one"):
        opened(tmp_path / "splits")
    save(tmp_path / "cut")
    path = next((tmp_path / "cut").glob("*.arrow"))
    os.truncate(path, 300)
    with pytest.raises(DataError, match=r"\.arrow: not a whole Arrow file"):
        opened(tmp_path / "cut")
    path.unlink()
    with pytest.raises(DataError, match=r"not a whole data set"):
        opened(tmp_path / "cut")
    (tmp_path / "json").mkdir()
    (tmp_path / "json/a.json").write_text('{"input_ids": [1, 2]}\n')
    assert kind_of(str(tmp_path / "json")) == SHARDS
    with pytest.raises(DataError, match="--dataset_type hf, but save_to_disk did not write this"):
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
    with pytest.raises(DataError, match=r"made for a vocabulary of 100, the model has 50"):
        opened(tmp_path / "tokens", vocab_size=50)
    one = next((tmp_path / "tokens").glob("1.json*.idx"))
    shutil.copy(one, tmp_path / "tokens/other.idx")
    shutil.copy(str(one)[:-4] + ".tok", tmp_path / "tokens/other.tok")
    with pytest.raises(DataError, match=r"holds the same shard, 1\.json; remove one"):
        opened(tmp_path / "tokens")
    (tmp_path / "tokens/other.tok").unlink()
    with pytest.raises(DataError, match=r"other\.idx: is damaged"):
        opened(tmp_path / "tokens")
    (tmp_path / "tokens/x.json").write_text("")
    with pytest.raises(DataError, match=r"holds JSON-lines shards and prepared tokens; keep one kind"):
        opened(tmp_path / "tokens")


def test_random_access_is_exact(tmp_path):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 100, rng.integers(2, 30)).tolist() for _ in range(2500)]
    save(tmp_path, rows, shards=3)
    source = opened(tmp_path)
    for i in rng.integers(0, 2500, 300).tolist():
        assert source.row(i).input_ids.tolist() == rows[i]
