"""Spikes of loss and gradient norm: the rule, and its state in a run and its checkpoints.

A value is a spike above ``median + threshold * max(1.4826 * MAD, floor * median)`` of the window: the last
--spike_window steps that were no spikes themselves. MAD is the median absolute deviation from the median; times 1.4826
it estimates the standard deviation of a normal distribution, even if half of the window are outliers (Rousseeuw and
Croux, "Alternatives to the Median Absolute Deviation", 1993). The floor is 0.02 for a loss. It is 1 for a gradient
norm, which is clipped, and varies several-fold in sound training. The window of step s ends at step s - 2, whose
numbers are on the host when step s is queued: so the rule depends neither on when numbers are read nor on resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from smp_train.errors import SmpTrainError
from smp_train.train_utils import LARGEST, NO_LIMITS, Limits

LEAST = 20
"""The rule applies once the window holds this many steps, or is full."""
IN_A_ROW = 5
"""At most this many steps in a row are skipped. One more ends the run: the loss has moved to another level, or the
weights are damaged."""
TO_ONE_CHECKPOINT = 3
"""At most this many rollbacks to one checkpoint; one more ends the run."""
FIRST = 3
"""Number of first steps whose median loss is the loss at the start."""
RISEN = 4
"""The run is reported to diverge after this many steps in a row with a loss far above the loss at the start."""

FLOOR_OF_LOSS, FLOOR_OF_NORM = 0.02, 1.0
"""Lower bounds of the deviation, as fractions of the median."""


def bound(values: Sequence[float], threshold: float, floor: float) -> float:
    """Return the largest value that is no spike after ``values``."""
    middle = median(values)
    deviation = median(abs(value - middle) for value in values)
    return min(middle + threshold * max(1.4826 * deviation, floor * abs(middle)), LARGEST)


class Spikes:
    """The numbers of the last steps, and the steps whose updates are not in the weights; the same on all ranks."""

    def __init__(self, policy: str = "warn", threshold: float = 10.0, window: int = 100) -> None:
        self.policy, self.threshold, self.window = policy, threshold, window
        self.accepted: list[tuple[int, float, float]] = []
        """Step, loss and gradient norm."""
        self.skipped: list[list[int]] = []
        """First and last step of each range of steps whose updates are not in the weights."""
        self._first: list[float] = []
        """Losses of the first `FIRST` steps."""
        self._risen = 0
        """Steps in a row with a loss far above the start's; more than `RISEN` after the report."""
        self._row = 0
        self._rollbacks = (-1, 0)
        self._found: tuple[int, Limits] = (-1, Limits())

    def limits(self, step: int) -> Limits:
        """Return the limits of a step by the rule."""
        if self._found[0] != step:
            known = [numbers for numbers in self.accepted if numbers[0] <= step - 2][-self.window :]
            limits = Limits()
            if len(known) >= min(LEAST, self.window):
                limits = Limits(
                    bound([loss for _, loss, _ in known], self.threshold, FLOOR_OF_LOSS),
                    bound([norm for _, _, norm in known], self.threshold, FLOOR_OF_NORM),
                )
            self._found = step, limits
        return self._found[1]

    @property
    def skips_updates(self) -> bool:
        """Whether a spike's update is skipped. An update that is not finite always is."""
        return self.policy != "warn"

    def accept(self, step: int, loss: float, grad_norm: float) -> None:
        """Add the numbers of a step to the window; skip a step without gradient, such as a step of padding only."""
        if grad_norm == 0:
            return
        self.accepted = [*self.accepted[-self.window - 1 :], (step, loss, grad_norm)]

    def diverges(self, loss: float) -> float | None:
        """Add a step's loss; return the loss at the start when this step shows that the run diverges, once per run.

        A run diverges if `RISEN` steps in a row have twice the loss at the start, and at least 2 nats more. A healthy
        run has no such steps: random weights are no worse than a guess, so their loss falls, and in finetuning even
        one batch with twice the usual loss is rare.
        """
        if len(self._first) < FIRST:
            self._first.append(loss)
        elif self._risen <= RISEN:
            start = median(self._first)
            self._risen = self._risen + 1 if loss > max(2 * start, start + 2) else 0
            if self._risen == RISEN:
                self._risen += 1
                return start
        return None

    def skip(self, first: int, last: int) -> None:
        """Record that the updates of steps ``first`` to ``last`` are not in the weights."""
        while self.skipped and self.skipped[-1][1] >= first - 1:
            first = min(first, self.skipped.pop()[0])
        self.skipped.append([first, last])

    def skip_one(self, step: int) -> None:
        """Record that a step's update was skipped. Raises `SmpTrainError` after `IN_A_ROW` in a row."""
        self._row = self._row + 1 if self.skipped and self.skipped[-1][1] == step - 1 else 1
        if self._row > IN_A_ROW:
            raise SmpTrainError(
                f"step {step}: the updates of the {IN_A_ROW} steps before it were skipped as well: the loss is at "
                "another level, or the weights are damaged; raise --spike_threshold, or give --on_spike rollback"
            )
        self.skip(step, step)

    def count_rollback(self, step: int, to: int) -> None:
        """Count a rollback to the checkpoint of step ``to``; more than `TO_ONE_CHECKPOINT` raise `SmpTrainError`."""
        count = self._rollbacks[1] + 1 if self._rollbacks[0] == to else 1
        self._rollbacks = to, count
        if count > TO_ONE_CHECKPOINT:
            raise SmpTrainError(
                f"step {step}: another spike after {TO_ONE_CHECKPOINT} rollbacks to the checkpoint of step {to}; start "
                "again from an older one, with a lower --lr, or raise --spike_threshold"
            )

    def state(self, batch: int) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain JSON; ``batch`` is the global batch in samples."""
        accepted = [list(numbers) for numbers in self.accepted]
        rollbacks = list(self._rollbacks)
        return {
            "accepted": accepted, "skipped": self.skipped, "row": self._row, "rollbacks": rollbacks, "batch": batch,
            "first": self._first, "risen": self._risen,
        }  # fmt: skip

    def restore(self, state: dict[str, Any] | None, batch: int) -> None:
        """Load a checkpoint's state; None, as in an imported checkpoint, gives a fresh state.

        Discards the window if the global batch changed: the numbers of smaller batches are noisier.
        """
        state = state or {}
        accepted = state.get("accepted", []) if state.get("batch", batch) == batch else []
        self.accepted = [(int(s), float(loss), float(norm)) for s, loss, norm in accepted]
        self.skipped = [[int(first), int(last)] for first, last in state.get("skipped", [])]
        self._row = int(state.get("row", 0))
        step, count = state.get("rollbacks", (-1, 0))
        self._rollbacks = int(step), int(count)
        self._first, self._risen = [float(loss) for loss in state.get("first", [])], int(state.get("risen", 0))
        self._found = (-1, NO_LIMITS)
