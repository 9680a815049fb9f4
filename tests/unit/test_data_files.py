"""The files of a location, in a folder or on the hub: what is listed, left out or refused; manifests."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from smp_train.data import hub
from smp_train.data.cli import main
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
from tests.training import SAMPLE

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


TWICE = "the same file as"
REFUSED: dict[str, tuple[list[str], dict[str, Any], tuple[str, ...]]] = {
    "missing": ([], {"below": "missing"}, ("missing: no such file or folder", "--training_dir")),
    "empty folder": ([], {"flag": "--dataset"}, ("no file that matches", "*.json.gz", "--dataset")),
    "no records": (["a.csv", "b.html"], {}, ("not read: a.csv, b.html; ", "JSON lines")),
    "no text": (["a.csv"], {"below": "a.csv"}, ("a.csv", "not read", "JSON lines")),
    "zst": (["a.jsonl.zst"], {"below": "a.jsonl.zst"}, ("a.jsonl.zst", "not read")),
    "ours": (["a.tok"], {"patterns": ["*"]}, ("not read",)),
    "no match": (["a.txt"], {"patterns": ["*.rst"]}, ("no file that matches *.rst",)),
    "blank": (["blank x.json"], {}, ("x.json: no record",)),
    "0 bytes": (["a.json", "empty b.json"], {}, ("b.json: is empty (0 bytes)",)),
    "no link": (["a.json", "dangling b.json.gz"], {}, ("b.json.gz: cannot be read (No such file or directory)",)),
    "a pipe": (["a.json", "pipe b.json"], {}, ("b.json: is not a regular file",)),
    "gzipped copy": (["b.json", "b.json.gz"], {}, ("b.json.gz: lies next to", "b.json", "count twice")),
    "another ending": (["b.json", "b.jsonl.gz"], {}, ("lies next to", "count twice")),
    "texts": (["a.txt", "a.txt.gz", "a.md"], {}, ("a.txt.gz: lies next to",)),
    "a link": (["a.json", "linked c.json"], {}, ("c.json: ", TWICE, "a.json")),
    "a hard link": (["a.json", "hard c.json"], {}, ("c.json: ", TWICE, "a.json")),
    "zipped": (["a.json.gz"], {"zipped": False}, ("a.json.gz: is no plain file", "--zipped_data is 0")),
    "not zipped": (["a.json"], {"zipped": True}, ("is no gzipped file", "--zipped_data is 1")),
    "no zipped text": (["a.txt"], {"zipped": True}, ("is no gzipped file", "--zipped_data is 1")),
}  # fmt: skip
MAKE: dict[str, Callable[[Path], object]] = {
    "blank": lambda path: path.write_bytes(b"\n\n"), "empty": lambda path: path.touch(),
    "dangling": lambda path: path.symlink_to("gone"), "pipe": os.mkfifo,
    "linked": lambda path: path.symlink_to("a.json"), "hard": lambda path: os.link(path.with_name("a.json"), path),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path, case):
    files, options, parts = REFUSED[case]
    for kind, _, name in (name.rpartition(" ") for name in files):
        MAKE[kind](tmp_path / name) if kind else put(tmp_path, name)
    refuses(tmp_path / options.pop("below", ""), tmp_path, *parts, **options)


def test_one_file_in_two_locations_is_refused(tmp_path):
    put(tmp_path, "a.json")
    (tmp_path / "circle").symlink_to(tmp_path)
    assert names(tmp_path) == ["a.json"], "a link to a folder above is not followed"
    with pytest.raises(DataError, match=r"a\.json: is the same file as .*a\.json"):
        list_sources([str(tmp_path), str(tmp_path / "a.json")], Selection(), ranks=detect())
    with pytest.raises(DataError, match="names no bucket; write s3://bucket/prefix"):
        list_files("s3://")


def test_empty_texts_are_left_out(tmp_path, caplog):
    put(tmp_path, "a.txt", content=b"x")
    (tmp_path / "b.txt").touch()
    assert names(tmp_path) == ["a.txt"]
    assert f"{tmp_path}/b.txt: left out, as it is empty" in caplog.text
    refuses(tmp_path / "b.txt", "is empty")


def test_patterns_and_exclusions(tmp_path):
    put(tmp_path, "a.txt", "sub0/1.py", "sub0/10.py", "sub1/11.py", "sub2/12.py", "sub2/1x.log", content=b"x")
    selection = Selection(patterns=["1*.py", "*.log"], exclude=["sub2", "10.*"])
    assert names(tmp_path, selection) == ["sub0/1.py", "sub1/11.py"]
    assert names(tmp_path, Selection(patterns=["*.log"])) == ["sub2/1x.log"]


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
    state = tmp_path / "d" / "state.json"
    for content in ("{", json.dumps({**json.loads(state.read_text()), "_data_files": [{"filename": "/tmp/a.arrow"}]})):
        state.write_text(content)
        refuses(tmp_path / "d", tmp_path / "d", "save it again with save_to_disk")
    datasets.DatasetDict(other=texts).save_to_disk(str(tmp_path / "others"))
    with pytest.raises(DataError, match="others: has no split train; it has other"):
        list_files(str(tmp_path / "others"))


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


@pytest.fixture
def made(tmp_path):
    # Other tests train on the sample meanwhile: files in its cache come and go.
    return Path(shutil.copytree(SAMPLE, tmp_path / "made", ignore=shutil.ignore_patterns(".smp*")))


def rows(path):
    return gzip.decompress(path.read_bytes())


CHANGES = {
    "train-00001.json.gz": lambda path: path.unlink(),
    "more.jsonl": lambda path: path.write_bytes(rows(path.with_name("train-00000.json.gz"))),
    "train-00002.json.gz": lambda path: path.write_bytes(gzip.compress(rows(path).splitlines(keepends=True)[0])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_files_than_listed(name, made, capsys):
    assert main(["verify", str(made / "train")]) == 0
    CHANGES[name](made / "train" / name)
    for location in (made / "train", made):
        with pytest.raises(DataError, match=rf"made/train: .*{name} "):
            list_files(str(location))
    assert main(["verify", str(made / "train")]) == 3
    assert name in capsys.readouterr().out
    assert [file.name for file in list_files(str(made), split="test").files] == ["test-00000.json.gz"]
    list_files(str(made / "train" / "train-00000.json.gz"))  # one file is read alone
    (made / "_manifest.json").unlink()
    list_files(str(made / "train"))


def test_verify_compares_checksums(made, capsys):
    path = made / "train" / "train-00000.json.gz"
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\1" + content[5:])  # the time in gzip's header
    assert main(["verify", str(made / "train")]) == 3
    assert "train-00000.json.gz has another checksum" in capsys.readouterr().out


def test_manifests_of_other_programs_and_of_unfinished_preparations(made):
    for text in ('{"splits": [1]}', "[]", "{", '{"splits": {"train": {"shards": [{"name": "x"}]}}}'):
        (made / "_manifest.json").write_text(text)
        list_files(str(made / "train"))
    (made / "_manifest.json").write_text(json.dumps({"made_by": "smp-train prepare", "complete": False}))
    with pytest.raises(DataError, match=r"_manifest\.json: .*smp-train prepare"):
        list_files(str(made / "train"))
