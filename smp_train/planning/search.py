"""The best settings of a run on its devices: few of the possible settings are stepped, all others extrapolated.

The settings that are extrapolated to be near the best are stepped, so no close decision rests on extrapolation.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field

from smp_train.distributed.child import end_with_parent
from smp_train.distributed.host import cores
from smp_train.errors import ConfigError
from smp_train.planning.estimate import estimate
from smp_train.planning.memory import Memory, PlannedRun
from smp_train.planning.proportion import distance, extrapolated
from smp_train.planning.space import MODES, Setting, Space, refused
from smp_train.planning.step_time import Machine, Prediction, predict

BEST = 5
ALIKE = 0.995
"""Step a setting only if its predicted time is below this share of the best time of its kind."""
MARGIN = 1.05
"""Step a setting only if it is extrapolated to take at most this many times the memory."""
MOST_WORKERS = 4
MOST_STEPPED = 40
NO_HOST = "does not fit: host memory"
NO_FASTER = "no faster than the best of the same degrees, checkpointing and offloading"
Kind = tuple[int, int, str, bool]


@dataclass(frozen=True)
class Plan:
    """The memory and the time of a setting."""

    setting: Setting
    run: PlannedRun
    memory: Memory
    time: Prediction | None
    """None if the rates of the machine are unknown."""

    @property
    def rank(self) -> tuple[float, ...]:
        """Sort key, the best plan first: the time of a step or, without times, `rule`."""
        if self.time is None:
            return rule(self.setting)
        return (self.time.step_seconds, self.setting.offload, self.memory.needed)


def rule(setting: Setting) -> tuple[float, ...]:
    """Return the sort key of settings without times, the best first (docs/planning.md).

    Fewest tensor and context ranks, no offloading, least recomputation, fewest ranks that share parameters, fewest
    micro-steps.
    """
    mode = MODES.index(setting.checkpointing) if setting.checkpointing in MODES else 0
    return (setting.tensor * setting.context, setting.offload, mode, setting.shard, setting.micro_steps)


def kind(setting: Setting) -> Kind:
    """Return the setting's kind; the result has the best setting of each kind."""
    return setting.tensor, setting.context, setting.checkpointing, setting.offload


