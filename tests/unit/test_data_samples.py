"""Which sample is at a position, and which tokens a sample has: permutations, blends, cutting, joining and packing."""


from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_train.arguments.sources import read_weights
from smp_train.data import samples
from smp_train.data.batch import collate
from smp_train.data.blend import BLOCK, BlendOrder, Joined, apportion
from smp_train.data.convert import open_samples
from smp_train.data.indexed import ValidationData
from smp_train.data.kinds import Kind
from smp_train.data.open_data import layout
from smp_train.data.order import Order, permute
from smp_train.data.samples import Sample, Samples, pack, window
from smp_train.data.source import IGNORED, Row
from smp_train.errors import ConfigError, DataError
from tests.shards import Documents, opened, training, write_shard


@settings(max_examples=100, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 2**40))
def test_permutation_for_any_key(size, seed, epoch):
    rows = permute(np.arange(size), size, seed, np.full(size, epoch))
    assert np.array_equal(np.sort(rows), np.arange(size))


def test_one_position_is_the_same_alone_and_in_an_array():
    order = Order(37, seed=5)
    epochs, rows = order.rows(np.arange(37 * 4).reshape(4, 37))
    assert rows.shape == (4, 37)
    for position in range(37 * 4):
        assert order.rows(np.array([position])) == (epochs.flat[position], rows.flat[position])
    epoch, row = Order(10**12, seed=0).rows(3 * 10**12 + 2**33)
    assert epoch == 3, "far positions and large sizes"
    assert 0 <= row < 10**12


def test_the_order_of_a_seed_never_changes():
    first = Order(1000, seed=1).rows(np.arange(2000))[1]
    assert (first[:1000] != first[1000:]).mean() > 0.9
    assert (Order(1000, seed=2).rows(np.arange(1000))[1] != first[:1000]).mean() > 0.9
    # A change of this order needs a new STATE_VERSION in loader.py.
    known = [3, 4, 2, 6, 0, 1, 8, 5, 9, 7, 0, 8, 4, 3, 5, 9, 7, 1, 2, 6]
    assert Order(10, seed=12345).rows(np.arange(20))[1].tolist() == known
    epochs, rows = Order(4, seed=3, shuffle="none").rows(np.arange(9))
    assert rows.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0], "stored order"
    assert epochs.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_places_are_even_and_neighbours_unrelated():
    """Over many epochs each row comes to each place equally often: chi-squared of 49 degrees, 49 with deviation 9.9."""
    rows = Order(8, seed=9).rows(np.arange(8 * 4000))[1].reshape(4000, 8)
    counts = np.array([np.bincount(column, minlength=8) for column in rows.T])
    assert ((counts - 500) ** 2 / 500).sum() < 49 + 6 * 9.9
    rows = Order(1 << 16, seed=4).rows(np.arange(1 << 16))[1].astype(float)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02


def blend(weights, sizes=(40, 7), seed=5, shuffle="global"):
    sources = [Samples(Documents([3] * size), 3) for size in sizes]
    joined = Joined(sources, [f"s{number}" for number in range(len(sizes))])
    return joined, BlendOrder(joined, weights, seed, shuffle)


def test_each_source_keeps_its_own_order():
    joined, order = blend([0.7, 0.3])
    epochs, rows = order.rows(np.arange(1000))
    for number, (size, start) in enumerate([(40, 0), (7, 40)]):
        selected = (rows >= start) & (rows < start + size)
        drawn = rows[selected] - start
        alone = order.orders[number].rows(np.arange(drawn.size))
        assert drawn.tolist() == alone[1].tolist()
        assert epochs[selected].tolist() == alone[0].tolist()
    assert joined.sample(41).name == "s1/d:2"
    assert blend([0.7, 0.4])[1].shares() == "63.64 % from s0, 36.36 % from s1"


