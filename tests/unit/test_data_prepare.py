"""From text to shards and back: no text lost or invented, no document on both sides, the same bytes twice."""

import gzip
import json
import math
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from smp_train.data.index import open_source
from smp_train.data.prepare.cli import MANIFEST, main
from smp_train.data.prepare.documents import find_files, held_out, read_documents
from smp_train.data.prepare.shards import ShardWriter, encode_rows, entropy
from smp_train.data.rows import RowParser
from smp_train.errors import ConfigError, DataError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a folder of 60 documents, each with words of its own, in files of several kinds."""
    folder = tmp_path_factory.mktemp("texts")
    for n in range(30):
        (folder / f"sub{n % 3}").mkdir(exist_ok=True)
        (folder / f"sub{n % 3}" / f"{n}.txt").write_text(document(n))
    lines = [json.dumps({"text": document(n), "url": "x"}) for n in range(30, 60)]
    (folder / "more.jsonl.gz").write_bytes(gzip.compress("\n\n".join(lines).encode()))
    (folder / "left_out.bin").write_bytes(b"\0\1")
    (folder / "sub0" / "blank.txt").write_text(" \n")
    return folder


def document(n):
    return (
        f"<{n}> "
        + "".join(f"é word{n} of document {n}, line {k} <|endoftext|>\n" for k in range(20))
        + f"</{n}>"
    )


def prepare(texts, output, *more):
    flags = [
        "--train_tokenizer",
        "400",
        "--seq-len=32",
        "--rows_per_shard",
        "20",
        "--validation_fraction",
        "0.2",
    ]
    return main(["--input", str(texts), "--output", str(output), *flags, *more])


@pytest.fixture(scope="module")
def made(texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "out"
    assert prepare(texts, output) == 0
    return output


def read_split(folder):
    """Return all tokens of a split, in order, having checked every line with the strict reader."""
    tokens = []
    for path in sorted(folder.glob("*.json*")):
        data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        for line in data.splitlines():
            record = json.loads(line)
            assert list(record) == ["input_ids", "attention_mask"]
            ids, counted = RowParser(400)(line)
            assert counted is None
            tokens.append(ids)
    return np.concatenate(tokens)


def test_text_comes_back_whole_and_on_one_side(made):
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    seen = {}
    for split in ("train", "test"):
        tokens = read_split(made / split)
        ends = np.flatnonzero(tokens == end)
        documents = [
            tokenizer.decode(part[part != end].tolist(), skip_special_tokens=False)
            for part in np.split(tokens, ends + 1)
        ]
        for text in documents[:-1]:
            number = int(text[1 : text.index(">")])
            assert text == document(number)
            seen[number] = split
        # What did not fill the last row is the end of the last document.
        rest = int(documents[-1][1 : documents[-1].index(">")])
        assert document(rest).startswith(documents[-1].rstrip("�"))
        seen[rest] = split
    assert sorted(seen) == list(range(60))
    assert 4 <= sum(split == "test" for split in seen.values()) <= 24


def test_manifest_tells_the_truth(made):
    manifest = json.loads((made / MANIFEST).read_text())
    assert manifest["complete"] is True
    assert manifest["vocab_size"] == Tokenizer.from_file(str(made / "tokenizer.json")).get_vocab_size() <= 400
    for split in ("train", "test"):
        totals = manifest["splits"][split]
        source = open_source(str(made / split), vocab_size=400)
        assert totals["rows"] == len(source) == sum(shard["rows"] for shard in totals["shards"])
        assert totals["tokens"] == source.report()["tokens"] == totals["rows"] * 32
        assert [shard["name"] for shard in totals["shards"]] == [shard.name for shard in source.files]
        assert [shard["bytes"] for shard in totals["shards"]] == [shard.size for shard in source.files]
        assert totals["tokens_dropped"] < 32
    assert sum(manifest["splits"][split]["documents"] for split in ("train", "test")) == 60
    train, test = read_split(made / "train"), read_split(made / "test")
    nats = manifest["unigram_entropy_nats"]
    frequency = np.bincount(train, minlength=400) / train.size
    assert nats["train"] == pytest.approx(-sum(p * math.log(p) for p in frequency if p), rel=1e-9)
    smoothed = (np.bincount(train, minlength=manifest["vocab_size"]) + 1) / (
        train.size + manifest["vocab_size"]
    )
    assert nats["test_under_train"] == pytest.approx(-np.log(smoothed[test]).mean(), rel=1e-9)
    assert nats["test"] < nats["test_under_train"]


def test_same_input_same_bytes(texts, made, tmp_path):
    prepare(texts, tmp_path / "again")
    names = [path.relative_to(made) for path in made.rglob("*") if path.is_file() and ".smp" not in str(path)]
    assert len(names) > 6
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (made / name).read_bytes(), name


def test_a_repeated_call_has_nothing_to_do(texts, made, tmp_path, capsys):
    output = tmp_path / "out"
    shutil.copytree(made, output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert prepare(texts, output) == 0
    assert "already prepared" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    with pytest.raises(ConfigError, match="preparation of other input or flags"):
        prepare(texts, output, "--max_rows", "5")
    assert prepare(texts, output, "--max_rows", "5", "--overwrite", "1") == 0
    assert [path.name for path in (output / "train").glob("*.gz")] == ["train-00000.json.gz"]


def test_an_interrupted_call_is_done_again(texts, made, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(made, output)
    manifest = json.loads((output / MANIFEST).read_text())
    (output / MANIFEST).write_text(json.dumps({**manifest, "complete": False}))
    shutil.copy(output / "train/train-00000.json.gz", output / "train/train-00099.json.gz")
    assert prepare(texts, output) == 0
    assert not (output / "train/train-00099.json.gz").exists()
    assert json.loads((output / MANIFEST).read_text()) == manifest


def test_never_writes_into_what_is_not_its_own(texts, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "train-00000.json.gz").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and was not made by this command"):
        prepare(texts, tmp_path)
    assert (tmp_path / "train" / "train-00000.json.gz").read_text() == "mine"


def test_limits(texts, tmp_path):
    prepare(texts, tmp_path / "out", "--max_rows", "50", "--validation_shards", "1", "--zip", "0")
    train, test = (open_source(str(tmp_path / "out" / split), vocab_size=400) for split in ("train", "test"))
    assert [header.rows for header in train.headers] == [20, 20, 10]
    assert [header.rows for header in test.headers] == [20]
    assert [shard.name for shard in test.files] == ["test-00000.json"]


def test_a_given_tokenizer(texts, made, tmp_path):
    flags = ["--input", str(texts / "sub1"), "--seq_len", "16", "--validation_fraction", "0"]
    main([*flags, "--output", str(tmp_path / "file"), "--tokenizer", str(made / "tokenizer.json")])
    main([*flags, "--output", str(tmp_path / "folder"), "--tokenizer", str(made)])
    first, second = (
        (tmp_path / kind / "train/train-00000.json.gz").read_bytes() for kind in ("file", "folder")
    )
    assert first == second
    assert (tmp_path / "file/tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    for flags_more, reason in [
        (
            ["--tokenizer", str(made), "--eos_token", "<nope>"],
            "--eos_token <nope>: the tokenizer has no such token",
        ),
        (["--tokenizer", str(tmp_path / "gone.json")], "gone.json: cannot be loaded"),
        (["--train_tokenizer", "100"], "--train_tokenizer 100"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            main([*flags, "--output", str(tmp_path / "bad"), *flags_more, "--overwrite", "1"])


def test_transformers_loads_the_folder(made):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer.decode(tokenizer("naïve é")["input_ids"]) == "naïve é"


@pytest.mark.parametrize(
    ("flags", "error", "reason"),
    [
        (["--output", "o"], ConfigError, "required: --input"),
        (["--input", "i", "--output", "o"], ConfigError, "--tokenizer --train_tokenizer is required"),
        (["--nonsense", "1"], ConfigError, "see smp-train prepare --help"),
        (
            ["--input", "/nowhere", "--output", "o", "--train_tokenizer", "400"],
            DataError,
            "/nowhere: no such file",
        ),
        (
            ["--input", __file__, "--output", "o", "--train_tokenizer", "400", "--seq_len", "1"],
            ConfigError,
            "--seq_len 1",
        ),
    ],
)
def test_bad_calls(flags, error, reason):
    with pytest.raises(error, match=reason) as caught:
        main(flags)
    assert "\n" not in str(caught.value)


def test_bad_input(tmp_path):
    flags = ["--output", str(tmp_path / "out"), "--train_tokenizer", "400"]
    folder = tmp_path / "in"
    folder.mkdir()
    with pytest.raises(DataError, match=r"no file that matches \*\.txt"):
        main(["--input", str(folder), *flags])
    (folder / "a.jsonl").write_text('{"text": "good"}\n{"text": 5}\n')
    with pytest.raises(DataError, match=r'a\.jsonl:2: no "text" string'):
        main(["--input", str(folder), *flags])
    (folder / "a.jsonl").write_text('{"text": "good"}\n{"text": "cut')
    with pytest.raises(DataError, match=r"a\.jsonl:2: broken JSON"):
        main(["--input", str(folder), *flags])
    (folder / "a.jsonl").write_text('{"text": "too little"}\n')
    with pytest.raises(DataError, match="too little text for a row of 512"):
        main(["--input", str(folder), *flags])


def test_finding_files(texts, tmp_path):
    found = [name for _, name in find_files([str(texts)], ["1*.txt"], ["sub2", "10.*"])]
    assert sorted(found) == ["sub0/12.txt", "sub0/15.txt", "sub0/18.txt", "sub1/1.txt", "sub1/13.txt", "sub1/16.txt", "sub1/19.txt"]  # fmt: skip  # noqa: E501
    assert find_files([str(texts)], ["1*.txt"], ["sub2", "10.*"]) == find_files(
        [str(texts)], ["1*.txt"], ["sub2", "10.*"]
    )
    latin = tmp_path / "latin.txt"
    latin.write_bytes("naïve".encode("latin-1"))
    assert list(read_documents(latin)) == ["na�ve"]
    assert 0.08 < np.mean([held_out(n, 0.1) for n in range(5000)]) < 0.12


def test_rows_are_carried_from_shard_to_shard(tmp_path):
    writer = ShardWriter(
        tmp_path, "train", seq_len=4, rows_per_shard=2, max_rows=None, vocab_size=99, zipped=False
    )
    for n in range(0, 30, 3):
        writer.add([n, n + 1, n + 2])
    writer.finish()
    lines = b"".join(path.read_bytes() for path in sorted(tmp_path.glob("*.json"))).splitlines()
    assert [token for line in lines for token in json.loads(line)["input_ids"]] == list(range(28))
    assert writer.dropped == 2
    assert [shard["rows"] for shard in writer.shards] == [2, 2, 2, 1]
    assert encode_rows(np.array([[1, 2]])) == b'{"input_ids":[1,2],"attention_mask":[1,1]}\n'


def test_entropy():
    assert entropy(np.array([5, 5, 0])) == pytest.approx(math.log(2))
    assert entropy(np.array([1, 0]), np.array([0, 3])) == pytest.approx(-math.log(1 / 5))


def test_the_committed_sample_is_what_its_manifest_says():
    sample = ROOT / "data/sample"
    manifest = json.loads((sample / MANIFEST).read_text())
    assert (sample / "tokenizer.json").stat().st_size < 100_000
    assert "Python Software Foundation" in (sample / "README.md").read_text()
    for split in ("train", "test"):
        rows = 0
        for shard in manifest["splits"][split]["shards"]:
            lines = gzip.decompress((sample / split / shard["name"]).read_bytes()).splitlines()
            rows += len(lines)
            for line in lines:
                ids, counted = RowParser(manifest["vocab_size"])(line)
                assert (ids.size, counted) == (manifest["seq_len"], None)
        assert rows == manifest["splits"][split]["rows"]


@pytest.mark.slow
def test_the_standard_library_of_python(tmp_path):
    """What `make demo` trains on."""
    stdlib = sysconfig.get_paths()["stdlib"]
    flags = ["--pattern", "*.py", "--exclude", "test*", "site-packages", "idlelib", "lib2to3", "config-*"]
    flags += [
        "--train_tokenizer",
        "4096",
        "--seq_len",
        "512",
        "--rows_per_shard",
        "128",
        "--max_rows",
        "1280",
    ]
    main(["--input", stdlib, "--output", str(tmp_path / "out"), "--validation_shards", "1", *flags])
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["splits"]["train"]["rows"] == 1280
    assert manifest["splits"]["test"]["rows"] == 128
    assert manifest["vocab_size"] == 4096
    assert 5 < manifest["unigram_entropy_nats"]["test_under_train"] < 8, sys.version
