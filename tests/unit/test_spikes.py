"""Which numbers are a spike, and what a run remembers of its own."""

from __future__ import annotations

import json
import math
import random

import pytest

from smp_train.errors import SmpTrainError
from smp_train.run.spikes import IN_A_ROW, LEAST, TO_ONE_CHECKPOINT, Spikes, bound
from smp_train.train_utils import NO_LIMITS


def resumed(spikes: Spikes, batch: int = 8) -> Spikes:
    """Return what goes on from the state in a checkpoint."""
    other = Spikes(spikes.policy, spikes.threshold, spikes.window)
    other.restore(json.loads(json.dumps(spikes.state(8))), batch)
    return other


def test_the_bound_is_robust() -> None:
    draw = random.Random(1)
    values = [draw.gauss(3.0, 0.1) for _ in range(1000)]
    assert bound(values, 10, 0.02) == pytest.approx(3.0 + 10 * 0.1, rel=0.05)  # deviations of a normal distribution
    wild = [1e6 if number % 3 == 0 else value for number, value in enumerate(values)]
    assert bound(wild, 10, 0.02) < 6  # a third of the window is off
    assert bound([2.0] * 50, 10, 0.02) == pytest.approx(2.0 + 10 * 0.02 * 2.0)  # no deviation at all
    assert math.isfinite(bound([3e38, 1e38], 10, 0.02))


def test_the_window_ends_two_steps_before() -> None:
    spikes = Spikes(window=4)
    for step in range(1, 9):
        limits = spikes.limits(step)
        known = [float(number) for number in range(max(1, step - 5), step - 1)]
        assert limits == (NO_LIMITS if len(known) < 4 else (bound(known, 10, 0.02), bound([1.0] * 4, 10, 1.0)))
        spikes.accept(step, float(step), 1.0)
        assert spikes.limits(step + 1) == spikes.limits(step + 1)
    assert spikes.limits(8) == limits  # as it was before that step was read
    few = Spikes()
    for step in range(1, LEAST):
        few.accept(step, 1.0, 1.0)
    assert few.limits(100) == NO_LIMITS
    assert not few.skips_updates


# The demo's model and data with --lr 3.
DIVERGES = (7.64, 8.89, 23.67, 18.35, 31.68, 55.09, 71.77, 110.1, 173.5, 169.4)


def test_a_rise_above_the_first_losses_is_found_once_and_in_time() -> None:
    spikes, found = Spikes(), {}
    for step, loss in enumerate(DIVERGES, 1):
        found[step] = spikes.diverges(loss)
        spikes = resumed(spikes)
    assert found == {**dict.fromkeys(found), 7: 8.89}


def test_a_healthy_run_of_5000_steps_raises_no_alarm() -> None:
    draw, spikes = random.Random(1), Spikes()
    for step in range(1, 5001):
        # As measured with the sample and default settings: the deviations grow as the loss falls.
        loss = (1.6 + 6 * math.exp(-step / 900)) * draw.lognormvariate(0, min(0.2, step / 5000))
        norm = (1 + min(2.5, step / 1000)) * draw.lognormvariate(0, 0.25) * (4 if draw.random() < 0.004 else 1)
        limits = spikes.limits(step)
        assert (loss < limits.loss, norm < limits.grad_norm, spikes.diverges(loss)) == (True, True, None), step
        spikes.accept(step, loss, norm)
    pretrained = Spikes()
    assert not any(pretrained.diverges(1.5 * draw.lognormvariate(0, 0.35)) for _ in range(5000))


def test_what_a_checkpoint_keeps_decides_alike() -> None:
    one = Spikes("skip", window=5)
    for step in range(1, 20):
        one.accept(step, 3 + 1 / 3 / step, 0.1 * step)
    one.skip_one(20)
    one.skip(18, 21)
    one.skip_one(30)
    assert resumed(one).skipped == one.skipped == [[18, 21], [30, 30]]
    assert [resumed(one).limits(step) for step in (20, 21)] == [one.limits(step) for step in (20, 21)]
    other = resumed(one, batch=4)  # numbers of steps of another size
    assert other.limits(21) == NO_LIMITS
    assert other.skipped == one.skipped
    other.restore(None, 8)
    assert other.limits(20) == NO_LIMITS


def test_too_many_end_the_run() -> None:
    spikes = Spikes("skip")
    for step in (*range(1, IN_A_ROW + 1), *range(IN_A_ROW + 2, 2 * IN_A_ROW + 2)):
        spikes.skip_one(step)
        spikes = resumed(spikes)
    with pytest.raises(SmpTrainError, match=rf"step {2 * IN_A_ROW + 2}: .*--spike_threshold"):
        spikes.skip_one(2 * IN_A_ROW + 2)
    for to in [12] * TO_ONE_CHECKPOINT + [24] * TO_ONE_CHECKPOINT:
        spikes.count_rollback(20, to=to)
        spikes = resumed(spikes)
    with pytest.raises(SmpTrainError, match="checkpoint of step 24"):
        spikes.count_rollback(40, to=24)


def test_steps_without_gradient_set_no_limit() -> None:
    spikes = Spikes("skip", 10, 20)
    for step in range(1, 40):
        spikes.accept(step, 0.0, 0.0)
    assert spikes.limits(45) == NO_LIMITS
