"""Labels of shards, prepared tokens and Arrow data sets: what they may be, and that they reach the batch unchanged."""

import re

import numpy as np
import pytest

from smp_train import distributed
from smp_train.cli import main
from smp_train.data.blend import Joined
from smp_train.data.layout import lay_out
from smp_train.data.learnable import leave_out_unlearnable
from smp_train.data.open_data import open_place
from smp_train.data.order import Order
from smp_train.data.pipelines.data_pipeline import ValidationData
from smp_train.data.source import trimmed
from smp_train.data.token_cache import BESIDE
from smp_train.data.windowed import Windowed
from smp_train.errors import DataError
from tests.shards import training, write_shard

VOCAB = 100


def dialogue(count, seed=0, *, masked=False, most=12):
    """Return rows whose labels are ids, -100, or other ids, every one with something to learn."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        n = int(rng.integers(3, most))
        ids = rng.integers(1, VOCAB, n)
        labels = np.where(rng.random(n) < 0.6, -100, np.where(rng.random(n) < 0.5, ids, rng.integers(0, VOCAB, n)))
        labels[-1] = ids[-1]
        row = {"input_ids": ids.tolist(), "attention_mask": [1] * n, "labels": labels.tolist()}
        if masked:
            pad = int(rng.integers(0, 3))
            row = {key: [0] * pad + values for key, values in row.items()}
        rows.append(row)
    return rows


def write(folder, rows, shards=2, suffix=".json"):
    """Write rows as shards; return the folder."""
    size = -(-len(rows) // shards)
    for number in range(shards):
        write_shard(folder / f"{number}{suffix}", rows[number * size : (number + 1) * size])
    return folder


def save(folder, rows, shards=2, kind="int64"):
    """Write rows as `save_to_disk` does."""
    datasets = pytest.importorskip("datasets")
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    features = datasets.Features({key: datasets.Sequence(datasets.Value(kind)) for key in columns})
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(folder), num_shards=shards)
    return folder


def opened(folder, **options):
    return open_place(str(folder), vocab_size=VOCAB, **options)


def without(rows, field):
    return [{key: values for key, values in row.items() if key != field} for row in rows]


def refused_and_skipped(folder, name, capsys):
    """Check that one row of a data set is named by a run and by ``data verify``; return the others."""
    with pytest.raises(DataError, match=rf"{name}: \S"):
        opened(folder)
    assert main(["data", "verify", str(folder), "--vocab_size", str(VOCAB)]) == 3
    assert f"{name}: " in capsys.readouterr().out
    kept = opened(folder, max_bad=0.5)
    return [kept.row(index) for index in range(len(kept))]


def test_bad_labels_are_refused_with_file_and_line(tmp_path, capsys):
    rows = dialogue(3)
    rows[1]["labels"][0] = VOCAB
    write(tmp_path, rows, 1)
    kept = refused_and_skipped(tmp_path, "0.json:2", capsys)
    assert [row.labels.tolist() for row in kept] == [rows[n]["labels"] for n in (0, 2)]


@pytest.mark.parametrize("has", [True, False])
def test_a_shard_has_labels_in_all_rows_or_in_none(tmp_path, has, capsys):
    rows = dialogue(4)
    mixed = [rows[0], *without(rows[1:2], "labels"), *rows[2:]] if has else [*without(rows[:3], "labels"), rows[3]]
    write(tmp_path, mixed, 1)
    kept = refused_and_skipped(tmp_path, f"0.json:{2 if has else 4}", capsys)
    assert [row.labels is not None for row in kept] == [has] * 3


def test_a_folder_has_labels_in_all_shards_or_in_none(tmp_path, capsys):
    rows = dialogue(6)
    write(tmp_path, rows[:3] + without(rows[3:], "labels"), 2)
    with pytest.raises(DataError, match=r"1\.json: has no labels, but .*0\.json has"):
        opened(tmp_path)
    assert main(["data", "verify", str(tmp_path)]) == 3
    assert "1.json: has no labels" in capsys.readouterr().out


BAD_ARROW = {
    "shorter": [1], "outside": [1, 2, VOCAB], "negative": [1, -1, 2], "null": None, "nothing": [-100, -100, -100],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ARROW)
def test_bad_labels_of_arrow_are_refused_with_file_and_row(tmp_path, name, capsys):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]} for _ in range(4)]
    rows[2] = {**rows[2], "labels": BAD_ARROW[name]}
    save(tmp_path, rows, shards=1)
    kept = refused_and_skipped(tmp_path, "row 3", capsys)
    assert [row.labels.tolist() for row in kept] == [[-100, 2, 3]] * 3
    source = lay_out(opened(tmp_path, max_bad=0.5), 2, long="split", short="pad")
    assert leave_out_unlearnable(source, 2, long="split", max_bad=None)


@pytest.mark.parametrize("values", [[1, 2, 3], ["a", "b", "c"], [[0.5, 1.0, 2.0]] * 3])
def test_labels_that_are_no_lists_of_integers_are_refused(tmp_path, values):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 3, "labels": values}).save_to_disk(str(tmp_path))
    with pytest.raises(DataError, match="labels"):
        opened(tmp_path)


def test_data_without_labels_takes_no_more_room(tmp_path):
    rows = without(dialogue(20), "labels")
    opened(write(tmp_path, rows, 1))
    (tok,) = (tmp_path / BESIDE).glob("*.tok")
    assert tok.stat().st_size == 2 * sum(len(row["input_ids"]) for row in rows)


SPAN = re.compile(r"^(.*?)(?:\[(\d+):(\d+)\])?$")
LAYOUTS = [("truncate", "pad"), ("crop", "pad"), ("split", "pad"), ("truncate", "concat"), ("split", "concat"),
           ("truncate", "pack"), ("split", "pack")]  # fmt: skip


def expected(reference, name, long, short, seq_len):
    """Return the ids and labels of a sample by its name, worked out from the rows themselves."""
    ids, labels = [], []
    for part in name.split("+"):
        which, begin, end = SPAN.match(part).groups()
        row = reference[which]
        if long != "truncate" or short != "pad" or row.input_ids.size > seq_len:
            row = trimmed(row)
        begin, end = int(begin or 0), min(int(end or row.input_ids.size), int(begin or 0) + seq_len)
        row = row.cut(begin, end)
        found = (row.input_ids if row.labels is None else row.labels).astype(np.int64)
        found = np.where(row.counted if row.counted is not None else True, found, -100).tolist()
        if short == "pack" and ids:
            found[0] = -100
        ids += row.input_ids.tolist()
        labels += found
    filler = seq_len - len(ids)
    return ids + [0] * filler, labels + [-100] * filler


@pytest.mark.parametrize("seq_len", [3, 6])
@pytest.mark.parametrize(("long", "short"), LAYOUTS)
@pytest.mark.parametrize("kind", ["shards", "masked shards", "arrow", "masked arrow", "holes"])
def test_every_sample_has_its_rows_labels_and_something_to_learn(tmp_path, kind, long, short, seq_len):
    """Of whatever cut: the labels are those of the rows, and what has no target is found before it is read."""
    rows = dialogue(40, seed=seq_len, masked=kind != "shards" and kind != "arrow")
    if kind == "holes":
        rows = without(rows, "labels")
        for row in rows:
            row["attention_mask"] = [int(one % 4 == 0 and one != 0) for one in row["input_ids"]]
            row["attention_mask"][-1] = 1
    source = opened(save(tmp_path, rows) if "arrow" in kind else write(tmp_path, rows))
    if short == "pack" and kind == "holes":
        with pytest.raises(DataError, match="cannot be packed"):
            lay_out(source, seq_len, long=long, short=short)
        return
    reference = {source.name(index): source.row(index) for index in range(len(source))}
    whole = lay_out(source, seq_len, long=long, short=short)
    kept = leave_out_unlearnable(whole, seq_len, long=long, max_bad=1)
    names = []
    for index in range(len(kept)):
        (batch,) = training(kept, seq_len, long=long).step(index)
        names += batch.samples
        ids, labels = expected(reference, batch.samples[0], long, short, seq_len)
        assert batch.input_ids[0].tolist() == ids
        assert batch.labels[0, 1:].tolist() == labels[1:]
        assert batch.counted_tokens() > 0
    of_whole = [whole.name(index) for index in range(len(whole))]
    if long != "crop":
        lost = [name for name in of_whole if name not in names]
        for name in lost:
            _, labels = expected(reference, name, long, short, seq_len)
            assert all(label == -100 for label in labels[1:]), name
        if lost:
            with pytest.raises(DataError, match=re.escape(f"/data/chats: {lost[0]}")):
                leave_out_unlearnable(whole, seq_len, long=long, max_bad=None, place="/data/chats")
    assert len(names) == len(kept) == len(set(names))
    assert [index for shard in kept.shards for index in shard] == list(range(len(kept)))
    assert (kept.fingerprint == whole.fingerprint) == (len(kept) == len(whole))


def test_a_set_with_nothing_to_learn_is_refused(tmp_path):
    source = opened(write(tmp_path, [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, -100, 4]}] * 4))
    for max_bad in (None, 1.0):
        with pytest.raises(DataError, match=r"0\.json:1: "):
            leave_out_unlearnable(source, 3, long="truncate", max_bad=max_bad)


def test_windows_know_what_has_nothing_to_learn(tmp_path):
    """The order of windows is fixed before their rows are at hand."""
    rows = dialogue(60)
    place = str(write(tmp_path / "data", rows, 10))
    for long, short in (("truncate", "pad"), ("split", "concat"), ("split", "pack")):
        ahead = open_place(
            place, vocab_size=VOCAB, cache_dir=str(tmp_path / "cache"), window=2, ranks=distributed.detect()
        )
        assert isinstance(ahead, Windowed)
        one, other = (
            leave_out_unlearnable(lay_out(source, 4, long=long, short=short), 4, long=long, max_bad=1)
            for source in (ahead, open_place(place, vocab_size=VOCAB, cache_dir=str(tmp_path / "whole")))
        )
        assert one.fingerprint == other.fingerprint
        data = training(one, 4, 2, order=Order(len(one), 3, "window:2", one.shards), prefetch=2, long=long)
        reference = {other.name(index): other.row(index) for index in range(len(other))}
        seen, steps = set(), data.batches()
        for _ in range(-(-len(one) // 2)):
            for batch in next(steps):
                for name, ids in zip(batch.samples, batch.input_ids.tolist(), strict=True):
                    seen.add(name)
                    assert reference[name].input_ids[:4].tolist() == ids[: min(4, reference[name].input_ids.size)]
        steps.close()
        assert seen == set(reference)


def test_a_blend_of_sources_with_and_without_labels(tmp_path):
    rows = dialogue(4)
    with_labels = opened(write(tmp_path / "a", rows, 1))
    plain = opened(write(tmp_path / "b", without(rows, "labels"), 1))
    (batch,) = training(Joined([with_labels, plain], ["a", "b"]), 12, 8).step(0)
    for place, row in enumerate(rows):
        n = len(row["input_ids"])
        assert batch.labels[place, :n].tolist() == row["labels"]
        assert batch.labels[place + 4, :n].tolist() == row["input_ids"]
        assert (batch.labels[place + 4, n:] == -100).all()


def test_validation_counts_labels_alone(tmp_path):
    rows = dialogue(7)
    held = ValidationData(opened(write(tmp_path, rows)), seq_len=12, micro_batch=4, dp_rank=0, dp_size=1)
    counted = sum(batch.counted_tokens() for batch in held.batches())
    assert counted == sum(label != -100 for row in rows for label in row["labels"][1:])


def test_inspect_says_what_share_is_counted(tmp_path, capsys):
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, -100]}] * 6
    for folder in (write(tmp_path / "shards", rows), save(tmp_path / "arrow", rows)):
        assert main(["data", "inspect", str(folder)]) == 0
        said = capsys.readouterr().out
        assert "counted: 6 tokens (25.00%)" in said
        assert "labels: in 6 of 6 rows" in said


def test_verify_names_rows_that_a_context_leaves_nothing_of(tmp_path, capsys):
    rows = [{"input_ids": [1, 2, 3, 4, 5], "labels": [-100] * last + [5] * (5 - last)} for last in (1, 2, 3, 4)]
    folder = write(tmp_path, rows, 1)
    assert main(["data", "verify", str(folder), "--max_context_width", "5"]) == 0
    assert main(["data", "verify", str(folder), "--max_context_width", "3"]) == 3
    said = capsys.readouterr().out
    assert [f"{folder}/0.json:{line}: " in said for line in (1, 2, 3, 4)] == [False, False, True, True]
