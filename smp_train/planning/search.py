"""The best settings of a run on its devices: few of the possible settings are stepped.

The search goes from few tensor and context ranks to many, until more of them no longer help. Settings of one kind have
the same degrees, checkpointing and offloading. Of each kind, the setting that takes the least memory is stepped first.
If it fits, the fastest of its kind is stepped, as scaled from the stepped setting.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from smp_train.distributed.child import end_with_parent
from smp_train.distributed.host import cores
from smp_train.errors import ConfigError
from smp_train.planning.estimate import estimate
from smp_train.planning.memory import Memory, PlannedRun
from smp_train.planning.space import MODES, Setting, Space, refused
from smp_train.planning.step_memory import EDGE, Part, Use
from smp_train.planning.step_time import Machine, Prediction, predict
from smp_train.planning.work import Collective, Cost, Transfer, Work

BEST = 3
ALIKE = 0.995
"""Step a setting only if its predicted time is below this share of the best time of its kind."""
MOST_WORKERS = 4
MOST_STEPPED = 40
NOT_FITTING = "does not fit"
NO_HOST = "does not fit: host memory"
SLOWER = "no faster than the best of the same degrees, checkpointing and offloading, or than the best of all"
NOT_TRIED = "not tried: fewer tensor and context ranks, or no offloading, suffice"


class Kind(NamedTuple):
    """What settings of one kind have in common."""

    tensor: int
    context: int
    checkpointing: str
    offload: bool


def kind(setting: Setting) -> Kind:
    """Return the setting's kind."""
    return Kind(setting.tensor, setting.context, setting.checkpointing, setting.offload)


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
        """Sort key, the best plan first: the time of a step or, without times, the rule of docs/planning.md."""
        if self.time is not None:
            return (self.time.step_seconds, self.setting.offload, self.memory.needed)
        setting = self.setting
        mode = MODES.index(setting.checkpointing) if setting.checkpointing in MODES else 0
        return (setting.tensor * setting.context, setting.offload, mode, setting.shard, setting.micro_steps)


@dataclass
class Search:
    """A search; after `best`, ``rejected`` counts all other settings by reason."""

    space: Space
    device_bytes: int
    machine: Machine | None
    rejected: Counter[str] = field(default_factory=Counter)
    stepped: dict[Setting, Plan] = field(default_factory=dict)
    _kinds: dict[Kind, list[Setting]] = field(default_factory=lambda: defaultdict(list))
    """The settings of each kind, the one that takes the least memory first."""
    _latest: dict[Kind, Plan] = field(default_factory=dict)
    """The plan of each kind that was stepped last; other settings of the kind are scaled from it."""
    _refusals: dict[Kind, str] = field(default_factory=dict)
    _best: dict[Kind, Plan] = field(default_factory=dict)
    """The best plan that fits, by kind; kinds of which no plan fits are absent."""

    def best(self) -> list[Plan]:
        """Return the best plans that fit, at most `BEST`, each of a different kind."""
        settings, self.rejected = self.space.settings()
        levels: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for setting in sorted(settings, key=lambda setting: (setting.rows, -setting.shard)):
            self._kinds[kind(setting)].append(setting)
            levels[max(2, setting.tensor * setting.context)].add((setting.tensor, setting.context))
        with workers() as pool:
            for level, degrees in sorted(levels.items()):
                self._step_degrees(pool, degrees)
                while batch := self._next():
                    self._step(pool, batch)
                first = min(self._best.values(), key=lambda plan: plan.rank, default=None)
                if first is not None and first.setting.tensor * first.setting.context < level:
                    break  # more ranks do not help
        plans = sorted(self._best.values(), key=lambda plan: plan.rank)[:BEST]
        chosen = {plan.setting for plan in plans}
        self.rejected.update(self._reason(setting) for setting in settings if setting not in chosen)
        return plans

    def plan(self, setting: Setting, memory: Memory) -> Plan:
        """Return the plan of a setting that takes this memory."""
        run = self.space.applied(setting)
        return Plan(setting, run, memory, None if self.machine is None else predict(run, memory, self.machine))

    def _step_degrees(self, pool: ProcessPoolExecutor, degrees: set[tuple[int, int]]) -> None:
        """For each pair of degrees, step every kind's smallest setting, if the kind that saves the most memory fits.

        A kind with offloading is stepped only if the same kind without it does not fit.
        """
        *others, least = self.space.modes
        offloading = sorted({group.offload for group in self._kinds})

        def step(modes: Sequence[str], *, offload: bool) -> None:
            kinds = [group for pair in sorted(degrees) for mode in modes
                     if (group := Kind(*pair, mode, offload)) in self._kinds]  # fmt: skip
            new = [group for group in kinds if not {group, group._replace(offload=False)} & self._best.keys()]
            self._step(pool, [self._kinds[group][0] for group in new])

        def fitting() -> set[tuple[int, int]]:
            return {(group.tensor, group.context) for group in self._best} & degrees

        if self.stepped and not self._best:  # nothing fits on fewer ranks
            step([least], offload=offloading[-1])
            degrees = fitting()
        for modes in ([least], others):
            for offload in offloading:
                step(modes, offload=offload)
            degrees = fitting()

    def _step(self, pool: ProcessPoolExecutor, settings: Iterable[Setting]) -> None:
        """Step settings, at most `MOST_STEPPED` in all."""
        batch = list(settings)[: MOST_STEPPED - len(self.stepped)]
        futures = [pool.submit(estimate, self.space.applied(setting)) for setting in batch]
        for setting, future in zip(batch, futures, strict=True):
            group = kind(setting)
            try:
                plan = self.plan(setting, future.result())
            except BrokenProcessPool:
                raise ConfigError("planning ran out of this machine's memory; plan on a larger one") from None
            except ConfigError as problem:
                self._refusals[group] = refused(problem)
                continue
            self.stepped[setting] = self._latest[group] = plan
            if self._fits(plan) and (group not in self._best or plan.rank < self._best[group].rank):
                self._best[group] = plan

    def _next(self) -> list[Setting]:
        """Return, of each kind that fits, the setting that is best as scaled, if it may be among the best."""
        ranks = sorted(plan.rank for plan in self._best.values())
        batch = []
        for group, known in self._best.items():
            limit = min(known.rank, ranks[BEST - 1]) if len(ranks) >= BEST else known.rank
            guesses = (self._guess(setting) for setting in self._kinds[group] if setting not in self.stepped)
            guess = min((guess for guess in guesses if self._fits(guess)), key=lambda guess: guess.rank, default=None)
            if guess is not None and guess.rank < ((ALIKE * limit[0],) if guess.time else limit):
                batch.append(guess.setting)
        return batch if len(self.stepped) < MOST_STEPPED else []

    def _guess(self, setting: Setting) -> Plan:
        start = self._latest[kind(setting)]
        return self.plan(setting, scaled(start.memory, start.setting, setting, self.space))

    def _fits(self, plan: Plan) -> bool:
        return plan.memory.needed <= self.device_bytes and self._fits_host(plan)

    def _fits_host(self, plan: Plan) -> bool:
        return self.space.host is None or plan.memory.host_needed <= self.space.host

    def _reason(self, setting: Setting) -> str:
        """Return why a setting is not among the best."""
        if (group := kind(setting)) in self._refusals:
            return self._refusals[group]
        if group not in self._latest:
            return NOT_TRIED if self._best else NOT_FITTING
        plan = self.stepped.get(setting) or self._guess(setting)
        if plan.memory.needed > self.device_bytes:
            return NOT_FITTING
        return SLOWER if self._fits_host(plan) else NO_HOST


