"""What every kind of `Source` promises: the same cases for shards, prepared tokens, windows, Arrow and text."""

import gzip
import json
import shutil

import numpy as np
import pytest

from smp_train import distributed
from smp_train.data.blend import Joined
from smp_train.data.layout import lay_out
from smp_train.data.learnable import Kept
from smp_train.data.open_data import open_place
from smp_train.data.order import Order
from smp_train.data.pipelines.data_pipeline import TrainingData
from smp_train.data.pipelines.text_data import TextRows
from smp_train.data.prepare import tokenizer as tokenizers
from smp_train.data.source import IGNORED, Row, Source, lengths, shards, trimmed
from smp_train.data.synthetic import Synthetic
from smp_train.data.text.files import find_files
from smp_train.data.text.stream import Reading
from smp_train.data.token_cache import BESIDE
from smp_train.data.windowed import Windowed

COUNT, FILES, VOCAB = 33, 5, 100
ROWS = ["one length", "one length, padded", "ragged", "ragged, padded", "holes", "labels", "labels, padded"]
STORED = ["shards", "zipped", "prepared", "windowed", "arrow", "joined"]
MADE = ["synthetic", "text", "laid out", "kept", "own"]


def written(kind, seed=0):
    """Return rows as dictionaries of ids, mask and labels, with a target in each and its last token attended."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(COUNT):
        n = 9 if "one length" in kind else int(rng.integers(3, 14))
        ids = rng.integers(1, VOCAB, n)
        row = {"input_ids": ids.tolist(), "attention_mask": [1] * n}
        if kind == "holes":
            row["attention_mask"] = [*rng.integers(0, 2, n - 2).tolist(), 1, 1]
        if "labels" in kind:
            other = np.where(rng.random(n) < 0.5, ids, rng.integers(0, VOCAB, n))
            labels = np.where(rng.random(n) < 0.6, IGNORED, other)
            row["labels"] = [*labels[:-1].tolist(), int(ids[-1])]
        if "padded" in kind:
            left, right = rng.integers(0, 3, 2).tolist()
            row = {key: [0] * left + values + [0] * right for key, values in row.items()}
            if "one length" in kind:
                row = {key: values[:9] for key, values in row.items()}
        rows.append(row)
    return rows


def write(folder, rows, suffix=".json"):
    folder.mkdir(parents=True)
    for number, part in enumerate(np.array_split(np.arange(len(rows)), FILES)):
        # Blank lines count as lines and are no rows.
        text = "".join(json.dumps(rows[i]) + "\n" * (1 + number % 2) for i in part).encode()
        (folder / f"{number}{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    return str(folder)


def stored(kind, folder, rows):
    """Open rows in one of the ways in which they may be stored."""
    if kind == "arrow":
        datasets = pytest.importorskip("datasets")
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "arrow"), num_shards=FILES)
        return open_place(str(folder / "arrow"), vocab_size=VOCAB)
    if kind == "joined":
        half = len(rows) // 2
        parts = [stored("shards", folder / "a", rows[:half]), stored("zipped", folder / "b", rows[half:])]
        return Joined(parts, ["a", "b"])
    data = write(folder / "data", rows, ".jsonl.gz" if kind == "zipped" else ".json")
    if kind == "windowed":
        source = open_place(data, vocab_size=VOCAB, window=1, ranks=distributed.detect())
        assert isinstance(source, Windowed)
        return source
    source = open_place(data, vocab_size=VOCAB)
    if kind == "prepared":
        shutil.move(folder / "data" / BESIDE, folder / "prepared")
        return open_place(str(folder / "prepared"), vocab_size=VOCAB)
    return source


class Own(Source):
    """The least that a user's own source may be."""

    fingerprint = "own"

    def __len__(self):
        return 20

    def row(self, index):
        if not 0 <= index < 20:
            raise IndexError(index)
        return Row(np.arange(index, index + 2 + index % 5), counted=np.arange(2 + index % 5) > 0)


