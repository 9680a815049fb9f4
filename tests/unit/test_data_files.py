"""The files of a location, in a folder or on the hub: what is listed, left out with a warning, or refused."""

from __future__ import annotations

import gzip
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from smp_train.data import hub
from smp_train.data.files import (
    HELD_OUT,
    DataFile,
    FileSet,
    Selection,
    check_local_files,
    list_files,
    list_held_out,
    list_sources,
)
from smp_train.data.kinds import TEXTS, TOKENS
from smp_train.data.readers import records
from smp_train.distributed import detect
from smp_train.errors import DataError
from tests.chats import chat, write_lines

ROW = b'{"input_ids": [1, 2], "attention_mask": [1, 1]}\n'
TEXT = b'{"text": "one"}\n'


def put(folder: Path, *names: str, content: bytes = ROW) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def names(location: Path | str, selection: Selection | None = None, **options: Any) -> list[str]:
    return [file.name for file in list_files(str(location), selection, **options).files]


def refuses(location: Path | str, *parts: Any, error: type[Exception] = DataError, **options: Any) -> None:
    with pytest.raises(error) as caught:
        list_files(str(location), Selection(**options))
    for part in parts:
        assert str(part) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- in a folder


def test_files_by_name_with_all_folders_below(tmp_path, caplog):
    rows = ["10.json", "9.jsonl.gz", "a.JSONL", "b.json.gz", "é ü.json", "c.ndjson", "sub/deep/d.json"]
    put(tmp_path, *reversed(rows), ".hidden.json", "_manifest.json", "_SUCCESS", "_temporary/x.json", ".cache/y.json")
    put(tmp_path, "notes.txt", "e.json.tmp", "f.json.zst", "page.html", "table.csv", "more/table.CSV")
    put(tmp_path, "tokenizer.json", "config.json", "dataset_info.json", content=b"{}")
    fileset = list_files(str(tmp_path))
    assert [file.name for file in fileset.files] == sorted(rows)
    assert fileset.kind == TOKENS
    assert all(file.path == f"{tmp_path}/{file.name}" for file in fileset.files)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    for part in (str(tmp_path), "e.json.tmp", "f.json.zst", "more/table.CSV", "notes.txt", "page.html and 1 more"):
        assert part in warnings[0]
    assert names(tmp_path / "a.JSONL") == ["a.JSONL"], "one file"


def test_paths_are_absolute(tmp_path, monkeypatch):
    """All ranks read the files that rank 0 listed, in whatever folder they were started."""
    put(tmp_path, "d/a.json")
    monkeypatch.chdir(tmp_path)
    for location in ("d", "./d/", "d/a.json"):
        assert [file.path for file in list_files(location).files] == [f"{tmp_path}/d/a.json"]


def test_nothing_to_read(tmp_path):
    refuses(tmp_path / "missing", "missing: no such file or folder", "--training_dir")
    refuses(tmp_path, tmp_path, "no file that matches", "*.json.gz", "--dataset", flag="--dataset")
    put(tmp_path, "a.csv", "b.tsv", "c.html")
    refuses(tmp_path, "not read: a.csv, b.tsv, c.html; ", "JSON lines")
    refuses("s3://", "s3://: names no bucket", "s3://bucket/prefix")
    put(tmp_path, "d/x.json", content=b"\n\n")
    refuses(tmp_path / "d", "x.json: no record")


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.html", "a.pdf", "a.jsonl.zst", "a.tok", "a.idx"])
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path, name):
    put(tmp_path, name, content=b"a,b\n1,2\n")
    refuses(tmp_path / name, name, "not read", "JSON lines")
    refuses(tmp_path, "not read", patterns=["*"])


def test_a_file_of_another_name_is_text(tmp_path):
    put(tmp_path, "LICENSE", content=b"free")
    (file,) = list_files(str(tmp_path / "LICENSE")).files
    assert (file.kind, [record for _, _, record in records(file)]) == ("text", ["free"])


