"""A preparation is held against its manifest when it is opened: in a folder and in S3."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from smp_train.data.cli import main
from smp_train.data.files import list_files
from smp_train.errors import DataError

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "sample"


@pytest.fixture
def made(tmp_path):
    # Other tests train on the sample meanwhile: files in the cache beside it come and go.
    return Path(shutil.copytree(SAMPLE, tmp_path / "made", ignore=shutil.ignore_patterns(".smp*")))


@pytest.fixture(params=["folder", "s3"])
def place(request, made, monkeypatch):
    """Return a function that gives the preparation, as it is now, its place."""
    if request.param == "folder":
        yield lambda: str(made)
        return
    pytest.importorskip("moto.server")
    from tests import s3_server

    with s3_server.serving() as server:
        bucket = s3_server.bucket(server, monkeypatch, request.node.nodeid)

        def put():
            from smp_train.storage.client import client

            for path in made.rglob("*.*"):
                key = f"made/{path.relative_to(made)}"
                client().put_object(Bucket=bucket.removeprefix("s3://"), Key=key, Body=path.read_bytes())
            return f"{bucket}/made"

        yield put


def shard(made, number):
    return made / "train" / f"train-{number:05}.json.gz"


def missing(made):
    shard(made, 1).unlink()
    return "train-00001.json.gz"


def foreign(made):
    (made / "train" / "more.jsonl").write_bytes(gzip.decompress(shard(made, 0).read_bytes()))
    return "more.jsonl"


def changed(made):
    content = gzip.decompress(shard(made, 2).read_bytes())
    shard(made, 2).write_bytes(gzip.compress(content[: content.index(b"\n") + 1]))
    return "train-00002.json.gz"


@pytest.mark.parametrize("change", [missing, foreign, changed])
def test_other_shards_than_listed(change, made, place, tmp_path, capsys):
    named = change(made)
    folder = place() + "/train"
    with pytest.raises(DataError, match=rf"made/train: .*{named} "):
        list_files(folder)
    assert main(["verify", folder]) == 3
    assert named in capsys.readouterr().out
    list_files(place() + "/test")


def test_a_folder_as_listed(place, tmp_path):
    for split in ("train", "test"):
        list_files(f"{place()}/{split}")
    assert main(["verify", f"{place()}/train/"]) == 0


def test_the_folder_above_the_splits_is_read_for_its_split(made, place):
    missing(made)
    assert [file.name for file in list_files(place(), split="test").files] == ["test-00000.json.gz"]
    with pytest.raises(DataError, match="train-00001"):
        list_files(place())


def test_without_a_manifest_or_with_another_programs(made):
    for text in ('{"splits": [1]}', "[]", "{", '{"splits": {"train": {"shards": [{"name": "x"}]}}}'):
        (made / "_manifest.json").write_text(text)
        list_files(str(made / "train"))
    (made / "_manifest.json").unlink()
    foreign(made)
    list_files(str(made / "train"))


def test_one_shard_of_a_preparation_is_read_alone(made):
    missing(made)
    list_files(str(shard(made, 0)))


def test_an_unfinished_preparation(made):
    text = json.dumps({"made_by": "smp-train prepare", "complete": False, "request": {}})
    (made / "_manifest.json").write_text(text)
    with pytest.raises(DataError, match=r"_manifest\.json: .*smp-train prepare"):
        list_files(str(made / "train"))
