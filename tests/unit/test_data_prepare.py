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

from smp_train.cli import main as cli
from smp_train.data.open_data import open_place as open_source
from smp_train.data.prepare import pipeline
from smp_train.data.prepare import tokenizer as tokenizers
from smp_train.data.prepare.cli import MANIFEST, main
from smp_train.data.prepare.documents import Place, held_out
from smp_train.data.prepare.pipeline import PROGRESS
from smp_train.data.prepare.shards import Packer, entropy
from smp_train.data.prepare.writing import encode_rows, write_block
from smp_train.data.rows import RowParser
from smp_train.data.text.files import find_files
from smp_train.data.text.read import documents
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
            ids, counted, *_ = RowParser(400)(line)
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
    other = tokenizers.train(["another"], 300)
    other.save(str(tmp_path / "t.json"))
    main([*flags, "--output", str(tmp_path / "own"), "--tokenizer", str(tmp_path / "t.json")])
    shutil.copy(made / "tokenizer.json", tmp_path / "t.json")
    with pytest.raises(ConfigError, match="other input or flags"):
        main([*flags, "--output", str(tmp_path / "own"), "--tokenizer", str(tmp_path / "t.json")])
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
    with pytest.raises(DataError, match=r"\*\.txt.*--input .*--pattern"):
        main(["--input", str(folder), *flags])
    (folder / "a.jsonl").write_text('{"text": "good"}\n{"text": 5}\n')
    with pytest.raises(DataError, match=r'a\.jsonl:2: .*"text"'):
        main(["--input", str(folder), *flags])
    (folder / "a.jsonl").write_text('{"text": "good"}\n{"text": "cut')
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        main(["--input", str(folder), *flags])
    (folder / "a.jsonl").write_text('{"text": "too little"}\n')
    with pytest.raises(DataError, match="512"):
        main(["--input", str(folder), *flags])


def test_finding_files(texts, tmp_path):
    found = [file.name for file in find_files([str(texts)], ["1*.txt"], ["sub2", "10.*"])]
    assert sorted(found) == ["sub0/12.txt", "sub0/15.txt", "sub0/18.txt", "sub1/1.txt", "sub1/13.txt", "sub1/16.txt", "sub1/19.txt"]  # fmt: skip  # noqa: E501
    assert find_files([str(texts)], ["1*.txt"], ["sub2", "10.*"]) == find_files(
        [str(texts)], ["1*.txt"], ["sub2", "10.*"]
    )
    latin = tmp_path / "latin.txt"
    latin.write_bytes("naïve".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt: byte 2 "):
        list(documents(find_files([str(latin)])[0]))
    assert 0.08 < np.mean([held_out(n, 0.1) for n in range(5000)]) < 0.12


def test_rows_are_carried_from_shard_to_shard(tmp_path):
    blocks = []
    packer = Packer(
        lambda block, done: blocks.append((block, done)), seq_len=4, rows_per_shard=2, max_rows=None, vocab_size=99
    )
    for n in range(10):
        packer.add(Place(0, n, n), np.arange(3 * n, 3 * n + 3, dtype=np.uint32))
    packer.finish()
    assert np.concatenate([block.ravel() for block, _ in blocks]).tolist() == list(range(28))
    assert packer.dropped == 2
    assert [len(block) for block, _ in blocks] == [2, 2, 2, 1]
    assert [(done.place.number, done.offset, done.documents) for _, done in blocks] == [
        (2, 2, 2), (5, 1, 5), (8, 0, 8), (9, 1, 9),
    ]  # fmt: skip
    assert encode_rows(np.array([[1, 2]])) == b'{"input_ids":[1,2],"attention_mask":[1,1]}\n'


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [1, 3, 7])
@pytest.mark.parametrize("limits", [[], ["--max_rows", "150", "--validation_shards", "1"]])
def test_goes_on_where_it_was_killed(texts, made, tmp_path, monkeypatch, at, limits):
    """Each finished shard is kept, and the end is byte for byte that of a run which nothing interrupted."""
    monkeypatch.setattr(pipeline, "SAVE_SECONDS", 0)
    monkeypatch.setattr(pipeline, "BATCH_CHARACTERS", 2000)
    whole, output = made, tmp_path / "out"
    if limits:
        whole = tmp_path / "whole"
        prepare(texts, whole, *limits)
    calls = []

    def failing(*given):
        calls.append(given[2])
        if len(calls) == at + 1:
            raise Killed
        return write_block(*given)

    monkeypatch.setattr(pipeline, "write_block", failing)
    with pytest.raises(Killed):
        prepare(texts, output, *limits)
    done = pipeline.read_progress(output)
    assert sum(len(one.shards) for one in done.values()) == at
    (output / "train" / ".train-00009.json.gz.x.tmp").write_text("left by the kill")
    again = calls[:]
    calls.clear()
    monkeypatch.setattr(pipeline, "write_block", lambda *given: calls.append(given[2]) or write_block(*given))
    assert prepare(texts, output, *limits) == 0
    assert not set(calls) & set(again[:at]), "no finished shard is written again"
    assert not (output / PROGRESS).exists()
    names = {path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and ".smp" not in str(path)}
    assert names == {path.relative_to(output) for path in output.rglob("*") if path.is_file()}
    for name in names:
        assert (output / name).read_bytes() == (whole / name).read_bytes(), name