def test_unusable_files(tmp_path):
    put(tmp_path, "a.json")
    (tmp_path / "b.json").touch()
    refuses(tmp_path, tmp_path / "b.json", "is empty (0 bytes)")
    (tmp_path / "b.json").unlink()
    (tmp_path / "b.json.gz").symlink_to(tmp_path / "gone")
    refuses(tmp_path, tmp_path / "b.json.gz", "cannot be read (No such file or directory)")
    (tmp_path / "b.json.gz").unlink()
    os.mkfifo(tmp_path / "b.json")
    refuses(tmp_path, "b.json: is not a regular file")
    (tmp_path / "b.json").unlink()
    (tmp_path / "circle").symlink_to(tmp_path)
    assert names(tmp_path) == ["a.json"], "a link to a folder above is not followed"


def test_empty_texts_are_left_out(tmp_path, caplog):
    put(tmp_path, "a.txt", content=b"x")
    (tmp_path / "b.txt").touch()
    assert names(tmp_path) == ["a.txt"]
    assert f"{tmp_path}/b.txt: left out, as it is empty" in caplog.text
    refuses(tmp_path / "b.txt", "is empty")


def test_records_that_would_count_twice(tmp_path):
    put(tmp_path, "a.json", "b.json", "b.json.gz")
    refuses(tmp_path, tmp_path / "b.json.gz", f"lies next to {tmp_path}/b.json", "count twice")
    (tmp_path / "b.json.gz").rename(tmp_path / "b.jsonl.gz")
    refuses(tmp_path, "lies next to", "count twice")
    (tmp_path / "b.jsonl.gz").unlink()
    (tmp_path / "c.json").symlink_to(tmp_path / "a.json")
    refuses(tmp_path, tmp_path / "c.json", f"the same file as {tmp_path}/a.json")
    (tmp_path / "c.json").unlink()
    os.link(tmp_path / "a.json", tmp_path / "c.json")
    refuses(tmp_path, tmp_path / "c.json", f"the same file as {tmp_path}/a.json")
    (tmp_path / "c.json").unlink()
    with pytest.raises(DataError, match=r"a\.json: is the same file as .*a\.json"):
        list_sources([str(tmp_path), str(tmp_path / "a.json")], Selection(), ranks=detect())
    put(tmp_path / "texts", "a.txt", "a.txt.gz", "a.md", content=b"x")
    refuses(tmp_path / "texts", "a.txt.gz: lies next to")


def test_zipped_flag_checks(tmp_path):
    put(tmp_path, "a.json.gz")
    assert names(tmp_path, Selection(zipped=True)) == ["a.json.gz"]
    refuses(tmp_path, tmp_path / "a.json.gz", "is no plain file", "--zipped_data is 0", zipped=False)
    put(tmp_path / "plain", "b.json")
    put(tmp_path / "texts", "a.txt")
    for name in ("plain", "texts"):
        refuses(tmp_path / name, "is no gzipped file", "--zipped_data is 1", zipped=True)


def test_patterns_and_exclusions(tmp_path):
    put(tmp_path, "a.txt", "sub0/1.py", "sub0/10.py", "sub1/11.py", "sub2/12.py", "sub2/1x.log", content=b"x")
    selection = Selection(patterns=["1*.py", "*.log"], exclude=["sub2", "10.*"])
    assert names(tmp_path, selection) == ["sub0/1.py", "sub1/11.py"]
    assert names(tmp_path, Selection(patterns=["*.log"])) == ["sub2/1x.log"]
    refuses(tmp_path, "no file that matches *.rst", patterns=["*.rst"])


def test_every_json_file_must_hold_records(tmp_path):
    """Except for known files of settings: no shard is lost because its first line is broken."""
    put(tmp_path, "a.jsonl", "b.json", "tokenizer_config.json")
    put(tmp_path, "c.json", content=b"{\n")
    put(tmp_path, "d.json", content=b"\n")
    assert names(tmp_path) == ["a.jsonl", "b.json", "c.json", "d.json"]