def made(kind, folder):
    if kind == "synthetic":
        return Synthetic(seq_len=9, vocab_size=VOCAB, seed=3, size=40)
    if kind == "text":
        texts = [f"<{n}>" + "".join(f" w{n}x{k}" for k in range(n * 7 % 23)) for n in range(40)]
        folder.mkdir()
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        reading = Reading(tokenizers.train(iter(texts), 300), end=0, seq_len=24, seed=1, shuffled=False)
        return TextRows(find_files([str(folder)]), reading, 30)
    if kind == "laid out":
        return lay_out(stored("shards", folder, written("ragged")), 7, long="split", short="concat")
    if kind == "kept":
        return Kept(stored("shards", folder, written("labels, padded")), np.array([0, 7, 8, 32]))
    return Own()


CASES = [*((kind, rows) for kind in STORED for rows in ROWS), *((kind, "") for kind in MADE)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(filter(None, case)))
def one(request, tmp_path_factory):
    """Return (kind, rows that were written or None, the source, with all its shards wanted)."""
    kind, of = request.param
    folder = tmp_path_factory.mktemp("source") / "x"
    rows = written(of) if of else None
    source = made(kind, folder) if rows is None else stored(kind, folder, rows)
    source.want(list(range(len(shards(source)))), [])
    yield kind, rows, source
    source.rest()


def same(row, other):
    """Return whether two rows are the same, where a mask of ones is as good as none."""
    masks = [np.ones(r.input_ids.size, bool) if r.counted is None else r.counted for r in (row, other)]
    labels = [r.input_ids if r.labels is None else r.labels for r in (row, other)]
    return all(map(np.array_equal, (row.input_ids, masks[0], labels[0]), (other.input_ids, masks[1], labels[1])))


def test_rows_depend_on_the_index_alone(one):
    _, rows, source = one
    assert len(source) >= 20
    indices = np.random.default_rng(1).permutation(len(source)).tolist()
    first = {i: source.row(i) for i in indices}
    assert all(same(source.row(i), first[i]) for i in range(len(source)))
    assert len({source.name(i) for i in indices}) == len(source)
    for index in (-1, len(source), len(source) + 5):
        with pytest.raises(IndexError):
            source.row(index)
    if rows is not None:
        assert len(rows) == len(source)
        for i in indices:
            mask = np.array(rows[i]["attention_mask"], bool)
            labels = np.array(rows[i]["labels"]) if "labels" in rows[i] else None
            assert same(first[i], Row(np.array(rows[i]["input_ids"]), mask, labels=labels))
            assert (first[i].counted is None) == mask.all(), "so that whole rows are not looked at again"
            assert (first[i].labels is None) == (labels is None)


def test_names_are_those_that_a_person_looks_up(one):
    kind, rows, source = one
    if rows is not None and kind not in ("arrow", "joined"):
        suffix = ".jsonl.gz" if kind == "zipped" else ".json"
        for shard, of in enumerate(shards(source)):
            lines = 2 if shard % 2 else 1
            assert [source.name(i) for i in of] == [f"{shard}{suffix}:{1 + lines * n}" for n in range(len(of))]


def test_shards_lengths_and_gaps_agree_with_the_rows(one):
    kind, rows, source = one
    assert [i for of in shards(source) for i in of] == list(range(len(source)))
    files = {**dict.fromkeys(("synthetic", "text", "own"), 1), "joined": 2 * FILES}
    assert len(shards(source)) == files.get(kind, FILES)
    whole = [trimmed(source.row(i)) for i in range(len(source))]
    assert lengths(source).tolist() == [row.input_ids.size for row in whole]
    for shard, of in enumerate(shards(source)):
        gaps = source.gaps(shard).tolist()
        if rows is not None and kind != "joined":
            assert gaps == [[i, *gap] for i, row in enumerate(whole[of.start : of.stop]) for gap in stretches(row)]
        assert source.gaps(shard, 10**6).tolist() in ([], gaps)


