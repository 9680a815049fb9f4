"""Streamed text: every document once, one order for all topologies, exact after a stop, whatever it is read from."""

from __future__ import annotations

import gzip
import inspect
import json
import logging
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from smp_train.arguments import parse
from smp_train.data.bad_rows import LeftOut
from smp_train.data.pipelines.text_data import TextData, TextRows
from smp_train.data.prepare import tokenizer as tokenizers
from smp_train.data.prepare.cli import main as prepare
from smp_train.data.text.fields import TEXTS, Fields
from smp_train.data.text.files import find_files
from smp_train.data.text.opening import _reading, holds_text
from smp_train.data.text.read import TextFile, documents
from smp_train.data.text.stream import Reading, assign_pieces, stream_count
from smp_train.errors import ConfigError, DataError

LENGTH = 24


def document(number: int) -> str:
    return f"<{number}>" + "".join(f" w{number}x{k}" for k in range(number * 7 % 23))


def lines(numbers) -> bytes:
    return b"".join(json.dumps({"text": document(n)}).encode() + b"\n" for n in numbers)


@pytest.fixture(scope="module")
def tokenizer():
    made = tokenizers.train((document(n) for n in range(50)), 300)
    made.encode_special_tokens = True
    return made


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Return a folder of 400 documents in files of every kind, one of them nearly a third of all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path_factory.mktemp("corpus")
    (folder / "sub").mkdir()
    (folder / "a.jsonl").write_bytes(lines(range(130)).rstrip())
    (folder / "sub" / "b.jsonl.gz").write_bytes(gzip.compress(lines(range(130, 260)).replace(b"\n", b"\n\n")))
    (folder / "c.json.gz").write_bytes(gzip.compress(lines(range(260, 300))))
    table = pa.table({"id": list(range(90)), "text": [document(n) for n in range(300, 390)]})
    pq.write_table(table, folder / "d.parquet", row_group_size=37)
    for n in range(390, 400):
        (folder / f"{n}.txt").write_text(document(n))
    (folder / "blank.txt").write_text(" \n")
    (folder / "left.bin").write_bytes(b"\0")
    return folder


@pytest.fixture(scope="module")
def files(corpus):
    return find_files([str(corpus)])


def reading(tokenizer, **changes) -> Reading:
    return Reading(tokenizer, **{"end": 0, "seq_len": LENGTH, "seed": 1, "shuffled": True, **changes})


def world(files, how, size: int, *, mb: int = 1, acc: int = 1, streams: int = 4, prefetch: int = 0):
    """Return the ranks of a run, whose merges see each other."""
    dealt = {"micro_batch": mb, "accumulation": acc, "dp_size": size, "seq_len": how.seq_len, "prefetch": prefetch}
    return [TextData(files, how, identity="t", streams=streams, dp_rank=rank, **dealt) for rank in range(size)]


def state(ranks, consumed: int) -> dict:
    """Return the state all ranks agree on, having put together what each knows."""
    said: list[list[int]] = []
    for rank in ranks:
        rank._merge = lambda rows: said.append(list(rows)) or [1] * len(rows)
        rank.state(consumed)
    together = np.max(np.array(said), axis=0).tolist()
    for rank in ranks:
        rank._merge = lambda rows: together
    states = [rank.state(consumed) for rank in ranks]
    assert all(one == states[0] for one in states)
    return json.loads(json.dumps(states[0]))


def step(streams) -> list[tuple[str, list[int]]]:
    """Return one global batch in the global order: (name, tokens) of each sample."""
    batches = [next(stream) for stream in streams]
    return [
        (name, row.tolist())
        for micro in zip(*batches, strict=True)
        for batch in micro
        for name, row in zip(batch.samples, batch.input_ids, strict=True)
    ]


def run(files, how, history, *, streams=4, prefetch=0):
    """Return the samples of a run of several pieces: (ranks, micro-batch, accumulation, steps, steps lost)."""
    seen, saved = [], None
    for size, mb, acc, steps, lost in history:
        # V is what the first start chose; later ones are told another and must not care.
        ranks = world(files, how, size, mb=mb, acc=acc, streams=streams if saved is None else 2, prefetch=prefetch)
        (at,) = {rank.check_state(saved) for rank in ranks} if saved else {0}
        open_streams = [rank.batches(at) for rank in ranks]
        for _ in range(steps):
            seen += step(open_streams)
            at += ranks[0].global_batch
        saved = state(ranks, at)
        for _ in range(lost):
            step(open_streams)
        for stream in open_streams:
            stream.close()
    return seen


