"""The best settings of a run on a machine: few of all that are possible are stepped, the others extrapolated.

Memory and time are extrapolated in proportion: state to the ranks that share it, activations and operations to this
rank's tokens, collectives to the size of what is sent. Candidates extrapolated to be near the best are stepped, so no
close decision rests on extrapolation.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from smp_train.arguments import Arguments
from smp_train.distributed.host import cores
from smp_train.errors import ConfigError
from smp_train.planning.estimate import estimate
from smp_train.planning.fitting import STATE, at_peak, host_needed, needed
from smp_train.planning.proportion import distance, scaled
from smp_train.planning.space import MODES, Setting, Space, refused
from smp_train.planning.step_time import Machine, Prediction, predict
from smp_train.planning.work import ATTENTION, ELEMENTWISE, PRODUCTS
from smp_train.planning.world import Memory, world

BEST = 5
ALIKE = 0.995
"""Share of the time of the best of its kind that a setting must be predicted to take, at most, to be stepped."""
SURE, CLOSE = 1.05, 1.01
"""How many times the memory a setting may be extrapolated to take and still be stepped: extrapolated from any other,
and from one of its own kind and offloading."""
MOST_AT_ONCE = 4
STEPS = 40
"""Settings that are stepped, at most; the rest is then extrapolated."""
NO_HOST = "does not fit: host memory"
NO_FASTER = "no faster than the best of the same degrees and checkpointing"
COMPUTING = (PRODUCTS, ATTENTION, ELEMENTWISE)
Kind = tuple[int | str, int, str]


@dataclass(frozen=True)
class Plan:
    """The memory and the time of a setting."""

    setting: Setting
    args: Arguments
    memory: Memory
    needed: int
    """Bytes on each device."""
    host: int
    """Bytes of the host's memory for each device."""
    time: Prediction | None
    """None where the rates of the machine are not known."""

    @property
    def rank(self) -> tuple[float, ...]:
        """The sort key of plans, the best first: the time of a step or, without times, `rule`."""
        one = self.setting
        if self.time is not None:
            return (self.time.step_seconds, one.offload, self.needed)
        return rule(one)


def rule(one: Setting) -> tuple[float, ...]:
    """Return the sort key of settings where no times are known, the best first (docs/planning.md).

    Fewest tensor and context ranks, no offloading, least recomputation, fewest ranks that share parameters, fewest
    micro-steps.
    """
    mode = MODES.index(one.checkpointing) if one.checkpointing in MODES else 0
    return (one.tensor * one.context, one.offload, mode, one.shard, one.micro_steps)


def kind(one: Setting) -> Kind:
    """Return the key for which only the best setting is kept."""
    return one.tensor, one.context, one.checkpointing


