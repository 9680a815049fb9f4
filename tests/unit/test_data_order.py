"""Every epoch is a permutation that (seed, epoch) names; windows of shards; every position costs the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_train.data.order import Order, permute, read_shuffle
from smp_train.errors import ConfigError


def test_every_size_has_a_permutation():
    """All sizes to 4100: the network of their power of four, walked on until it is inside, and that is `permute`."""
    rng = np.random.default_rng(0)
    powers = [4**exponent for exponent in range(1, 8)]
    networks = {power: permute(np.arange(power), power, 3, np.zeros(power, int)).astype(int) for power in powers}
    for size in range(1, 4101):
        network = networks[next(power for power in powers if power >= size)]
        rows = network[:size]
        while (outside := rows >= size).any():
            rows = np.where(outside, network[rows], rows)
        assert np.bincount(rows, minlength=size).max() == 1, size
        some = rng.integers(0, size, 16)
        assert (permute(some, size, 3, np.zeros(16, int)) == rows[some]).all(), size


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 2**40))
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


def test_seed_and_epoch_change_the_order():
    first = Order(1000, seed=1).rows(np.arange(2000))[1]
    assert (first[:1000] != first[1000:]).mean() > 0.9
    assert (Order(1000, seed=2).rows(np.arange(1000))[1] != first[:1000]).mean() > 0.9


def test_the_order_of_a_seed_never_changes():
    # Runs of earlier versions resume on these: a change here needs a new STATE_VERSION.
    assert Order(10, seed=12345).rows(np.arange(20))[1].tolist() == [
        *[3, 4, 2, 6, 0, 1, 8, 5, 9, 7],
        *[0, 8, 4, 3, 5, 9, 7, 1, 2, 6],
    ]
    epochs, rows = Order(4, seed=3, shuffle="none").rows(np.arange(9))
    assert rows.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0], "stored order"
    assert epochs.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_places_are_even_and_neighbours_unrelated():
    """Over many epochs each row comes to each place equally often (chi-squared, 8 x 8 cells)."""
    size, epochs = 8, 4000
    rows = Order(size, seed=9).rows(np.arange(size * epochs))[1].reshape(epochs, size)
    counts = np.array([np.bincount(rows[:, place], minlength=size) for place in range(size)])
    expected = epochs / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # 49 degrees of freedom: mean 49, deviation 9.9.
    assert chi2 < 49 + 6 * 9.9
    rows = Order(1 << 16, seed=4).rows(np.arange(1 << 16))[1].astype(float)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02


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


def test_windows_of_one_size_have_permutations_of_their_own():
    shards = [range(100 * n, 100 * n + 100) for n in range(4)]
    rows = Order(400, 1, "window:1", shards).rows(np.arange(400))[1].reshape(4, 100) % 100
    assert len({tuple(row) for row in rows.tolist()}) == 4


def test_flags_are_read():
    assert [read_shuffle(text) for text in ("none", "global", "window:12")] == [0, -1, 12]
    for text in ("window", "window:0", "window:x", "local", "sideways"):
        with pytest.raises(ConfigError, match=rf"--shuffle {text}: .*window:K"):
            Order(3, shuffle=text)
    with pytest.raises(ConfigError, match="--training_dir"):
        Order(0)