@pytest.fixture(scope="module")
def alone(files, tokenizer):
    """Return the first 2,400 samples of one process that nothing interrupts."""
    return run(files, reading(tokenizer), [(1, 4, 1, 600, 0)])


history = st.lists(
    st.tuples(st.integers(1, 8), st.integers(1, 3), st.integers(1, 2), st.integers(0, 4), st.integers(0, 1)),
    min_size=1,
    max_size=3,
)


@settings(max_examples=8, deadline=None)
@example(history=[(4, 1, 1, 3, 2), (2, 1, 1, 5, 0), (8, 1, 1, 2, 1), (1, 1, 1, 9, 0)], prefetch=0)
@given(history=history, prefetch=st.sampled_from([0, 0, 3]))
def test_any_history_is_that_of_one_process(files, tokenizer, alone, history, prefetch):
    seen = run(files, reading(tokenizer), history, prefetch=prefetch)
    assert seen == alone[: len(seen)]


def spans(samples):
    """Yield (document, begin, end) of what samples are made of, stream by stream."""
    for name, _ in samples:
        for span in name.split("+"):
            document, _, place = span.rpartition("[")
            begin, _, end = place.rstrip("]").partition(":")
            yield document, int(begin), int(end)


def test_every_document_once_and_whole(files, tokenizer, alone):
    """Of each stream: its documents come one after the other, whole, and none again before its epoch is over."""
    texts = {f"{file.name}:{number}": text for file in files for number, text in documents(file) if text}
    tokens = {name: [*tokenizer.encode(text).ids, 0] for name, text in texts.items()}
    assert len(tokens) == 400
    firsts: Counter[str] = Counter()
    for stream in range(4):
        times: Counter[str] = Counter()
        at = None
        for document, begin, end in spans(alone[stream::4]):
            if at is None:
                assert begin == 0
                times[document] += 1
            else:
                assert (document, begin) == at, "goes on where it was cut"
            assert end <= len(tokens[document])
            at = None if end == len(tokens[document]) else (document, end)
        assert set(times.values()) <= {max(times.values()), max(times.values()) - 1}
        firsts.update(times.keys())
    assert set(firsts.values()) == {1}, "no document is in two streams"
    assert len(firsts) == 400
    for sample in alone[:40]:
        assert sample[1] == [token for name, begin, end in spans([sample]) for token in tokens[name][begin:end]]
        assert len(sample[1]) == LENGTH


def test_order_depends_on_the_seed(files, tokenizer, alone):
    other = run(files, reading(tokenizer, seed=2), [(1, 4, 1, 20, 0)])
    stored = run(files, reading(tokenizer, shuffled=False), [(1, 4, 1, 20, 0)])
    assert other != alone[:80] != stored
    numbers = [document for document, begin, _ in spans(stored[0::4]) if begin == 0]
    per_file = [int(name.rpartition(":")[2]) for name in numbers if name.startswith(numbers[0].rpartition(":")[0])]
    assert per_file == sorted(per_file)


def test_what_a_batch_is(files, tokenizer):
    """Labels are the ids, all counted, no mask; ranks read no more streams than they must."""
    (rank,) = world(files, reading(tokenizer, named=False), 1, mb=3, streams=2)
    (batch,) = next(rank.batches())
    assert batch.labels.equal(batch.input_ids)
    assert batch.attention_mask is None
    assert batch.counted_tokens() == 3 * (LENGTH - 1)
    assert batch.samples == [""] * 3
    touched = [rank.touched() for rank in world(files, reading(tokenizer), 2, mb=2, streams=8)]
    assert touched == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert len(world(files, reading(tokenizer), 3, streams=8)[0].touched()) == 8


