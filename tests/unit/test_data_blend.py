"""Blends and windows: every source in its own order, everything computed from the position."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_train.data.blend import BLOCK, BlendOrder, Joined, apportion, read_weights
from smp_train.data.order import Order, read_shuffle
from smp_train.data.pipelines.data_pipeline import Row, Source, TrainingData
from smp_train.errors import ConfigError, DataError


class Numbers(Source):
    def __init__(self, size, base=0):
        self.size, self.base = size, base
        self.fingerprint = f"{size} {base}"

    def __len__(self):
        return self.size

    def row(self, index):
        return Row(np.full(3, self.base + index))

    def name(self, index):
        return f"{index}"


def blend(weights, sizes=(40, 7), seed=5, shuffle="global"):
    joined = Joined([Numbers(size, 1000 * n) for n, size in enumerate(sizes)], [f"s{n}" for n in range(len(sizes))])
    return joined, BlendOrder(joined, weights, seed, shuffle)


def test_each_source_keeps_its_own_order():
    joined, order = blend([0.7, 0.3])
    positions = np.arange(1000)
    epochs, rows = order.rows(positions)
    for number, (size, start) in enumerate([(40, 0), (7, 40)]):
        mine = (rows >= start) & (rows < start + size)
        taken = rows[mine] - start
        alone = order.orders[number].rows(np.arange(taken.size))
        assert taken.tolist() == alone[1].tolist()
        assert epochs[mine].tolist() == alone[0].tolist()
    assert joined.name(41) == "s1/1"


class Known(Numbers):
    def report(self):
        return {"rows": self.size, "longest": self.size, "longest_at": "x:1"}


def test_the_longest_row_of_any_source_is_refused():
    joined = Joined([Known(40), Known(7, 1000)], ["a", "b"])
    share = {"micro_batch": 2, "accumulation": 1, "dp_rank": 0, "dp_size": 1, "order": Order(47)}
    with pytest.raises(DataError, match=r"x:1: .*40 .* 30"):
        TrainingData(joined, seq_len=30, long="error", **share)
    assert Joined([Known(40), Numbers(7)], ["a", "b"]).report() is None


def test_sizes_are_those_of_the_sources():
    joined, order = blend([0.7, 0.3])
    share = {"seq_len": 3, "micro_batch": 1, "accumulation": 1, "dp_rank": 0, "dp_size": 1}
    assert TrainingData(joined, order, **share).sizes() == {"s0": 40, "s1": 7}
    assert TrainingData(joined, Order(47), **share).sizes() == {"": 47}


@pytest.mark.parametrize("weights", [[0.7, 0.3], [7, 3], [1, 1, 1], [0.001, 0.999]])
def test_shares_are_the_weights(weights):
    _, order = blend(weights, sizes=[50] * len(weights))
    rows = order.rows(np.arange(3 * BLOCK))[1]
    shares = np.bincount(rows // 50, minlength=len(weights)) / rows.size
    assert np.abs(shares - np.array(weights) / sum(weights)).max() <= 1 / BLOCK
    # Spread, not in runs: any stretch of a thousand is near its share.
    some = np.bincount(rows[500:1500] // 50, minlength=len(weights)) / 1000
    assert np.abs(some - np.array(weights) / sum(weights)).max() < 0.06


@settings(max_examples=30, deadline=None)
@given(
    runs=st.lists(
        st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=5
    ),
    start=st.integers(0, 3 * BLOCK),
    shuffle=st.sampled_from(["global", "none", "window:1"]),
)
def test_any_history_of_a_blend_is_one_sequence(runs, start, shuffle):
    joined, order = blend([0.7, 0.3], shuffle=shuffle)
    consumed, seen = start, []
    for world, mb, acc, steps in runs:
        ranks = [
            TrainingData(
                joined, order, seq_len=3, micro_batch=mb, accumulation=acc, dp_rank=r, dp_size=world, prefetch=0
            )
            for r in range(world)
        ]
        for _ in range(steps):
            consumed = ranks[0].check_state(ranks[0].state(consumed))
            for micro in zip(*[rank.step(consumed) for rank in ranks], strict=True):
                seen += [name for batch in micro for name in batch.samples]
            consumed += ranks[0].global_batch
    rows = order.rows(np.arange(start, consumed))[1]
    assert seen == [joined.name(row) for row in rows.tolist()]


def test_other_weights_or_sources_are_refused_on_resume():
    def data(weights, sizes=(40, 7)):
        joined, order = blend(weights, sizes)
        return TrainingData(joined, order, seq_len=3, micro_batch=1, accumulation=1, dp_rank=0, dp_size=1)

    state = data([0.7, 0.3]).state(9)
    assert data([7, 3]).check_state(state) == 9
    for other in (data([0.6, 0.4]), data([0.7, 0.3], (40, 8))):
        with pytest.raises(DataError, match="blend"):
            other.check_state(state)


def test_allow_data_change_goes_on_and_says_so(caplog):
    def data(size):
        return TrainingData(Numbers(size), Order(size), seq_len=3, micro_batch=1, accumulation=1, dp_rank=0, dp_size=1)

    state = data(40).state(25)
    with pytest.raises(DataError, match="--allow_data_change 1"):
        data(41).check_state(state)
    assert data(41).check_state(state, allow_data_change=True) == 25
    assert "samples 40 in the checkpoint, 41 now" in caplog.text
    with pytest.raises(DataError, match="--seed"):
        data(40).check_state({**state, "seed": 9}, allow_data_change=True)


def test_weights_are_read(tmp_path):
    assert read_weights(["a:0.7", "b:3"]) == (["a", "b"], [0.7, 3])
    assert read_weights(["s3://x/a", "s3://x/b"]) == (["s3://x/a", "s3://x/b"], None)
    for one, again in [("a", "a/"), ("a", "./a"), ("s3://x/a", "s3://x/a/"), ("a", "a/1.json"), ("a", "link")]:
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("a")
        words = [word if word.startswith("s3:") else os.path.join(tmp_path, word) for word in (one, again)]
        for given_ in (words, [f"{words[0]}:0.5", f"{words[1]}:0.5"]):
            with pytest.raises(ConfigError, match="names one place twice; its rows would count twice"):
                read_weights(given_)
    assert read_weights(["s3://x/a", "s3://x/a/b"])[1] is None
    odd = tmp_path / "x:1"
    odd.mkdir()
    assert read_weights([str(odd)]) == ([str(odd)], None)
    for given_, why in [(["a:1", "b"], "give it a weight too"), (["a", "a"], "names one place twice"),
                        (["a:0", "b:1"], "above 0"), (["a:1", "b:nan"], "above 0")]:  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            read_weights(given_)
    with pytest.raises(ConfigError, match="below one in"):
        blend([1, 1e-6])
    assert apportion([1, 1, 1], 10) == [4, 3, 3]


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=9), window=st.integers(1, 10), seed=st.integers(0, 99))
def test_windows(sizes, window, seed):
    ends = np.cumsum(sizes).tolist()
    shards = [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    total = ends[-1]
    order = Order(total, seed, f"window:{window}", shards)
    epochs, rows = order.rows(np.arange(3 * total))
    orders = set()
    for epoch in range(3):
        here = rows[epoch * total : (epoch + 1) * total].tolist()
        assert sorted(here) == list(range(total))
        orders.add(tuple(here))
        position = epoch * total
        while position < (epoch + 1) * total:
            after, of = order.window(position)
            assert len(of) <= window
            within = {row for shard in of for row in shards[shard]}
            assert set(rows[position:after].tolist()) == within, "a window needs its own shards alone"
            position = after
    assert (epochs == np.repeat([0, 1, 2], total)).all()
    assert len(orders) > 1 or total < 5 or (len(sizes) < 3 and total < 9)
    # The same from the middle, one by one.
    assert [int(order.rows(p)[1]) for p in range(total, 2 * total)] == rows[total : 2 * total].tolist()


def test_windows_of_one_size_are_not_permuted_alike():
    shards = [range(100 * n, 100 * n + 100) for n in range(4)]
    rows = Order(400, 1, "window:1", shards).rows(np.arange(400))[1].reshape(4, 100) % 100
    assert len({tuple(row) for row in rows.tolist()}) == 4


def test_shuffles_are_read():
    assert [read_shuffle(text) for text in ("none", "global", "window:12")] == [0, -1, 12]
    for text in ("window", "window:0", "window:x", "local"):
        with pytest.raises(ConfigError, match=r"none, global, window:K"):
            read_shuffle(text)