def test_progress_of_damaged_shards_is_not_believed(texts, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "SAVE_SECONDS", 0)
    prepare(texts, tmp_path / "out", "--max_rows", "60")
    assert pipeline.read_progress(tmp_path)["train"].rows == 0
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    done = {
        split: {"place": [0, 5, 5], "documents": 5, "rows": 20, "shards": totals["shards"][:1]}
        for split, totals in manifest["splits"].items()
    }
    (tmp_path / "out" / PROGRESS).write_text(json.dumps(done))
    assert pipeline.read_progress(tmp_path / "out")["train"].rows == 20
    (tmp_path / "out" / "train" / "train-00000.json.gz").write_bytes(b"cut")
    assert pipeline.read_progress(tmp_path / "out")["train"].rows == 0


@pytest.mark.slow
def test_token_files_of_another_version_are_made_again(texts, tmp_path, monkeypatch):
    """Neither taken for what training reads now, nor continued, which would mix the two."""
    from smp_train.data import token_file

    assert prepare(texts, tmp_path / "out", "--output_type", "cache") == 0
    monkeypatch.setattr(token_file, "VERSION", token_file.VERSION + 1)
    with pytest.raises(ConfigError, match=r"of another version; give another folder, or --overwrite 1"):
        prepare(texts, tmp_path / "out", "--output_type", "cache")
    assert prepare(texts, tmp_path / "out", "--output_type", "cache", "--overwrite", "1") == 0


def test_processes_write_the_same_bytes(texts, made, tmp_path):
    assert prepare(texts, tmp_path / "out", "--processes", "2") == 0
    for name in [path.relative_to(made) for path in made.rglob("*") if path.is_file() and ".smp" not in str(path)]:
        assert (tmp_path / "out" / name).read_bytes() == (made / name).read_bytes(), name


@pytest.mark.parametrize("kind", ["cache", "arrow"])
def test_other_kinds_of_output_are_the_same_rows(texts, made, tmp_path, kind):
    from smp_train.data.open_data import open_place
    from smp_train.data.survey import look

    output = tmp_path / "out"
    assert prepare(texts, output, "--output_type", kind) == 0
    for split in ("train", "test"):
        place = {"vocab_size": 400, "cache_dir": str(tmp_path / "cache")}
        found = open_place(str(output / split), **place)
        wanted = open_source(str(made / split), vocab_size=400)
        assert len(found) == len(wanted)
        assert all(
            np.array_equal(found.row(n).input_ids, wanted.row(n).input_ids) and found.row(n).counted is None
            for n in range(len(wanted))
        )
        assert not look(str(output / split), 400, str(tmp_path / "cache")).problems
    if kind == "arrow":
        datasets = pytest.importorskip("datasets")
        loaded = datasets.load_from_disk(str(output / "train"))
        train = open_source(str(made / "train"), vocab_size=400)
        assert len(loaded) == len(train)
        assert loaded[3]["input_ids"] == train.row(3).input_ids.tolist()
    assert "already prepared" not in str(prepare(texts, output, "--output_type", kind))


