"""Learning-rate schedules in closed form: a function of the step alone, so a resumed run needs no state.

Let ``u = step + 1`` be the number of the optimizer update, ``W`` and ``P`` the lengths of warm-up and plateau in
updates, and ``T`` the update at which the decay ends. Then, with ``W = 0`` meaning the same as ``W = 1``:

- warm-up, ``u <= W``: ``lr * u / W``, so that no update has a rate of zero, and update ``W`` has the full rate;
- plateau, ``u <= W + P``: ``lr``;
- decay: from ``lr`` at update ``W + P`` to exactly ``min_lr`` at update ``T``;
- ``min_lr`` after update ``T``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from smp_train.errors import ConfigError

# The remaining share of the way from lr (1) to min_lr (0) at progress p of the decay, 0 < p < 1.
_REMAINING: dict[str, Callable[[float], float]] = {
    "linear": lambda p: 1.0 - p,
    "plateau": lambda p: 1.0 - p,
    # Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983, equation 5 without restarts.
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
    # Hägele et al., Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations,
    # https://arxiv.org/abs/2405.18392: the "1-sqrt" cooldown.
    "wsd": lambda p: 1.0 - math.sqrt(p),
}

STYLES = ("constant", "linear", "cosine", "exponential", "plateau", "wsd")

# Hägele et al.: a cooldown over a fifth of the run is as good as a full cosine.
WSD_DECAY_SHARE = 0.2


@dataclass(frozen=True)
class Schedule:
    """A resolved schedule; `schedule` makes it from the flags' values."""

    style: str
    lr: float
    min_lr: float
    warmup_steps: int
    plateau_steps: int
    decay_steps: int  # T: the update at which min_lr is reached

    def __call__(self, step: int) -> float:
        """Return the rate of update ``step + 1``, which follows ``step`` earlier updates."""
        update = step + 1
        if update <= self.warmup_steps:
            return self.lr * (update / self.warmup_steps)
        plateau_end = max(self.warmup_steps, 1) + self.plateau_steps
        if self.style == "constant" or update <= plateau_end:
            return self.lr
        if update >= self.decay_steps:
            return self.min_lr
        progress = (update - plateau_end) / (self.decay_steps - plateau_end)
        if self.style == "exponential":
            rate = self.lr * (self.min_lr / self.lr) ** progress
        else:
            rate = self.min_lr + (self.lr - self.min_lr) * _REMAINING[self.style](progress)
        return min(max(rate, self.min_lr), self.lr)  # rounding must not leave the range


def schedule(
    style: str, *, lr: float, min_lr: float = 0.0, max_steps: int, decay_iters: int | None = None,
    warmup: float = 0.0, plateau: float = 0.0,
) -> Schedule:  # fmt: skip
    """Build the schedule of a run; each value by itself is valid for its flag.

    Args:
        style: one of `STYLES`. ``plateau`` is the original system's name for ``linear`` with a plateau; ``wsd``
            (warm-up, stable, decay) has a plateau until 80 % of the span unless ``plateau`` is given.
        lr: the peak rate.
        min_lr: the rate at and after the end of the span; ``constant`` ignores it.
        max_steps: optimizer updates of the whole run.
        decay_iters: the span of the decay in updates, warm-up included; ``max_steps`` by default.
        warmup: below 1 a fraction of the span, else a number of updates. A number above ``max_steps`` ends the run
            during the warm-up.
        plateau: updates at the full rate between warm-up and decay, for any style; a fraction or a number as above.

    Raises:
        ConfigError: for values that contradict one another.
    """
    span = max_steps if decay_iters is None else decay_iters
    if lr <= 0:
        raise ConfigError(f"--lr {lr}: must be a number above 0")
    if style == "constant":
        min_lr = lr
    if style == "exponential" and min_lr == 0:
        raise ConfigError("--lr_decay_style exponential cannot reach --min_lr 0: give a --min_lr above 0")
    warmup_steps = round(warmup * span) if warmup < 1 else int(warmup)
    if style == "wsd" and plateau == 0:
        plateau_steps = max(0, span - round(WSD_DECAY_SHARE * span) - warmup_steps)
    else:
        plateau_steps = round(plateau * span) if plateau < 1 else int(plateau)
    # Numbers of steps may reach beyond the end of the run, as in a short trial with a long run's flags.
    unfinished = decay_iters is None and max(warmup, plateau) >= 1
    if warmup_steps + plateau_steps > span and not unfinished:
        raise ConfigError(
            f"--warmup ({warmup_steps} steps) and --plateau ({plateau_steps} steps) exceed the {span} steps"
            " of the learning-rate schedule: lower them, or raise --lr_decay_iters"
        )
    return Schedule(style, lr, min_lr, warmup_steps, plateau_steps, span)