def test_state_refuses_what_it_is_not_of(files, tokenizer, caplog):
    ranks = world(files, reading(tokenizer), 1)
    stream = ranks[0].batches()
    next(stream)
    saved = state(ranks, 1)
    with pytest.raises(ValueError, match=r"sample 1.* 2"):
        ranks[0].state(2)
    for changes, reason in [
        ({"seed": 2}, "--seed changed: 1 in the checkpoint, 2 now"),
        ({"shuffled": False}, "--shuffle changed: global in the checkpoint, none now"),
        ({"seq_len": 9}, "--max_context_width 24 in the checkpoint, text .* --max_context_width 9 now"),
        ({"end": 1}, "files or tokenizer .* in the checkpoint"),
    ]:
        (other,) = world(files, reading(tokenizer, **changes), 1)
        with pytest.raises(DataError, match=reason) as refused:
            other.check_state(saved)
        assert "\n" not in str(refused.value)
    (fewer,) = world(files[:-1], reading(tokenizer), 1)
    with pytest.raises(DataError, match="--allow_data_change 1"):
        fewer.check_state(saved)
    with caplog.at_level(logging.WARNING):
        assert fewer.check_state(saved, allow_data_change=True) == 1
    assert "may come twice or not at all" in caplog.text
    with pytest.raises(DataError, match="the checkpoint is of shards, not of streamed text"):
        fewer.check_state({"version": 1, "consumed": 5})
    stream.close()


def test_streams_follow_the_data_alone():
    def files(count, size, name="x.jsonl"):
        return [TextFile(f"/{n}/{name}", f"{n}/{name}", size) for n in range(count)]

    for count, size, name, streams in [
        (1, 100, "x.jsonl", 1),
        (1, 5 << 20, "x.jsonl", 4),
        (1, 1 << 30, "x.jsonl", 16),
        (1, 4 << 20, "x.jsonl.gz", 16),  # unpacked, text is four times as much
        (1024, 300 << 20, "x.jsonl", 256),
        (9000, 1 << 20, "x.jsonl", 256),
        (3, 1 << 30, "x.txt", 2),
    ]:
        assert stream_count(files(count, size, name)) == streams
    for count, streams in [(1, 16), (5, 4), (5, 16), (40, 16)]:
        assigned = assign_pieces(files(count, 1000), streams)
        assert len(assigned) == streams
        assert all(assigned)
        parts: dict[tuple[str, int], list[int]] = {}
        for piece in (piece for pieces in assigned for piece in pieces):
            parts.setdefault((piece.file.name, piece.parts), []).append(piece.part)
        assert len(parts) == count
        assert all(sorted(found) == list(range(number)) for (_, number), found in parts.items())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stream_without_a_document_stops_the_run_before_its_first_step(tmp_path, tokenizer, prefetch):
    (tmp_path / "blank.txt").write_text(" \n" * 400)
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text("word " * 200)
    (rank,) = world(find_files([str(tmp_path)]), reading(tokenizer), 1, streams=5, prefetch=prefetch)
    with pytest.raises(DataError, match=r"blank\.txt: "):
        next(rank.batches())
    (tmp_path / "a.jsonl").write_bytes(lines([1]))
    (rank,) = world(find_files([str(tmp_path / "a.jsonl")]), reading(tokenizer), 1, mb=4, prefetch=prefetch)
    with pytest.raises(DataError, match=r"a\.jsonl: "):
        next(rank.batches())


BAD_FILES = [
    ("a.jsonl", b'{"text": "good"}\n{"text": "cut', ":2: broken JSON"),
    ("a.jsonl", b'{"text": "good"}\n{"text": 5}', ':2: no "text" string in this record; set --text_column'),
    ("a.jsonl", b'{"text": "good"}\n\n["text"]', ':3: no object in this line; one object per line'),
    ("a.jsonl", b'{"input_ids": [1, 2]}', ":1: .*these are tokens already: .* --training_dir"),
    ("a.parquet", b"PAR1 not parquet", ": "),
    ("a.jsonl.gz", gzip.compress(lines(range(5000)), mtime=0)[:-100], r":\d+: "),
    ("a.txt.gz", gzip.compress(b"a text", mtime=0)[:-3], ": "),
]


@pytest.mark.parametrize(("name", "content", "reason"), BAD_FILES)
def test_bad_files_are_named(tmp_path, tokenizer, name, content, reason):
    (tmp_path / name).write_bytes(content)
    (rank,) = world(find_files([str(tmp_path)]), reading(tokenizer), 1, streams=1)
    with pytest.raises(DataError, match=re.escape(name) + reason) as refused:
        next(rank.batches())
    assert "\n" not in str(refused.value)


