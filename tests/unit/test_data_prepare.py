"""From text to shards and back: no text lost or invented, no document on both sides, the same bytes twice."""

import gzip
import json
import math
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from smp_train.data import convert
from smp_train.data import tokenizer as tokenizers
from smp_train.data.files import list_files
from smp_train.data.prepare import cli
from smp_train.data.prepare.cli import MANIFEST, SPLITS, main
from smp_train.data.prepare.shards import SplitWriter, is_held_out
from smp_train.data.source import Row
from smp_train.data.token_rows import TokenRecords
from smp_train.errors import ConfigError, DataError
from tests.chats import MARKED, by_transformers, chat, write_lines, write_tokenizer
from tests.shards import opened


def document(n):
    lines = "".join(f"é word{n} of document {n}, line {k} <|endoftext|>\n" for k in range(20))
    return f"<{n}> {lines}</{n}>"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Return a folder of 60 documents, each with different words, in files of several kinds."""
    folder = tmp_path_factory.mktemp("texts")
    for n in range(30):
        (folder / f"sub{n % 3}").mkdir(exist_ok=True)
        (folder / f"sub{n % 3}" / f"{n}.txt").write_text(document(n))
    lines = [json.dumps({"text": document(n), "url": "x"}) for n in range(30, 60)]
    (folder / "more.jsonl.gz").write_bytes(gzip.compress("\n\n".join(lines).encode()))
    (folder / "left_out.bin").write_bytes(b"\0\1")
    (folder / "sub0" / "blank.txt").write_text(" \n")
    return folder


def prepare(texts, output, *more):
    flags = ["--train_tokenizer", "400", "--seq-len=32", "--rows_per_shard", "20", "--validation_fraction", "0.2"]
    return main(["--input", str(texts), "--output", str(output), *flags, *more])


@pytest.fixture(scope="module")
def made(texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("made") / "out"
    assert prepare(texts, output) == 0
    return output


def contents(folder):
    """Return the bytes of all files but token caches by name."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".smp" not in str(path)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def rows_in(folder):
    return opened(folder, 400)


def read_split(folder):
    """Return all tokens of a split, in order, having checked every line with the strict reader."""
    tokens = []
    for path in sorted(folder.glob("*.json*")):
        data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
        for line in data.splitlines():
            assert list(json.loads(line)) == ["input_ids", "attention_mask"]
            (row,) = TokenRecords(400)([line])
            assert isinstance(row, Row)
            assert row.labels is None
            tokens.append(row.input_ids)
    return np.concatenate(tokens)


def test_text_comes_back_whole_and_on_one_side(made):
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    seen = {}
    for split in SPLITS:
        tokens = read_split(made / split)
        parts = np.split(tokens, np.flatnonzero(tokens == end) + 1)
        documents = [tokenizer.decode(part[part != end].tolist(), skip_special_tokens=False) for part in parts]
        numbers = [int(text[1 : text.index(">")]) for text in documents]
        assert documents[:-1] == [document(number) for number in numbers[:-1]]
        # What did not fill the last row is the end of the last document.
        assert document(numbers[-1]).startswith(documents[-1].rstrip("�"))
        seen |= dict.fromkeys(numbers, split)
    assert sorted(seen) == list(range(60))
    assert 4 <= sum(split == "test" for split in seen.values()) <= 24
    assert 0.08 < np.mean([is_held_out(f"a:{n}", 0.1) for n in range(5000)]) < 0.12


