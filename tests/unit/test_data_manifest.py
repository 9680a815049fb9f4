"""A preparation is compared with its manifest when it is listed: in a folder and in S3."""

import gzip
import json
import shutil
from pathlib import Path

import pytest

from smp_train.data.cli import main
from smp_train.data.files import list_files
from smp_train.errors import DataError
from tests.training import SAMPLE


@pytest.fixture
def made(tmp_path):
    # Other tests train on the sample meanwhile: files in its cache come and go.
    return Path(shutil.copytree(SAMPLE, tmp_path / "made", ignore=shutil.ignore_patterns(".smp*")))


def missing(made):
    (made / "train" / "train-00001.json.gz").unlink()
    return "train-00001.json.gz"


def foreign(made):
    content = gzip.decompress((made / "train" / "train-00000.json.gz").read_bytes())
    (made / "train" / "more.jsonl").write_bytes(content)
    return "more.jsonl"


def changed(made):
    path = made / "train" / "train-00002.json.gz"
    content = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(content[: content.index(b"\n") + 1]))
    return path.name


@pytest.mark.parametrize("change", [missing, foreign, changed])
def test_other_files_than_listed(change, made, capsys):
    assert main(["verify", str(made / "train")]) == 0
    name = change(made)
    for location in (made / "train", made):
        with pytest.raises(DataError, match=rf"made/train: .*{name} "):
            list_files(str(location))
    assert main(["verify", str(made / "train")]) == 3
    assert name in capsys.readouterr().out
    assert [file.name for file in list_files(str(made), split="test").files] == ["test-00000.json.gz"]
    list_files(str(made / "train" / "train-00000.json.gz"))  # one file is read alone
    (made / "_manifest.json").unlink()
    list_files(str(made / "train"))


def test_in_s3(made, monkeypatch, request):
    pytest.importorskip("moto.server")
    from tests import s3_server

    with s3_server.serving() as server:
        bucket = s3_server.bucket(server, monkeypatch, request.node.nodeid)
        from smp_train.storage.client import client

        for path in made.rglob("*.*"):
            key = f"made/{path.relative_to(made)}"
            client().put_object(Bucket=bucket.removeprefix("s3://"), Key=key, Body=path.read_bytes())
        assert len(list_files(f"{bucket}/made").files) == 3
        client().delete_object(Bucket=bucket.removeprefix("s3://"), Key="made/train/train-00001.json.gz")
        for location in ("made/train/", "made"):
            with pytest.raises(DataError, match=r"made/train/?: .*train-00001\.json\.gz is missing"):
                list_files(f"{bucket}/{location}")


def test_manifests_of_other_programs_and_of_unfinished_preparations(made):
    for text in ('{"splits": [1]}', "[]", "{", '{"splits": {"train": {"shards": [{"name": "x"}]}}}'):
        (made / "_manifest.json").write_text(text)
        list_files(str(made / "train"))
    (made / "_manifest.json").write_text(json.dumps({"made_by": "smp-train prepare", "complete": False}))
    with pytest.raises(DataError, match=r"_manifest\.json: .*smp-train prepare"):
        list_files(str(made / "train"))