def write_malformed(folder: Path, malformed: bool):
    """Write 60 good documents, and in five kinds of files malformed ones, or blank ones in their places."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir()
    good = lines(range(40)).splitlines()
    bad = [b'{"text": "cut', b'{"text": 5}', b"[1]", b'{"text": "a\\u0000b"}']
    for place, line in enumerate(bad):
        good.insert(9 * place, line if malformed else b'{"text": " "}')
    (folder / "a.jsonl").write_bytes(b"\n".join(good))
    (folder / "b.txt").write_bytes(b"latin \xe9" if malformed else b" ")
    (folder / "c.txt").write_bytes("utf-16".encode("utf-16") if malformed else b" ")
    texts = [document(n).encode() for n in range(40, 60)]
    texts[3], texts[7] = (b"\xff\xfe", None) if malformed else (b" ", b" ")
    binary = pa.array(texts, pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(binary), binary.buffers(), binary.null_count)  # as nobody looked at
    pq.write_table(pa.table({"text": column}), folder / "d.parquet")
    with pa.ipc.new_stream(str(folder / "e.arrow"), pa.schema([("text", pa.string())])) as stream:
        stream.write_batch(pa.record_batch([column], ["text"]))
    return find_files([str(folder)])


MALFORMED = {
    "a.jsonl": [r"a\.jsonl:1: ", r"a\.jsonl:10: ", r"a\.jsonl:19: ", r"a\.jsonl:28: .*NUL"],
    "b.txt": [r"b\.txt: byte 6 is not UTF-8"], "c.txt": [r"c\.txt: byte 0 is not UTF-8"],
    "d.parquet": [r"d\.parquet: row 4: .*not UTF-8", r"d\.parquet: row 8: "],
    "e.arrow": [r"e\.arrow: row 4: .*not UTF-8", r"e\.arrow: row 8: "],
}  # fmt: skip


def test_malformed_documents_stop_the_run_or_are_left_out(tmp_path, tokenizer, caplog):
    files, blank = write_malformed(tmp_path / "bad", True), write_malformed(tmp_path / "blank", False)
    for file, twin in zip(files, blank, strict=True):
        with pytest.raises(DataError, match=MALFORMED[file.name][0]):
            list(documents(file))
        found: list[str] = []
        assert list(documents(file, left_out=found.append)) == list(documents(twin)), "the others keep their places"
        assert all(re.search(wanted, why) for why, wanted in zip(found, MALFORMED[file.name], strict=True)), found
    how = reading(tokenizer, left_out=LeftOut())
    wanted = run(blank, reading(tokenizer), [(1, 4, 1, 30, 0)], streams=2)
    assert run(files, how, [(1, 4, 1, 30, 0)], streams=2) == wanted
    assert run(files, how, [(2, 1, 2, 7, 1), (4, 1, 1, 10, 0), (1, 2, 1, 26, 0)], streams=2) == wanted
    assert how.left_out.number >= 10
    assert "--bad_rows skip" in caplog.text
    (tmp_path / "tokens.jsonl").write_text('{"input_ids": [1, 2]}')
    with pytest.raises(DataError, match="--training_dir"):
        list(documents(find_files([str(tmp_path / "tokens.jsonl")])[0], left_out=LeftOut()))


def test_parts_and_starts_of_a_file(files):
    for file in files:
        whole = list(documents(file))
        for part, parts in ((0, 1), (0, 3), (1, 3), (2, 3)):
            for start in (0, 1, 20, 1000):
                found = list(documents(file, start=start, part=part, parts=parts))
                assert found == whole[part::parts][start:], file.name


def test_a_folder_of_text_that_save_to_disk_wrote(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    texts = [document(n) for n in range(50)]
    made = datasets.Dataset.from_dict({"id": list(range(50)), "text": texts})
    made.save_to_disk(str(tmp_path / "d"), num_shards=2)
    files = find_files([str(tmp_path / "d")], flag="--dataset")
    assert sorted(text for file in files for _, text in documents(file)) == sorted(texts)
    assert holds_text(str(tmp_path / "d"))
    for file in files:
        assert list(documents(file, start=2, part=1, parts=3)) == list(documents(file))[1::3][2:]
        with pytest.raises(DataError, match=r"\.arrow: .*words.*--text_column"):
            list(documents(file, Fields(("words",))))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = ["--input", str(tmp_path / "d"), "--output", str(tmp_path / "out"), "--seq_len", "16"]
    assert prepare([*words, "--tokenizer", str(tmp_path / "tokenizer.json"), "--eos_token", "<|endoftext|>"]) == 0

    content = Path(files[0].path).read_bytes()
    Path(files[0].path).write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"\.arrow: .*copy it again"):
        list(documents(files[0]))
    datasets.DatasetDict(train=made, test=made).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="the splits test, train"):
        find_files([str(tmp_path / "splits")])


def test_validation_is_the_beginning_in_stored_order(files, tokenizer):
    files = [file for file in files if file.name in ("a.jsonl", "c.json.gz")]
    ids = [token for n in (*range(130), *range(260, 300)) for token in [*tokenizer.encode(document(n)).ids, 0]]
    for most, count in ((5, 5), (10**6, (len(ids) + LENGTH - 2) // LENGTH)):
        rows = TextRows(files, reading(tokenizer, shuffled=False), most)
        assert len(rows) == count
        found = np.concatenate([rows.row(n).input_ids for n in range(count)]).tolist()
        assert found == ids[: len(found)]
        assert len(found) >= min(most * LENGTH, len(ids) - 1)
        assert rows.name(0).startswith("a.jsonl:1[0:")


def test_a_data_set_of_the_hub(tmp_path, tokenizer, monkeypatch):
    """By `datasets`, of whose hub a folder stands in: its shards, in rows; the same guarantees."""
    datasets = pytest.importorskip("datasets")
    hub = tmp_path / "hub"
    hub.mkdir()
    for n in range(3):
        (hub / f"train-{n}.jsonl").write_bytes(lines(range(40 * n, 40 * n + 40)))
    (hub / "validation.jsonl").write_text(json.dumps({"text": "held out"}) + "\n")
    load = datasets.load_dataset_builder

    def from_folder(name, config, **options):
        # Of the releases that run code of data sets, each must be told not to; others know no such option.
        known = "trust_remote_code" in inspect.signature(load).parameters
        assert options.get("trust_remote_code") is (False if known else None)
        if name != "acme/words":
            raise FileNotFoundError(f"Dataset '{name}'\ndoesn't exist on the Hub")
        return load(str(hub), config, **options)

    from_folder.__signature__ = inspect.signature(load)
    monkeypatch.setattr(datasets, "load_dataset_builder", from_folder)
    files = find_files(["acme/words"])
    assert sorted(file.name for file in files) == ["train-0", "train-1", "train-2"]
    assert sorted(text for file in files for _, text in documents(file)) == sorted(map(document, range(120)))
    first = next(file for file in files if file.name == "train-1")
    assert list(documents(first, start=3, part=1, parts=3)) == list(documents(first))[10::3]
    seen = run(files, reading(tokenizer), [(1, 2, 1, 4, 1), (2, 1, 2, 3, 0), (3, 1, 1, 2, 0)])
    assert seen == run(files, reading(tokenizer), [(1, 1, 1, len(seen), 0)])
    assert [text for _, text in documents(find_files(["acme/words"], split="validation")[0])] == ["held out"]
    words = f"--input acme/words --output {tmp_path}/out --train_tokenizer 300 --seq_len 32 --validation_fraction 0"
    assert prepare(words.split()) == 0
    assert json.loads((tmp_path / "out" / "_manifest.json").read_text())["splits"]["train"]["documents"] == 120
    for name, options, reason in [
        ("acme/words", {"split": "dev"}, "has no split dev; it has train, validation"),
        ("acme/nothing", {}, "is no file or folder here, and cannot be opened .* exist on the Hub"),
    ]:
        with pytest.raises(DataError, match=reason) as refused:
            find_files([name], **options)
        assert "\n" not in str(refused.value)
    with pytest.raises(DataError, match=r"train-\d: .*body.*text.*--text_column"):
        list(documents(files[0], Fields(("body",))))


def names_in(folder, *given):
    return sorted(file.name for file in find_files([str(folder)], *given))


def test_finding_files(tmp_path, caplog):
    with pytest.raises(DataError, match=r"/no/where: .*--dataset"):
        find_files(["/no/where"], flag="--dataset")
    with pytest.raises(DataError, match=r"no file that matches \*\.txt"):
        find_files([str(tmp_path)])
    for name in ("a.txt", "_notes.txt", "sub0/1.py", "sub0/10.py", "sub0/2.py", "sub1/11.py", "sub2/12.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert names_in(tmp_path, ["1*.py"], ["sub2", "10.*"]) == ["sub0/1.py", "sub1/11.py"]
    found = find_files([str(tmp_path)])
    assert len(found) == 6
    (tmp_path / "nothing.txt").touch()
    assert find_files([str(tmp_path)]) == found
    assert f"left out 1 empty files of 7; the first is {tmp_path}/nothing.txt" in caplog.text
    with pytest.raises(DataError, match=r"nothing\.txt: .*--dataset"):
        find_files([str(tmp_path / "nothing.txt")], flag="--dataset")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"is given twice"):
        find_files([str(tmp_path)])
    (tmp_path / "link.txt").unlink()
    (tmp_path / "a.txt.gz").write_bytes(b"x")
    with pytest.raises(DataError, match=r"a\.txt\.gz: a\.txt "):
        find_files([str(tmp_path)])


def test_what_is_called_json_is_looked_into(tmp_path, caplog):
    content = b'\n{"text": "one"}\n{"text": "two"}\n'
    for name, written in {
        "a.jsonl": content, "b.json": content, "zipped.json": gzip.compress(content),
        "long.json": b'{"text": "' + b"x" * (1 << 20) + b'"}\n',
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(written)
    assert names_in(tmp_path) == ["a.jsonl", "b.json", "long.json", "zipped.json"]
    assert not caplog.text
    (tmp_path / "info.json").write_bytes(b'{"text_column": "text"}\n')
    (tmp_path / "pretty.json").write_bytes(b'{\n "text": "one"\n}\n')
    (tmp_path / "blank.json").write_bytes(b"\n")
    assert len(names_in(tmp_path)) == 4
    assert "left out 3 files called *.json whose first line is no object with a field text or" in caplog.text
    assert "blank.json" in caplog.text
    assert list(documents(find_files([str(tmp_path / "b.json")])[0])) == [(2, "one"), (3, "two")]
    assert names_in(tmp_path / "pretty.json"), "given itself"
    # Tokens are not passed over either: their reader says what they are.
    (tmp_path / "tokens").mkdir()
    for tokens in (b"[1, 2]", b"[" + b"1, " * (1 << 19) + b"2]"):
        (tmp_path / "tokens/a.json").write_bytes(b'{"input_ids": ' + tokens + b"}\n")
        with pytest.raises(DataError, match="these are tokens already"):
            list(documents(find_files([str(tmp_path / "tokens")])[0]))
        assert not holds_text(str(tmp_path / "tokens"))
    (tmp_path / "c.jsonl").write_bytes(b'{"labels": [' + b"1, " * (1 << 19) + b'2], "input_ids": [1, 2]}\n')
    assert not holds_text(str(tmp_path / "c.jsonl")), "a long row whose ids come last"
    assert holds_text(str(tmp_path / "b.json"))


def test_a_tokenizer_of_another_model(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    args = parse(["--dataset", "x", "--tokenizer", str(tmp_path)], {}).args
    with pytest.raises(ConfigError, match=r"297.*256"):
        _reading(args, 256, 8, TEXTS)
    assert _reading(args, 298, 8, TEXTS)[0].end == tokenizer.token_to_id("<|endoftext|>")


def test_tokenizers_of_older_versions(tokenizer):
    class Old:
        """As of 0.19, which comes with transformers 4.44."""

        def encode_batch(self, texts, add_special_tokens):
            return tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)

    old, new = (tokenizers.encode(made, [document(5), "", "x"], 7) for made in (Old(), tokenizer))
    assert [ids.tolist() for ids in old] == [ids.tolist() for ids in new]
    assert new[1].size == 0
    assert new[2][-1] == 7