@pytest.mark.parametrize("weights", [[0.7, 0.3], [7, 3], [1, 1, 1], [0.001, 0.999]])
def test_shares_are_the_weights(weights):
    _, order = blend(weights, sizes=[50] * len(weights))
    rows = order.rows(np.arange(3 * BLOCK))[1]
    shares = np.bincount(rows // 50, minlength=len(weights)) / rows.size
    assert np.abs(shares - np.array(weights) / sum(weights)).max() <= 1 / BLOCK
    # Spread, not in runs: any stretch of a thousand is near its share.
    some = np.bincount(rows[500:1500] // 50, minlength=len(weights)) / 1000
    assert np.abs(some - np.array(weights) / sum(weights)).max() < 0.06


def test_other_weights_or_sources_are_refused_on_resume():
    def data(*options):
        joined, order = blend(*options)
        return training(joined, 3, order=order)

    first = data([0.7, 0.3])
    assert first.sizes() == {"s0": 40, "s1": 7}
    assert data([7, 3]).restore_state(first.state(9)) == 9
    for other in ([0.6, 0.4],), ([0.7, 0.3], (40, 8)):
        with pytest.raises(DataError, match="blend"):
            data(*other).restore_state(first.state(9))


def test_weights_are_read(tmp_path):
    assert read_weights(["a:0.7", "b:3"]) == (["a", "b"], [0.7, 3])
    assert read_weights(["s3://x/a", "s3://x/b"]) == (["s3://x/a", "s3://x/b"], None)
    odd = tmp_path / "x:1"
    odd.mkdir()
    assert read_weights([str(odd)]) == ([str(odd)], None)
    for sources, reason in [(["a:1", "b"], "b: has no weight"), (["a:0", "b:1"], "above 0"), (["a:1", "b:nan"], "0")]:
        with pytest.raises(ConfigError, match=reason):
            read_weights(sources)
    with pytest.raises(ConfigError, match="below one in"):
        blend([1, 1e-6])
    assert apportion([1, 1, 1], 10) == [4, 3, 3]
    weights = [0.54, 0.17, 0.8, 0.365]
    assert apportion(weights, BLOCK) == [2880, 907, 4267, 1946], "those of a run that resumes, and of its audit"
    with pytest.raises(ConfigError, match="--training_dir"):
        Order(0)


def everything(data):
    return [data.sample(index).row.input_ids.tolist() for index in range(len(data))]


@settings(max_examples=150, deadline=None)
@given(sizes=st.lists(st.integers(2, 40), min_size=1, max_size=14), seq_len=st.integers(2, 17),
       short=st.sampled_from(["pad", "concat", "pack"]), table=st.sampled_from([3, 1 << 22]))  # fmt: skip
def test_every_token_is_in_one_sample(sizes, seq_len, short, table):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "TABLE_ROWS", table)
        made = Samples(Documents(sizes), seq_len, long="split", short=short)
        tokens = everything(made)
        assert len({made.sample(index).name for index in range(len(made))}) == len(made)
    assert all(2 <= len(sample) <= seq_len for sample in tokens)
    seen = sorted(token for sample in tokens for token in sample)
    assert len(seen) == len(set(seen))
    # Single tokens at the end of a document (or, joined, of all) are left out: they have no token to predict.
    ends = np.cumsum(sizes).tolist()
    if short == "concat":
        left_out = {sum(sizes)} if sum(sizes) % seq_len == 1 else set()
    else:
        left_out = {end for end, size in zip(ends, sizes, strict=True) if size % seq_len == 1}
    assert set(range(1, sum(sizes) + 1)) - set(seen) == left_out


def test_concat_joins_across_shards():
    made = Samples(Documents([5, 2, 4, 3]), 4, long="split", short="concat")
    assert everything(made) == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14]]
    assert made.sample(1).name == "d:1[4:5]+d:2+d:3[0:1]"
    assert all(made.sample(index).row.documents is None for index in range(4)), "joined documents see each other"


