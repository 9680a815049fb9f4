"""The schedules where others go wrong: the first update, the ends of warm-up and plateau, the floor."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smp_train.errors import ConfigError
from smp_train.learning_rates import STYLES, schedule

DECAYING = [style for style in STYLES if style != "constant"]
PEAK, FLOOR = 3e-4, 3e-5


def build(style, **overrides):
    settings = {"lr": PEAK, "min_lr": FLOOR, "max_steps": 1000, "warmup": 0.1, "plateau": 0.0}
    return schedule(style, **{**settings, **overrides})


@pytest.mark.parametrize("style", STYLES)
def test_warm_up_rises_by_equal_parts_also_beyond_the_end_of_the_run(style):
    rates = [build(style)(step) for step in range(100)]
    assert rates == pytest.approx([PEAK * (step + 1) / 100 for step in range(100)], rel=1e-15)
    assert rates[99] == PEAK == build(style, warmup=0)(0)
    short, long = build(style, warmup=2000, max_steps=5), build(style, warmup=2000, max_steps=100_000)
    assert [short(step) for step in range(5)] == [long(step) for step in range(5)]
    plateau = build(style, warmup=2, plateau=2000, max_steps=5)
    assert [plateau(step) for step in range(1, 5)] == [PEAK] * 4


@pytest.mark.parametrize("style", DECAYING)
def test_the_plateau_holds_the_rate_and_the_floor_is_reached_at_the_last_update(style):
    rate = build(style, plateau=0.3)
    assert {rate(step) for step in range(99, 400)} == {PEAK}
    assert FLOOR < rate(998) < rate(400) < PEAK
    assert [rate(step) for step in (999, 1000, 10**9)] == [FLOOR] * 3


FIVE_SIXTHS = (801 - 100) / 900
# The original clamps a cosine that aims at zero, and so sits at its floor at 80 % of the run.
COSINE_AT_80_PERCENT = FLOOR + (PEAK - FLOOR) * (1 + math.cos(math.pi * FIVE_SIXTHS)) / 2


@pytest.mark.parametrize(
    ("style", "step", "expected", "options"),
    [
        ("constant", 549, PEAK, {}), ("wsd", 549, PEAK, {}), ("exponential", 549, math.sqrt(PEAK * FLOOR), {}),
        *((style, 549, (PEAK + FLOOR) / 2, {}) for style in ("linear", "cosine", "plateau")),
        ("cosine", 800, COSINE_AT_80_PERCENT, {}),
        ("wsd", 799, PEAK, {}), ("wsd", 849, FLOOR + (PEAK - FLOOR) * (1 - math.sqrt(50 / 200)), {}),
        ("cosine", 499, FLOOR, {"decay_iters": 500}), ("cosine", 900, FLOOR, {"decay_iters": 500}),
        ("linear", 1000, (PEAK + FLOOR) / 2, {"decay_iters": 2001, "warmup": 0}),
        # A warm-up is a count from 1 up, and a fraction of the span below.
        ("cosine", 0, PEAK / 40, {"warmup": 40}), ("cosine", 0, PEAK, {"warmup": 1}),
        ("cosine", 0, PEAK / 5, {"warmup": 0.1, "decay_iters": 50}),
        ("cosine", 0, PEAK / 29, {"warmup": 0.29, "max_steps": 100}),  # 0.29 * 100 is 28.999...
    ],
)  # fmt: skip
def test_rates_of_single_updates(style, step, expected, options):
    assert build(style, **options)(step) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"lr": 0.0}, "--lr"),
        ({"style": "exponential", "min_lr": 0.0}, "exponential"),
        ({"warmup": 0.6, "plateau": 0.5}, "--plateau"),
    ],
)
def test_nonsense_is_refused_by_the_name_of_the_flag(overrides, named):
    with pytest.raises(ConfigError, match=named) as caught:
        build(**{"style": "cosine", **overrides})
    assert "\n" not in str(caught.value)


fractions = st.floats(0, 0.5, exclude_max=True)


@given(
    style=st.sampled_from(STYLES), max_steps=st.integers(1, 400), decay_iters=st.none() | st.integers(1, 400),
    lr=st.floats(1e-8, 10), floor=st.floats(1e-6, 1), warmup=fractions, plateau=fractions,
)  # fmt: skip
def test_bounds_and_direction_hold_for_any(style, max_steps, decay_iters, lr, floor, warmup, plateau):
    span = decay_iters or max_steps
    options = {"max_steps": max_steps, "decay_iters": decay_iters, "warmup": warmup, "plateau": plateau}
    try:
        rate = schedule(style, lr=lr, min_lr=lr * floor, **options)
    except ConfigError:
        assert round(warmup * span) + round(plateau * span) > span  # two halves, each rounded up
        return
    rates = [rate(step) for step in range(span + 5)]
    rise, fall = rates[: rate.warmup_steps], rates[max(rate.warmup_steps - 1, 0) :]
    assert all(0 < value <= lr for value in rates)
    assert all(value >= rate.min_lr for value in fall)
    assert (rise, fall) == (sorted(rise), sorted(fall, reverse=True))
