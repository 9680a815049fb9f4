"""Blends: every source in its own order, everything computed from the position."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_train.data.blend import BLOCK, BlendOrder, Joined, apportion, read_weights
from smp_train.data.order import Order
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


def test_the_log_says_which_shares_weights_of_any_sum_are():
    assert blend([0.7, 0.4])[1].shares() == "63.64 % from s0, 36.36 % from s1"


class Known(Numbers):
    def report(self):
        return {"rows": self.size, "longest": self.size, "longest_at": "x:1"}


def test_the_longest_row_of_any_source_is_refused():
    joined = Joined([Known(40), Known(7, 1000)], ["a", "b"])
    share = {"micro_batch": 2, "accumulation": 1, "dp_rank": 0, "dp_size": 1, "order": Order(47)}
    with pytest.raises(DataError, match=r"x:1: .*40 .* 30"):
        TrainingData(joined, seq_len=30, long="error", **share)
    assert Joined([Known(40), Numbers(7)], ["a", "b"]).report() is None


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


def one_rank(source, order):
    return TrainingData(source, order, seq_len=3, micro_batch=1, accumulation=1, dp_rank=0, dp_size=1)


def test_other_weights_or_sources_are_refused_on_resume():
    data = one_rank(*blend([0.7, 0.3]))
    assert data.sizes() == {"s0": 40, "s1": 7}
    assert one_rank(data.source, Order(47)).sizes() == {"": 47}
    assert one_rank(*blend([7, 3])).check_state(data.state(9)) == 9
    for other in (blend([0.6, 0.4]), blend([0.7, 0.3], (40, 8))):
        with pytest.raises(DataError, match="blend"):
            one_rank(*other).check_state(data.state(9))


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
    weights = [0.54, 0.17, 0.8, 0.365]
    assert apportion(weights, BLOCK) == [2880, 907, 4267, 1946], "those of a run that resumes, and of its audit"