def scaled(memory: Memory, start: Setting, target: Setting, space: Space) -> Memory:
    """Return the memory and the work of ``target``, in proportion to ``start``, a setting of the same kind.

    State scales with the ranks that share it, activations with the rows. The memory is rather too small than too large.
    """
    state, rows, steps = start.shard / target.shard, target.rows / start.rows, target.micro_steps / start.micro_steps
    by_use: dict[str, float] = dict.fromkeys((Use.PARAMETERS, Use.GRADIENTS, Use.OPTIMIZER), state)
    by_use |= dict.fromkeys((Use.ACTIVATIONS, Use.HOST), rows)
    peaks = {
        phase: Counter({use: int(size * by_use.get(use, 1)) for use, size in peak.items()})
        for phase, peak in memory.peaks.items()
    }
    operations = {
        (phase, name): cost._replace(size=cost.size * state) if phase[0] == Part.UPDATE
        else cost._replace(calls=cost.calls * steps)
        for (phase, name), cost in memory.work.operations.items()
    }  # fmt: skip
    replicas = space.run.devices // target.sharing
    summed = Collective(Transfer.SUM, "replicate", replicas, space.nodes(replicas, target.sharing))
    collectives = {}
    for (phase, collective), cost in memory.work.collectives.items():
        if collective.dimension.startswith("shard"):
            nodes = space.nodes(target.shard, target.tensor)
            collective = collective._replace(ranks=target.shard, nodes=nodes)
            cost = cost._replace(size=cost.size * steps, calls=cost.calls * steps)
        elif collective.dimension != summed.dimension:
            cost = cost._replace(calls=cost.calls * steps)
        if collective.dimension != summed.dimension:
            collectives[phase, collective] = cost
    layers, gradients = space.run.spec.config.num_hidden_layers, memory.state[Use.GRADIENTS] * state
    collectives[(Part.BACKWARD, -EDGE - 1), summed] = Cost(0, gradients, layers)
    return replace(
        memory, peaks=peaks, work=Work(operations, collectives), pinned=int(memory.pinned * state)
    )  # fmt: skip


@contextmanager
def workers() -> Iterator[ProcessPoolExecutor]:
    """Start processes that step settings, one per core; forked, because imports take longer than a step."""
    count, context = min(MOST_WORKERS, cores()), multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, context, initializer=_begin) as pool:
        yield pool


def _begin() -> None:
    end_with_parent()
    warnings.simplefilter("ignore")