def test_pack_keeps_documents_whole_and_apart():
    made = Samples(Documents([5, 2, 3, 6, 9]), 8, long="split", short="pack")
    assert everything(made) == [
        [1, 2, 3, 4, 5, 8, 9, 10],
        [6, 7, 11, 12, 13, 14, 15, 16],
        [17, 18, 19, 20, 21, 22, 23, 24],
    ]
    batch = collate([made.sample(0), sample([6, 7])], 8)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch.labels.tolist() == [[-100, 2, 3, 4, 5, -100, 9, 10], [-100, 7] + [-100] * 6]
    assert batch.counted_tokens() == 4 + 2 + 1
    assert (batch.documents[0].tolist(), batch.documents[1]) == ([0, 5, 8, 10, 16], 6)


def best_fit(sizes, capacity):
    """Return the number of bins of best-fit decreasing, one item at a time."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms[rooms.index(min(fitting))] -= size
        else:
            rooms.append(capacity - size)
    return len(rooms)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_bins_are_those_of_best_fit_decreasing(sizes):
    order, bounds = pack(np.array(sizes), 30)
    bins = [order[a:b].tolist() for a, b in pairwise(bounds.tolist())]
    assert sorted(item for items in bins for item in items) == list(range(len(sizes)))
    assert all(0 < sum(sizes[item] for item in items) <= 30 for items in bins)
    assert len(bins) == best_fit(sizes, 30)
    assert [items[0] for items in bins] == sorted(items[0] for items in bins), "rows near each other stay so"


def answer(size, targets):
    """Return a row in which the tokens at ``targets`` carry loss."""
    labels = np.full(size, IGNORED)
    labels[targets] = 7
    return Row(np.arange(size), labels)


def test_the_lost_answer_tokens_of_truncated_rows_are_counted(tmp_path):
    rows = [([1] * 9, [1] * 9, [-100, 1, *[-100] * 3, *[1] * 4]), ([1] * 3, [1] * 3, [1] * 3)]
    write_shard(tmp_path / "a.json", rows)
    for short in ("pad", "pack"):
        data = training(opened(tmp_path), 6, 2, long="truncate", short=short)
        batches = [batch for step in data.batches(0) for batch in step] if data.end else next(data.batches(0))
        assert sum(batch.truncated for batch in batches) >= 1
        assert sum(batch.truncated_targets for batch in batches) == 3 * sum(batch.truncated for batch in batches)
    assert data.samples.sample(0).name == "a.json:1[0:6]"
    split = Samples(opened(tmp_path), 6, long="split")
    assert sum(split.sample(index).truncated for index in range(len(split))) == 0


def test_a_crop_has_a_target_and_depends_on_seed_epoch_and_row_alone():
    row = answer(12, [0, 10, 11])
    assert {window(row, "d", 4, "crop", str(key)) for key in range(60)} == {(7, 11), (8, 12)}
    assert {window(Row(np.arange(10)), "", 8, "crop", str(key))[0] for key in range(60)} == {0, 1, 2}

    def data(seed=1, rank=0, world=1, mb=2):
        return training(Documents([50] * 4), 8, mb, order=Order(4, seed), dp_rank=rank, dp_size=world, long="crop")

    def names(ranks):
        streams = [rank.batches(0) for rank in ranks]
        return [name for _ in range(3) for stream in streams for batch in next(stream) for name in batch.samples]

    one = names([data(mb=4)])
    assert names([data(rank=0, world=2), data(rank=1, world=2)]) == one
    assert len(set(one)) == 12, "another window in each epoch"
    assert names([data(seed=2, mb=4)]) != one
    held = ValidationData(Samples(Documents([50] * 4), 8, long="crop"), seq_len=8, micro_batch=4, dp_rank=0, dp_size=1)
    first, again = ([batch.input_ids.tolist() for batch in held.batches()] for _ in range(2))
    assert first == again


def test_rows_that_are_too_long(tmp_path):
    source = Documents([5, 12])
    for short in ("pad", "pack"):
        with pytest.raises(DataError, match=r"d:2: .*12 .* 8 .*--max_context_width"):
            everything(Samples(source, 8, long="error", short=short))
    write_shard(tmp_path / "a.json", [[1] * 5, [1] * 9])
    with pytest.raises(DataError, match=r"a\.json:2: .*9 .* 8 .*--max_context_width"):
        Samples(opened(tmp_path), 8, long="error")


def test_resume_with_another_layout_is_refused(tmp_path, caplog):
    write_shard(tmp_path / "a.json", [[1] * size for size in (30, 7, 9)])
    source = opened(tmp_path)

    def data(seq_len, short="pad", long="split"):
        return training(source, seq_len, long=long, short=short)

    state = data(8, "concat").state(3)
    assert data(8, "concat").restore_state(state) == 3
    for other in (data(9, "concat"), data(8, "pack"), data(8), data(8, long="truncate")):
        with pytest.raises(DataError, match=r"made by --short concat --long split --max_context_width 8"):
            other.restore_state(state)
    assert data(40, long="truncate").restore_state(data(30, long="split").state(3)) == 3, "neither cuts a row"
    assert data(9, long="truncate").restore_state(data(8, long="truncate").state(3), allow_data_change=True) == 3
    assert "--max_context_width 8 in the checkpoint" in caplog.text


def test_tables_of_samples_are_made_once_and_again_after_damage(tmp_path, monkeypatch):
    write_shard(tmp_path / "a.json", [[1] * (2 + number % 29) for number in range(100)])
    monkeypatch.setattr(samples, "TABLE_ROWS", 40)
    source, layout = opened(tmp_path), {"long": "split", "short": "pack"}

    def names(made):
        return [made.sample(index).name for index in range(len(made))]

    in_memory, first = Samples(source, 16, **layout), open_samples(source, 16, **layout)
    tables = sorted(tmp_path.glob(".smp_train_cache/*.tab"))
    written = [path.stat().st_mtime_ns for path in tables]
    assert len(tables) == 3
    assert names(first) == names(open_samples(source, 16, **layout)) == names(in_memory)
    assert [path.stat().st_mtime_ns for path in tables] == written, "made once"
    assert first.fingerprint == in_memory.fingerprint
    content = bytearray(tables[0].read_bytes())
    content[-200] ^= 1
    tables[0].write_bytes(content)
    assert names(open_samples(source, 16, **layout)) == names(in_memory)


def sample(ids, labels=None):
    return Sample(Row(np.array(ids), labels and np.array(labels)), "a:1")


def test_samples_become_a_batch():
    batch = collate([Sample(sample([1, 2, 3, 4]).row, "a:1", 1, 2), sample([5, 6, 7, 8])], 4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.labels is batch.input_ids, "nothing is copied where nothing differs"
    assert (batch.samples, batch.truncated, batch.truncated_targets) == (["a:1", "a:1"], 1, 2)
    batch = collate([sample([1, 2, 3, 4]), sample([5, 6]), sample([7, 8, 9], [-100, -100, 3])], 4, size=4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0], [7, 8, 9, 0], [0] * 4]
    assert batch.labels.tolist() == [[1, 2, 3, 4], [5, 6, -100, -100], [-100, -100, 3, -100], [-100] * 4]
    assert batch.samples == ["a:1"] * 3 + [""]
    assert batch.counted_tokens() == 3 + 1 + 1
    assert collate([], 4, size=2).counted_tokens() == 0


@pytest.mark.parametrize(
    ("kind", "short", "layout_by_default"),
    [("chats", "pack", ("truncate", "pack")), ("completions", "pack", ("truncate", "pack")),
     ("chats", "concat", ("split", "concat")), ("chats", None, ("truncate", "pad")),
     ("tokens", "pack", ("split", "pack")), ("text", None, ("split", "concat"))],
)  # fmt: skip
def test_long_records_are_truncated_where_a_piece_would_have_no_prompt(
    kind: str, short: str | None, layout_by_default: tuple[str, str]
) -> None:
    assert layout(cast(Any, SimpleNamespace(short=short, long=None)), Kind(kind, ())) == layout_by_default