@dataclass
class Search:
    """A search; after `best`, ``rejected`` counts all other settings by reason."""

    space: Space
    device_bytes: int
    machine: Machine | None
    rejected: Counter[str] = field(default_factory=Counter)
    stepped: dict[Setting, Plan] = field(default_factory=dict)
    _guesses: dict[Setting, tuple[Setting, Plan]] = field(default_factory=dict)

    def best(self) -> list[Plan]:
        """Return the best plans that fit, at most `BEST`, each of a different kind."""
        unknown, self.rejected = self.space.settings()
        best: dict[Kind, Plan] = {}
        with workers() as pool:
            while len(self.stepped) < MOST_STEPPED and (batch := self._next(unknown, best)):
                unknown = [setting for setting in unknown if setting not in batch]
                futures = [pool.submit(estimate, self.space.applied(setting)) for setting in batch]
                for setting, future in zip(batch, futures, strict=True):
                    try:
                        plan = self.stepped[setting] = self.plan(setting, future.result())
                    except BrokenProcessPool:
                        raise ConfigError("planning ran out of this machine's memory; plan on a larger one") from None
                    except ConfigError as problem:
                        alike = {candidate for candidate in unknown if kind(candidate) == kind(setting)}
                        self.rejected[refused(problem)] += 1 + len(alike)
                        unknown = [candidate for candidate in unknown if candidate not in alike]
                        continue
                    known = best.get(kind(setting))
                    if self._fits(plan) and (known is None or plan.rank < known.rank):
                        best[kind(setting)] = plan
        plans = sorted(best.values(), key=lambda plan: plan.rank)[:BEST]
        for plan in (*self.stepped.values(), *filter(None, map(self._guess, unknown))):
            if plan not in plans:
                self.rejected[self._reason(plan, plans)] += 1
        return plans

    def plan(self, setting: Setting, memory: Memory) -> Plan:
        """Return the plan of a setting that takes this memory."""
        run = self.space.applied(setting)
        return Plan(setting, run, memory, None if self.machine is None else predict(run, memory, self.machine))

    def _fits(self, plan: Plan, margin: float = 1.0) -> bool:
        """Return whether the plan would fit if devices and host had ``margin`` times their memory."""
        return plan.memory.needed <= margin * self.device_bytes and self._fits_host(plan, margin)

    def _fits_host(self, plan: Plan, margin: float = 1.0) -> bool:
        return self.space.host is None or plan.memory.host_needed <= margin * self.space.host

    def _guess(self, setting: Setting) -> Plan | None:
        """Return a plan extrapolated from the nearest stepped setting; None if no stepped setting is similar enough."""
        starts = [
            start for start in self.stepped
            if start.checkpointing == setting.checkpointing and start.offload <= setting.offload
        ]  # fmt: skip
        if not starts:
            return None
        nearest = min(starts, key=lambda start: distance(start, setting))
        if setting not in self._guesses or self._guesses[setting][0] != nearest:
            memory = extrapolated(self.stepped[nearest].memory, nearest, setting, self.space)
            self._guesses[setting] = (nearest, self.plan(setting, memory))
        return self._guesses[setting][1]

    def _next(self, unknown: list[Setting], best: dict[Kind, Plan]) -> list[Setting]:
        """Return the settings to step next: the most promising of each kind that may still be among the best."""
        ranks = sorted(plan.rank for plan in best.values())
        candidates: dict[Kind, tuple[tuple[float, ...], Setting]] = {}
        for setting in unknown:
            guess, known, group = self._guess(setting), best.get(kind(setting)), kind(setting)
            if guess is None:  # step the smallest setting of each checkpointing mode first
                group = (0, 0, setting.checkpointing, False)
                order: tuple[float, ...] = (
                    -1, setting.tensor, setting.context, setting.offload, -setting.shard, setting.rows
                )  # fmt: skip
            elif not self._fits(guess, MARGIN):
                continue
            else:
                order = guess.rank
                limit = known.rank if known is not None else ranks[BEST - 1] if len(ranks) >= BEST else None
                if limit is not None and order >= ((ALIKE * limit[0],) if guess.time and known else limit):
                    continue
            if group not in candidates or order < candidates[group][0]:
                candidates[group] = order, setting
        if not candidates and not best:
            return self._smallest(unknown)
        return [setting for _, setting in sorted(candidates.values())][: min(cores(), MOST_WORKERS)]

    def _smallest(self, unknown: list[Setting]) -> list[Setting]:
        """Return the setting whose extrapolated memory is below that of every stepped setting; [] if there is none."""
        guesses = [guess for guess in map(self._guess, unknown) if guess is not None]
        plan = min((*guesses, *self.stepped.values()), key=lambda plan: plan.memory.needed, default=None)
        return [] if plan is None or plan.setting in self.stepped else [plan.setting]

    def _reason(self, plan: Plan, best: list[Plan]) -> str:
        """Return why a setting is not among the best."""
        if plan.memory.needed > self.device_bytes:
            uses = plan.memory.at_peak
            return f"does not fit: most of it is {max(uses, key=lambda use: uses[use])}"
        if not self._fits_host(plan):
            return NO_HOST
        if kind(plan.setting) in map(kind, (better.setting for better in best)):
            return NO_FASTER
        if not best or plan.time is None or best[0].time is None:
            return "fits, and comes later by the rule"
        more = {part: seconds - best[0].time.parts.get(part, 0) for part, seconds in plan.time.parts.items()}
        return f"slower: {max(more, key=lambda part: more[part])}"


@contextmanager
def workers() -> Iterator[ProcessPoolExecutor]:
    """Start processes that step settings, one per core; forked, because imports take longer than a step."""
    count, context = min(MOST_WORKERS, cores()), multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, context, initializer=_begin) as pool:
        yield pool


def _begin() -> None:
    end_with_parent()
    warnings.simplefilter("ignore")
