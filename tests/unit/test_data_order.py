import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_train.data.order import Order, permute
from smp_train.errors import ConfigError

SIZES = [*range(1, 70), 100, 127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 1025, 2047, 2048, 2049, 4096, 4097]


POWERS = [4**exponent for exponent in range(1, 8)]


@pytest.mark.parametrize("seed", [0, 12345])
def test_every_epoch_is_a_permutation(seed):
    for size in SIZES:
        for epoch in (0, 1, 7):
            rows = permute(np.arange(size), size, seed, np.full(size, epoch))
            assert sorted(rows.tolist()) == list(range(size)), (size, epoch)


def test_every_size_has_a_permutation():
    """All sizes to 4100: the network of their power of four, walked on until it is inside, and that is `permute`."""
    rng = np.random.default_rng(0)
    networks = {power: permute(np.arange(power), power, 3, np.zeros(power, int)).astype(int) for power in POWERS}
    for size in range(1, 4101):
        network = networks[next(power for power in POWERS if power >= size)]
        rows = network[:size]
        while (outside := rows >= size).any():
            rows = np.where(outside, network[rows], rows)
        assert np.bincount(rows, minlength=size).max() == 1, size
        some = rng.integers(0, size, 16)
        assert (permute(some, size, 3, np.zeros(16, int)) == rows[some]).all(), size


def test_one_position_is_the_same_alone_and_in_an_array():
    order = Order(37, seed=5)
    positions = np.arange(37 * 4).reshape(4, 37)
    epochs, rows = order.rows(positions)
    assert rows.shape == (4, 37)
    for position in range(37 * 4):
        assert order.rows(np.array([position])) == (epochs.flat[position], rows.flat[position])


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


def test_unshuffled_is_stored_order():
    epochs, rows = Order(4, seed=3, shuffle="none").rows(np.arange(9))
    assert rows.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert epochs.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_far_positions_and_large_sizes():
    order = Order(10**12, seed=0)
    position = 3 * 10**12 + 2**33
    epoch, row = order.rows(position)
    assert epoch == 3
    assert 0 <= row < 10**12


def test_places_are_even():
    """Over many epochs each row comes to each place equally often (chi-squared, 8 x 8 cells)."""
    size, epochs = 8, 4000
    rows = Order(size, seed=9).rows(np.arange(size * epochs))[1].reshape(epochs, size)
    counts = np.array([np.bincount(rows[:, place], minlength=size) for place in range(size)])
    expected = epochs / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # 49 degrees of freedom: mean 49, deviation 9.9.
    assert chi2 < 49 + 6 * 9.9


def test_neighbours_are_not_related():
    rows = Order(1 << 16, seed=4).rows(np.arange(1 << 16))[1].astype(float)
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-(2**63), 2**63), epoch=st.integers(0, 2**40))
def test_permutation_for_any_key(size, seed, epoch):
    rows = permute(np.arange(size), size, seed, np.full(size, epoch))
    assert np.array_equal(np.sort(rows), np.arange(size))


def test_bad_arguments():
    with pytest.raises(ConfigError, match="no row"):
        Order(0)
    with pytest.raises(ConfigError, match="--shuffle sideways"):
        Order(3, shuffle="sideways")