def test_texts_next_to_other_records(tmp_path, caplog):
    put(tmp_path, "a.jsonl", "README.md", "picture.png", content=TEXT)
    assert names(tmp_path) == ["README.md", "a.jsonl"], "both are text"
    assert caplog.text == "", "nobody forgot to convert a picture"
    write_lines(tmp_path / "a.jsonl", [{"messages": chat(1)}])
    assert names(tmp_path) == ["a.jsonl"]
    assert "README.md" in caplog.text


# --- splits


def held_out(location: Path | str) -> list[str] | None:
    fileset = list_held_out(str(location))
    return fileset and [f"{Path(fileset.location).name}/{file.name}" for file in fileset.files]


def test_a_folder_of_splits(tmp_path):
    """As prepare writes it, or anybody."""
    put(tmp_path, "train/a.json", "train/sub/b.json", "test/c.json", "tokenizer.json", "_manifest.json", "README.md")
    assert names(tmp_path) == ["a.json", "sub/b.json"]
    assert list_files(str(tmp_path)).files[0].path == f"{tmp_path}/train/a.json"
    assert held_out(tmp_path) == ["test/c.json"]
    put(tmp_path, "validation/d.json")
    assert held_out(tmp_path) == ["validation/d.json"]
    assert names(tmp_path, split=HELD_OUT) == ["d.json"], "as --test_dir"
    assert names(tmp_path / "train", split=HELD_OUT) == ["a.json", "sub/b.json"], "a folder without splits"
    assert held_out(tmp_path / "train") is None
    put(tmp_path, "e.json")
    assert len(names(tmp_path)) == 5, "with files at the top it is a folder like any other"
    assert held_out(tmp_path) is None


def test_data_sets_that_save_to_disk_wrote(tmp_path):
    datasets = pytest.importorskip("datasets")
    texts = datasets.Dataset.from_dict({"id": list(range(50)), "text": [f"text {n}" for n in range(50)]})
    texts.save_to_disk(str(tmp_path / "d"), num_shards=2)
    put(tmp_path / "d", "cache-1.arrow")
    fileset = list_files(str(tmp_path / "d"))
    assert (len(fileset.files), fileset.kind) == (2, TEXTS)
    found = [record["text"] for file in fileset.files for _, _, record in records(file)]  # type: ignore[index,call-overload]
    assert found == texts["text"][:]
    parts = {"train": texts.select(range(5)), "validation": texts.select(range(5, 8)), "test": texts.select([9])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "splits"))
    for split, part in parts.items():
        (file,) = list_files(str(tmp_path / "splits"), split=split).files
        assert len(list(records(file))) == len(part)
    assert held_out(tmp_path / "splits") == ["validation/data-00000-of-00001.arrow"]
    datasets.DatasetDict(other=texts).save_to_disk(str(tmp_path / "others"))
    with pytest.raises(DataError, match="others: has no split train; it has other"):
        list_files(str(tmp_path / "others"))


def change_state(folder: Path, **fields: Any) -> None:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, **fields}))