@dataclass
class Search:
    """One search; `run` returns the best, and `lost` says how many others there are and why they are not among them."""

    space: Space
    there: int
    """Bytes of each device."""
    machine: Machine | None
    compiled: bool = True
    lost: Counter[str] = field(default_factory=Counter)
    stepped: dict[Setting, Plan] = field(default_factory=dict)
    _guesses: dict[Setting, tuple[Setting, Plan]] = field(default_factory=dict)

    def run(self) -> list[Plan]:
        """Return the best plans that fit, at most `BEST`, each of another kind."""
        left, self.lost = self.space.settings()
        best: dict[Kind, Plan] = {}
        with workers(self.space) as pool:
            while len(self.stepped) < STEPS and (some := self._next(left, best, cores())):
                for one, future in [(one, pool.submit(_step, one)) for one in some]:
                    left.remove(one)
                    try:
                        plan = self.stepped[one] = self._plan(one, future.result())
                    except BrokenProcessPool:
                        raise ConfigError("planning ran out of this machine's memory; plan on a larger one") from None
                    except ConfigError as problem:
                        same = [each for each in left if kind(each) == kind(one)]
                        self.lost[refused(problem)] += 1 + len(same)
                        left = [each for each in left if each not in same]
                        continue
                    known = best.get(kind(one))
                    if self.fits(plan) and (known is None or plan.rank < known.rank):
                        best[kind(one)] = plan
        found = sorted(best.values(), key=lambda plan: plan.rank)[:BEST]
        self._explain(left, found)
        return found

    def _plan(self, one: Setting, memory: Memory) -> Plan:
        space = self.space
        args = space.applied(one)
        time = None
        if self.machine is not None:
            time = predict(
                args, space.spec, memory, self.machine, devices=space.devices, seq_len=space.seq_len,
                compiled=self.compiled,
            )  # fmt: skip
        return Plan(one, args, memory, needed(args, memory, gpu=space.gpu), host_needed(args, memory), time)

    def fits(self, plan: Plan, over: float = 1.0) -> bool:
        """Return whether devices and their host, each of them ``over`` times as large, have the memory."""
        return plan.needed <= over * self.there and self._fits_host(plan, over)

    def _fits_host(self, plan: Plan, over: float = 1.0) -> bool:
        return self.space.host is None or plan.host <= over * self.space.host

    def _guess(self, one: Setting) -> Plan | None:
        """Extrapolate a setting from the nearest one that was stepped; None where there is none."""
        alike = [each for each in self.stepped if each.checkpointing == one.checkpointing]
        near = [each for each in alike if each.offload <= one.offload]
        if not near:
            return None
        nearest = min(near, key=lambda each: distance(each, one))
        if one not in self._guesses or self._guesses[one][0] != nearest:
            memory = scaled(self.stepped[nearest].memory, nearest, one, self.space)
            self._guesses[one] = (nearest, self._plan(one, memory))
        return self._guesses[one][1]

    def known(self, one: Setting) -> Plan | None:
        """Return the plan of a setting, stepped or extrapolated; None where neither is possible."""
        return self.stepped.get(one) or self._guess(one)

    def _is_close(self, one: Setting) -> bool:
        nearest = self._guesses[one][0]
        return kind(nearest) == kind(one) and nearest.offload == one.offload

    def _next(self, left: list[Setting], best: dict[Kind, Plan], most: int) -> list[Setting]:
        """Return the settings to step next: of those that may be among the best the most promising, one of a kind."""
        ranks = sorted(plan.rank for plan in best.values())
        found: dict[Kind, tuple[tuple[float, ...], Setting]] = {}
        for one in left:
            guess, known = self._guess(one), best.get(kind(one))
            if guess is None:  # the smallest of a mode of checkpointing, by which the others are judged
                order: tuple[float, ...] = (-1, one.tensor, one.context, one.offload, -one.shard, one.rows)
            elif not self.fits(guess, CLOSE if self._is_close(one) else SURE):
                continue
            else:
                order = guess.rank
                limit = known.rank if known is not None else ranks[BEST - 1] if len(ranks) >= BEST else None
                if limit is not None and order >= ((ALIKE * limit[0],) if guess.time and known else limit):
                    continue
            name = ("", 0, one.checkpointing) if guess is None else kind(one)
            if name not in found or order < found[name][0]:
                found[name] = order, one
        return [one for _, one in sorted(found.values())][: min(most, MOST_AT_ONCE)]

    def _explain(self, left: list[Setting], found: list[Plan]) -> None:
        """Count the settings that are not among the best by why they are not."""
        plans = [plan for plan in self.stepped.values() if plan not in found]
        plans += [guess for one in left if (guess := self._guess(one)) is not None]
        kinds = {kind(plan.setting) for plan in found}
        for plan in plans:
            self.lost[self._reason(plan, found[0] if found else None, kinds)] += 1

    def _reason(self, plan: Plan, best: Plan | None, kinds: set[Kind]) -> str:
        if plan.needed > self.there:
            uses = at_peak(plan.args, plan.memory, gpu=self.space.gpu)
            state = sum(uses.get(use, 0) for use in STATE)
            if state > self.there:
                return "does not fit: parameters, gradients and optimizer alone"
            return f"does not fit: most of it is {max(uses, key=lambda use: uses[use])}"
        if not self._fits_host(plan):
            return NO_HOST
        if kind(plan.setting) in kinds:
            return NO_FASTER
        if best is None or plan.time is None or best.time is None:
            return "fits, and comes later by the rule"
        more = {part: seconds - best.time.parts.get(part, 0) for part, seconds in plan.time.parts.items()}
        part = max(more, key=lambda each: more[each])
        if part in COMPUTING and rule(plan.setting)[2] > rule(best.setting)[2]:
            return "slower: it recomputes more"
        across = "tensor" in part and plan.setting.tensor > self.space.per_node
        return f"slower: {part}{' on other nodes' if across else ''}"


_open: dict[str, Any] = {}
"""Of a worker: its space and world."""


@contextmanager
def workers(space: Space) -> Iterator[ProcessPoolExecutor]:
    """Start processes that step settings, one on each core; forked, as importing takes longer than a step."""
    count, context = min(MOST_AT_ONCE, cores()), multiprocessing.get_context("fork")
    with ProcessPoolExecutor(count, context, initializer=_begin, initargs=(space,)) as pool:
        yield pool


def _begin(space: Space) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    opened = world(space.devices, space.per_node)
    _open.update(space=space, world=opened, ranks=opened.__enter__())


def _end_with_parent() -> None:
    """End this worker when the search is killed: it would wait for its next setting for ever."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _step(one: Setting) -> Memory:
    space: Space = _open["space"]
    return estimate(
        space.applied(one), space.spec, devices=space.devices, per_node=space.per_node, seq_len=space.seq_len,
        gpu=space.gpu, ranks=_open["ranks"],
    )  # fmt: skip
