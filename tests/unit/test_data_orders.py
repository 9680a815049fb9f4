"""Every epoch is a permutation that (seed, epoch) names; blends draw from each source by weight."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smp_train.arguments.sources import read_weights
from smp_train.data.blend import BLOCK, BlendOrder, Joined, apportion
from smp_train.data.order import Order, permute
from smp_train.data.samples import Samples
from smp_train.errors import ConfigError, DataError
from tests.shards import Documents, training


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


def test_the_order_of_a_seed_never_changes():
    first = Order(1000, seed=1).rows(np.arange(2000))[1]
    assert (first[:1000] != first[1000:]).mean() > 0.9
    assert (Order(1000, seed=2).rows(np.arange(1000))[1] != first[:1000]).mean() > 0.9
    # Runs of earlier versions resume on these: a change here needs a new STATE_VERSION of loader.py.
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
    counts = np.array([np.bincount(rows[:, column], minlength=size) for column in range(size)])
    expected = epochs / size
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # 49 degrees of freedom: mean 49, deviation 9.9.
    assert chi2 < 49 + 6 * 9.9
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
    assert data([7, 3]).check_state(first.state(9)) == 9
    for other in ([0.6, 0.4],), ([0.7, 0.3], (40, 8)):
        with pytest.raises(DataError, match="blend"):
            data(*other).check_state(first.state(9))


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