def test_parquet_and_columns(texts, made, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"body": [document(n) for n in range(40)]}), tmp_path / "a.parquet")
    flags = ["--tokenizer", str(made), "--seq_len", "32", "--validation_fraction", "0"]
    main(["--input", str(tmp_path / "a.parquet"), "--output", str(tmp_path / "out"), "--text_column", "body", *flags])
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    wanted = [token for n in range(40) for token in [*tokenizer.encode(document(n)).ids, 0]]
    assert read_split(tmp_path / "out" / "train").tolist() == wanted[: len(wanted) // 32 * 32]
    with pytest.raises(DataError, match=r"a\.parquet: .*text.*body.*--text_column"):
        main(["--input", str(tmp_path / "a.parquet"), "--output", str(tmp_path / "no"), *flags])


def test_options_of_the_trained_tokenizer(texts, tmp_path):
    prepare(texts, tmp_path / "out", "--special_tokens", "<user>", "<bot>", "--min_frequency", "5")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("<user>hello").tokens[0] == "<user>"
    with pytest.raises(ConfigError, match=r"--special_tokens .*--train_tokenizer"):
        main(["--input", str(texts), "--output", "o", "--tokenizer", "t", "--special_tokens", "<x>"])
    flags = ["--train_tokenizer", "258", "--special_tokens", "<a>", "<b>"]
    with pytest.raises(ConfigError, match="259"):
        main(["--input", str(texts), "--output", str(tmp_path / "o"), *flags])


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
                ids, counted, *_ = RowParser(manifest["vocab_size"])(line)
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


def test_goes_on_behind_a_malformed_document(made, tmp_path, monkeypatch):
    """With --bad_rows skip, a preparation that one has stopped keeps its shards, and ends like a new one."""
    monkeypatch.setattr(pipeline, "SAVE_SECONDS", 0)
    monkeypatch.setattr(pipeline, "BATCH_CHARACTERS", 2000)
    text = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": document(number)}) for number in range(60)]
    text.write_text("\n".join([*lines[:50], "broken", *lines[50:]]))
    words = ["--input", str(text), "--tokenizer", str(made / "tokenizer.json"), "--eos_token", "<|endoftext|>",
             "--seq_len", "16", "--rows_per_shard", "8"]  # fmt: skip
    assert cli(["prepare", *words, "--output", str(tmp_path / "out")]) == 3
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "train").iterdir()}
    assert made
    assert main([*words, "--output", str(tmp_path / "out"), "--bad_rows", "skip"]) == 0
    done = [path for path, at in made.items() if path.stat().st_mtime_ns == at]
    assert done, "shards that were finished are kept"
    assert main([*words, "--output", str(tmp_path / "new"), "--bad_rows", "skip"]) == 0
    for split in ("train", "test"):
        assert (read_split(tmp_path / "out" / split) == read_split(tmp_path / "new" / split)).all()


def test_malformed_documents_are_left_out_when_asked(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        (folder / f"{number}.txt").write_text(document(number))
    words = ["--input", str(folder), "--train_tokenizer", "300", "--seq_len", "16", "--validation_fraction", "0"]
    assert main([*words, "--output", str(tmp_path / "good")]) == 0
    (folder / "latin.txt").write_bytes(b"caf\xe9")
    assert cli(["prepare", *words, "--output", str(tmp_path / "out")]) == 3
    assert "latin.txt: byte 3 is not UTF-8" in capsys.readouterr().err
    assert main([*words, "--output", str(tmp_path / "out"), "--bad_rows", "skip"]) == 0
    assert (read_split(tmp_path / "out" / "train") == read_split(tmp_path / "good" / "train")).all()