def test_manifest_tells_the_truth(made):
    manifest = json.loads((made / MANIFEST).read_text())
    assert manifest["complete"] is True
    assert manifest["vocab_size"] == Tokenizer.from_file(str(made / "tokenizer.json")).get_vocab_size() <= 400
    for split in SPLITS:
        totals, source = manifest["splits"][split], rows_in(made / split)
        assert totals["rows"] == len(source) == sum(shard["rows"] for shard in totals["shards"])
        assert totals["tokens"] == source.report()["tokens"] == totals["rows"] * 32
        listed = [(shard["name"], shard["bytes"]) for shard in totals["shards"]]
        assert listed == [(shard.name, shard.size) for shard in source.files]
        assert totals["tokens_dropped"] < 32
    assert sum(manifest["splits"][split]["documents"] for split in SPLITS) == 60
    train = read_split(made / "train")
    frequency = np.bincount(train, minlength=400) / train.size
    expected = -sum(p * math.log(p) for p in frequency if p)
    assert manifest["unigram_entropy_nats"]["train"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_same_input_same_bytes(texts, made, tmp_path, processes):
    prepare(texts, tmp_path / "again", "--processes", processes)
    assert len(contents(made)) > 6
    assert contents(tmp_path / "again") == contents(made)


def test_a_repeated_call_has_nothing_to_do(texts, made, tmp_path, capsys):
    output = tmp_path / "out"
    shutil.copytree(made, output)
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    assert prepare(texts, output) == 0
    assert "already prepared" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before
    with pytest.raises(ConfigError, match="another preparation"):
        prepare(texts, output, "--max_rows", "5")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="was not made by this command"):
        prepare(texts, tmp_path / "mine")
    assert prepare(texts, output, "--max_rows", "5", "--overwrite", "1") == 0
    assert [path.name for path in (output / "train").glob("*.gz")] == ["train-00000.json.gz"]


@pytest.mark.parametrize("bytes_per_token", [8, 0.01])
def test_limits(texts, tmp_path, monkeypatch, bytes_per_token):
    """Also where the files that are converted first do not suffice."""
    monkeypatch.setattr(cli, "BYTES_PER_TOKEN", bytes_per_token)
    prepare(texts, tmp_path / "out", "--max_rows", "50", "--validation_shards", "1", "--zip", "0")
    train, test = (rows_in(tmp_path / "out" / split) for split in SPLITS)
    assert [header.rows for header in train.headers] == [20, 20, 10]
    assert [header.rows for header in test.headers] == [20]
    assert [shard.name for shard in test.files] == ["test-00000.json"]