DAMAGED = {
    "a file is gone": lambda folder: next(folder.glob("*.arrow")).unlink(),
    "a file elsewhere": lambda folder: change_state(folder, _data_files=[{"filename": "/tmp/a.arrow"}]),
    "rows in another order": lambda folder: change_state(folder, _indices_data_files=[{"filename": "i.arrow"}]),
    "no file": lambda folder: change_state(folder, _data_files=[]),
    "broken": lambda folder: (folder / "state.json").write_text("{"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_data_sets(tmp_path, damage):
    pytest.importorskip("datasets").Dataset.from_dict({"text": ["a"]}).save_to_disk(str(tmp_path / "d"))
    put(tmp_path, "a.arrow")
    DAMAGED[damage](tmp_path / "d")
    refuses(tmp_path / "d", tmp_path / "d", "save it again with save_to_disk")


# --- other nodes


def test_the_files_of_this_node(tmp_path):
    put(tmp_path, "a.json", "b.json")
    files = list_files(str(tmp_path)).files
    check_local_files([*files, DataFile("s3://b/k", "k", 1, "", "lines"), DataFile("hub", "h", 0, "", "hub")])
    (tmp_path / "b.json").write_bytes(ROW + ROW)
    with pytest.raises(DataError, match=r"b\.json: has 96 bytes on this node and 48 on rank 0's"):
        check_local_files(files)
    (tmp_path / "b.json").unlink()
    with pytest.raises(DataError, match=r"b\.json: is missing on this node; give each node all files"):
        check_local_files(files)


# --- on the hub


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """Let a folder with three shards stand for the data set ``acme/words`` of the hub."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "hub"
    for shard in range(3):
        texts = "".join(json.dumps({"text": f"text {n}", "id": n}) + "\n" for n in range(40 * shard, 40 * shard + 40))
        put(folder, f"train-{shard}.jsonl", content=texts.encode())
    put(folder, "validation.jsonl", content=b'{"text": "held out"}\n')
    load = datasets.load_dataset_builder

    def from_folder(name, config, **options):
        # Releases that run code of data sets must be told not to; others have no such option.
        known = "trust_remote_code" in inspect.signature(load).parameters
        assert options.get("trust_remote_code") is (False if known else None)
        if name != "acme/words":
            raise FileNotFoundError(f"Dataset '{name}'\ndoesn't exist on the Hub")
        return load(str(folder), config, **options)

    from_folder.__signature__ = inspect.signature(load)
    monkeypatch.setattr(datasets, "load_dataset_builder", from_folder)
    hub.open_splits.cache_clear()
    yield folder
    hub.open_splits.cache_clear()


def texts_of(fileset: FileSet | None) -> list[str]:
    assert fileset is not None
    return [record["text"] for file in fileset.files for _, _, record in records(file, ("text",))]  # type: ignore[index,call-overload]


def test_a_data_set_of_the_hub(on_hub):
    fileset = list_files("acme/words")
    assert [file.name for file in fileset.files] == ["train-0", "train-1", "train-2"]
    assert fileset.kind == TEXTS
    assert sorted(texts_of(fileset)) == sorted(f"text {n}" for n in range(120))
    whole = list(records(fileset.files[1], ("text",)))
    assert list(records(fileset.files[1], ("text",), first=10, step=3)) == whole[10::3]
    assert fileset.files[1].at(3) == "acme/words/train-1: row 3"
    assert texts_of(list_held_out("acme/words")) == ["held out"]
    with pytest.raises(DataError, match="acme/words: has no split dev; it has train, validation"):
        list_files("acme/words", split="dev")
    with pytest.raises(
        DataError, match=r"--dataset acme/nothing: is no file or folder here, .* exist on the Hub"
    ) as no:
        list_files("acme/nothing", Selection(flag="--dataset"))
    assert "\n" not in str(no.value)


def test_a_data_set_that_changed_on_the_hub(on_hub):
    (file, *_) = list_files("acme/words").files
    hub.open_splits.cache_clear()
    put(on_hub, "train-3.jsonl", content=TEXT)
    with pytest.raises(DataError, match="acme/words/train-0: has changed on the hub"):
        list(records(file))


def test_an_unreachable_hub_is_not_a_missing_split(on_hub, monkeypatch):
    from smp_train.models.hugging_face import HubUnreachable

    def unreachable(name, config, **options):
        raise HubUnreachable("no such path, and the hub cannot be reached")

    monkeypatch.setattr("datasets.load_dataset_builder", unreachable)
    with pytest.raises(DataError, match="acme/words: no such path, and the hub cannot be reached"):
        list_held_out("acme/words")