def stretches(row):
    """Return (begin, end) of each stretch without a target."""
    targets = row.targets()
    if targets is None:
        return []
    edges = np.flatnonzero(np.diff(np.concatenate([[True], targets, [True]]).astype(int)))
    return edges.reshape(-1, 2).tolist()


def test_rows_are_read_in_bulk(one):
    _, rows, source = one
    for size in {source.row(i).input_ids.size for i in range(len(source))}:
        into = np.zeros((1, size), dtype=np.int64)
        for i in range(len(source)):
            row = source.row(i)
            plain = row.input_ids.size == size and row.counted is row.labels is row.documents is None
            if source.fill([i], into):
                assert plain
                assert into[0].tolist() == row.input_ids.tolist()
    if rows is not None and rows == written("one length"):
        into = np.zeros((3, 9), dtype=np.int64)
        assert source.fill([30, 2, 17], into)
        assert into.tolist() == [rows[i]["input_ids"] for i in (30, 2, 17)]
        assert not source.fill([30, 2], into[:2, :8])


def test_totals_are_those_of_the_rows(one):
    kind, rows, source = one
    report = source.report()
    assert (report is None) == (kind in ("synthetic", "text", "laid out", "own"))
    if report is not None and rows is not None:
        sizes = [len(row["input_ids"]) for row in rows]
        assert (report["rows"], report["tokens"], report["longest"]) == (COUNT, sum(sizes), max(sizes))
        assert report["shards"] == len(shards(source))
        counted = [source.row(i).targets() for i in range(COUNT)]
        assert report["counted_tokens"] == sum(
            n if of is None else int(of.sum()) for n, of in zip(sizes, counted, strict=True)
        )
        assert report["lines_left_out"] == 0
        if kind not in ("arrow", "joined"):
            line = source.name(sizes.index(max(sizes))).rpartition(":")[2]
            assert report["longest_at"].endswith(f":{line}")


def test_an_epoch_on_any_ranks_has_every_row_once(one):
    """And the same rows come at the same positions, through a resume."""
    source = one[2]
    size, seq_len = len(source), max(2, *(source.row(i).input_ids.size for i in range(len(source))))

    def run(world, micro_batch, begin, until):
        ranks = [
            TrainingData(
                source, Order(size, 4, "window:2", shards(source)), seq_len=seq_len, micro_batch=micro_batch,
                accumulation=1, dp_rank=rank, dp_size=world, prefetch=0,
            )
            for rank in range(world)
        ]
        assert {rank.check_state(ranks[0].state(begin)) for rank in ranks} == {begin}
        streams, names = [rank.batches(begin) for rank in ranks], []
        while begin + len(names) < until:
            names += [name for stream in streams for batch in next(stream) for name in batch.samples]
        for stream in streams:
            stream.close()
        return names

    whole = run(1, 4, 0, 2 * size)
    assert sorted(whole[:size]) == sorted(map(source.name, range(size)))
    first = run(3, 2, 0, size)
    assert [*first, *run(2, 1, len(first), 2 * size)][: 2 * size] == whole[: 2 * size]
    source.want(list(range(len(shards(source)))), [])


@pytest.mark.parametrize("kind", STORED)
def test_the_fingerprint_is_of_the_content(tmp_path, kind):
    rows = written("ragged")
    first, again = (stored(kind, tmp_path / name, rows).fingerprint for name in "ab")
    assert first == again, "wherever it is"
    rows[20] = {**rows[20], "input_ids": [rows[20]["input_ids"][0] % 99 + 1, *rows[20]["input_ids"][1:]]}
    assert stored(kind, tmp_path / "c", rows).fingerprint != first
    labelled = [{**row, "labels": row["input_ids"]} for row in written("ragged")]
    found = {first, stored(kind, tmp_path / "d", labelled).fingerprint}
    labelled[3]["labels"] = [IGNORED, *labelled[3]["labels"][1:]]
    assert len({*found, stored(kind, tmp_path / "f", labelled).fingerprint}) == 3
    if kind in ("zipped", "prepared", "windowed"):
        assert stored("shards", tmp_path / "e", written("ragged")).fingerprint == first, "however it is stored"