def test_a_given_tokenizer(texts, made, tmp_path):
    flags = ["--input", str(texts / "sub1"), "--seq_len", "16", "--validation_fraction", "0"]
    for name, given in (("file", made / "tokenizer.json"), ("folder", made)):
        main([*flags, "--output", str(tmp_path / name), "--tokenizer", str(given)])
    assert contents(tmp_path / "file" / "train") == contents(tmp_path / "folder" / "train")
    assert (tmp_path / "file/tokenizer.json").read_bytes() == (made / "tokenizer.json").read_bytes()
    tokenizers.train(["another"], 300).save(str(tmp_path / "t.json"))
    with pytest.raises(ConfigError, match="another preparation"):
        main([*flags, "--output", str(tmp_path / "file"), "--tokenizer", str(tmp_path / "t.json")])
    for more, reason in [
        (["--tokenizer", str(made), "--eos_token", "<nope>"], "--eos_token <nope>: "),
        (["--tokenizer", str(tmp_path / "gone.json")], "gone.json: cannot be loaded"),
        (["--train_tokenizer", "100"], "--train_tokenizer 100"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            main([*flags, "--output", str(tmp_path / "bad"), *more])


TRAINED = "--input {in} --output {out} --train_tokenizer 400"
GOOD = '{"text": "good"}\n'
REFUSED = {
    "no input": ({}, "--output o", ConfigError, "required: --input"),
    "no tokenizer": ({}, "--input i --output o", ConfigError, "--tokenizer --train_tokenizer is required"),
    "nowhere": ({}, "--input /nowhere --output o --train_tokenizer 400", DataError, "/nowhere: "),
    "nothing": ({}, TRAINED, DataError, r"--input .*\*\.txt"),
    "short rows": ({"a.jsonl": GOOD}, f"{TRAINED} --seq_len 1", ConfigError, "--seq_len: 1: must"),
    "fraction": ({"a.jsonl": GOOD}, f"{TRAINED} --validation_fraction 1", ConfigError, "--validation_f"),
    "special": ({}, "--input i --output o --tokenizer t --special_tokens <x>", ConfigError, "--train_tokenizer"),
    "many special": (
        {"a.jsonl": GOOD}, "--input {in} --output {out} --train_tokenizer 258 --special_tokens a b", ConfigError, "259",
    ),
    "no string": ({"a.jsonl": GOOD + '{"text": 5}\n'}, TRAINED, DataError, r'a\.jsonl:2: .*"text"'),
    "broken": ({"a.jsonl": GOOD + '{"text": "cut'}, TRAINED, DataError, r"a\.jsonl:2: "),
    "too little": ({"a.jsonl": GOOD}, TRAINED, DataError, "512"),
    "tokens": ({"a.jsonl": '{"input_ids": [1, 2, 3]}\n'}, TRAINED, DataError, "tokens, which need no preparation"),
    "two kinds": (
        {"a.jsonl": GOOD, "b.jsonl": '{"prompt": "a", "completion": "b"}\n'},
        "--input {in}/a.jsonl {in}/b.jsonl --output {out} --train_tokenizer 400", ConfigError, "one kind at a time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path, case):
    files, words, error, reason = REFUSED[case]
    (tmp_path / "in").mkdir()
    for name, content in files.items():
        (tmp_path / "in" / name).write_text(content)
    with pytest.raises(error, match=reason) as caught:
        main([word.format(**{"in": tmp_path / "in", "out": tmp_path / "out"}) for word in words.split()])
    assert "\n" not in str(caught.value)


class Killed(Exception):
    pass


@pytest.mark.parametrize("limits", [[], ["--max_rows", "150", "--validation_shards", "1"]])
def test_a_killed_preparation_continues(texts, made, tmp_path, monkeypatch, limits):
    """What was tokenized is not tokenized again, and the output is byte for byte that of an undisturbed run."""
    whole, output = made, tmp_path / "out"
    if limits:
        whole = tmp_path / "whole"
        prepare(texts, whole, *limits)
    with monkeypatch.context() as patch:
        write = SplitWriter.write

        def fail(writer):
            write(writer)
            if len(writer.shards) == 2:
                raise Killed

        patch.setattr(SplitWriter, "write", fail)
        with pytest.raises(Killed):
            prepare(texts, output, *limits)
    (output / "train" / ".train-00009.json.gz.01ab.partial").write_text("left by the kill")
    shutil.copy(output / "tokenizer.json", output / "train" / "train-00099.json.gz")
    with pytest.raises(DataError, match="not finished"):
        list_files(str(output / "train"))
    monkeypatch.setattr(cli, "train", None)  # the tokenizer is not trained again
    monkeypatch.setattr(convert, "write_group", None)
    assert prepare(texts, output, *limits) == 0
    assert contents(output) == contents(whole)


def test_malformed_records_are_left_out(made, tmp_path):
    text, output = tmp_path / "text.jsonl", tmp_path / "out"
    text.write_text("\n".join(["broken", *(json.dumps({"text": document(number)}) for number in range(60))]))
    words = f"--input {text} --tokenizer {made}/tokenizer.json --output {output} --bad_rows skip".split()
    assert main(words) == 0
    manifest = json.loads((output / MANIFEST).read_text())
    assert sum(totals["documents"] for totals in manifest["splits"].values()) == 60


def test_chats_are_rows_of_their_own(tmp_path):
    """A chat is one row with labels; the output has the tokenizer with its template."""
    made, output = write_tokenizer(tmp_path / "tokenizer", MARKED), tmp_path / "out"
    write_lines(tmp_path / "in" / "chats.jsonl", [{"messages": chat(number)} for number in range(40)])
    words = ["--input", str(tmp_path / "in"), "--output", str(output), "--tokenizer", str(made)]
    assert main([*words, "--rows_per_shard", "16"]) == 0
    splits = [rows_in(output / split) for split in SPLITS]
    rows = [rows.row(number) for rows in splits for number in range(len(rows))]
    found = sorted((row.input_ids.tolist(), row.labels.tolist()) for row in rows)
    assert found == sorted(by_transformers(made, chat(number)) for number in range(40))
    manifest = json.loads((output / MANIFEST).read_text())
    assert sum(totals["documents"] for totals in manifest["splits"].values()) == 40
    counted = sum(totals["counted_tokens"] for totals in manifest["splits"].values())
    assert counted == sum(label != -100 for _, labels in found for label in labels)
    assert by_transformers(output, chat(5)) == by_transformers(made, chat(5))
    with pytest.raises(ConfigError, match="--seq_len"):
        main([*words, "--seq_len", "32"])
