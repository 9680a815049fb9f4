"""Where the time goes, by phase, on every rank, and which rank the others wait for.

The marks are the heartbeat's (`heartbeat.enter`). On a GPU a mark is an event in the device's queue, and the
time between two of them is the device's: where the host is ahead, reading data takes no time, and where it is not, the
time that the device stood still for it. So the phases add up to all of the time. An event is read once the device
has passed it, never waited for. On a CPU a mark is a reading of the clock.

The collectives of sharded weights and gradients (FSDP2's) are timed as well: on a GPU in a stream of their own, where
they run beside compute, so that they are no part of the sum. How much of them is exposed, the profiler tells
(`telemetry.verdict`). A rank that is slow in a forward or backward pass keeps the others waiting in them, and itself
waits for none: what a rank does is the time of its phases without its collectives. The vote is the first collective of
a step and carries three numbers: time in it is time waited for slower ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from smp_train.distributed import ALL_RANKS, Runtime, gather, heartbeat, rank
from smp_train.distributed.heartbeat import (
    BACKWARD,
    CALLBACK,
    CLIP,
    DATA,
    FORWARD,
    LOG,
    OUTCOME,
    PHASES,
    SAVE,
    START,
    UPDATE,
    VALIDATION,
    VOTE,
)
from smp_train.distributed.to_host import ToHost
from smp_train.telemetry.logging_utils import get_logger
from smp_train.telemetry.metrics import NAMED_FROM, TIME_FIELDS

SHARES = {
    "forward": (FORWARD,), "backward": (BACKWARD,), "clip": (CLIP,), "update": (UPDATE,), "wait_for_ranks": (VOTE,),
    "data": (DATA,), "host": (OUTCOME, LOG, CALLBACK, START), "save": (SAVE,), "validation": (VALIDATION,),
}  # fmt: skip
"""Phases that each field of ``time_shares`` adds up."""
OWN = (DATA, FORWARD, BACKWARD, CLIP, UPDATE, OUTCOME, LOG)
"""Phases in which a rank keeps the others waiting."""
NAMED_AFTER = 3
"""A rank is named in the log when it costs the others `NAMED_FROM` of a step in so many records on end."""
_TALK = {FORWARD: len(PHASES), BACKWARD: len(PHASES) + 1}
"""Columns of the seconds of collectives in a phase."""
_COLUMNS = len(PHASES) + 4

log = get_logger()


class StepTimes:
    """The times of this rank since the last record, and those of all ranks in the record before."""

    def __init__(self, ranks: Runtime, device: torch.device) -> None:
        """Listen to the heartbeat until it ends; collective."""
        self.hosts = gather("naming the nodes", lambda: ranks.hostname)
        self._device, self._on_gpu = device, device.type == "cuda"
        # Seconds by phase, of collectives in forward and backward, for which the host waited for the device; steps.
        self._sums = [0.0] * _COLUMNS
        self._phase, self._since = START, time.perf_counter()
        self._marks: deque[tuple[int, torch.cuda.Event]] = deque()
        self._collectives: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._unused: list[torch.cuda.Event] = []
        self._coming: ToHost | None = None
        self._late: tuple[int, int] | None = None
        self._late_for = 0
        heartbeat.listeners.append(self.mark)
        heartbeat.collective = self.collective

    def mark(self, phase: int) -> None:
        """Note that the main thread enters a phase; does not wait for the device."""
        now = time.perf_counter()
        if self._on_gpu:
            if self._phase == OUTCOME:
                self._sums[-2] += now - self._since
            self._marks.append((phase, self._event()))
            if phase == DATA:
                self._read_marks()
        else:
            self._add(self._phase, now - self._since)
        self._phase, self._since = phase, now

    def _event(self) -> torch.cuda.Event:
        """Return an event that is recorded now, in this thread's stream."""
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Take the time of the collective in the body, in forward and backward; does not wait for the device."""
        column, began = _TALK.get(heartbeat.phase), time.perf_counter()
        if column is None:
            yield
        elif self._on_gpu:
            start = self._event()
            yield
            self._collectives.append((column, start, self._event()))
        else:
            yield
            self._sums[column] += time.perf_counter() - began

    def _read_marks(self) -> None:
        """Add up the times between the marks that the device has passed."""
        while self._collectives and self._collectives[0][2].query():
            column, start, end = self._collectives.popleft()
            self._sums[column] += start.elapsed_time(end) / 1000
            self._unused += start, end
        while len(self._marks) > 1 and self._marks[0][1].query() and self._marks[1][1].query():
            phase, event = self._marks.popleft()
            self._add(phase, event.elapsed_time(self._marks[0][1]) / 1000)
            self._unused.append(event)

    def _add(self, phase: int, seconds: float) -> None:
        self._sums[phase] += seconds
        self._sums[-1] += phase == DATA

    def gather(self) -> None:
        """Send this rank's times since the last call on their way to all hosts; collective, waits for no device."""
        self._read_marks()
        everyone = torch.zeros(len(self.hosts), _COLUMNS)
        everyone[rank()] = torch.tensor(self._sums)
        self._sums = [0.0] * _COLUMNS
        if self._on_gpu:
            everyone = everyone.pin_memory().to(self._device, non_blocking=True)
        dist.all_reduce(everyone)
        self._coming = ToHost(everyone)

    def fields(self) -> dict[str, Any]:
        """Return the fields of `metrics.TIME_FIELDS` of the last `gather`; waits for that alone."""
        assert self._coming is not None, "gathered with the record's other numbers"
        coming, self._coming = self._coming, None
        found = summary(coming.values(), self.hosts, with_host=self._on_gpu)
        self._name_slowest(found)
        return found

    def _name_slowest(self, found: dict[str, Any]) -> None:
        """Log which rank the others wait for, once it has been the same for a while."""
        late = None
        if (found["slowest_share"] or 0) >= NAMED_FROM:
            late = found["slowest_rank"], PHASES.index(found["slowest_phase"])
        self._late_for = self._late_for + 1 if late == self._late else 1
        self._late = late
        if late is not None and self._late_for == NAMED_AFTER:
            log.warning(
                "The other ranks wait for rank %d on %s: %.2g s in every step, %.0f%% of it; it differs from them most "
                "in %s", found["slowest_rank"], found["slowest_host"], found["slowest_sec"],
                100 * found["slowest_share"], found["slowest_phase"], extra=ALL_RANKS,
            )  # fmt: skip


def summary(rows: Any, hosts: Sequence[str], *, with_host: bool = False) -> dict[str, Any]:
    """Return the fields of `metrics.TIME_FIELDS`, those that are not known as None.

    Every rank does so at every log line: by a few operations on the rows of all ranks at once.

    Args:
        rows: ``[ranks, columns]``: of each rank the seconds in each phase of `PHASES`, those of collectives in forward
            and in backward, the seconds for which the host waited for the device, and the steps that all these are of.
        hosts: name of each rank's node.
        with_host: whether the device works behind the host.
    """
    found: dict[str, Any] = dict.fromkeys(TIME_FIELDS)
    rows = np.asarray(rows, dtype=np.float64)
    steps, phases, talk = rows[:, -1], rows[:, : len(PHASES)], float(rows[:, list(_TALK.values())].sum())
    total = float(phases.sum())
    if total <= 0 or not steps.all():
        return found
    found["time_shares"] = {name: float(phases[:, list(of)].sum()) / total for name, of in SHARES.items()}
    found["communication_share"] = talk / total if talk else None
    if with_host:
        found["host_ahead_sec"] = float((rows[:, -2] / steps).min())
    if len(rows) > 1:
        own = phases.copy()
        own[:, list(_TALK)] -= rows[:, list(_TALK.values())]
        own = own[:, list(OWN)] / steps[:, None]
        sums = own.sum(axis=1)
        last = int(sums.argmax())
        more = own[last] - np.median(np.delete(own, last, axis=0), axis=0)
        seconds = max(0.0, float(sums[last] - np.median(np.delete(sums, last))))
        found |= {
            "slowest_rank": last, "slowest_host": hosts[last], "slowest_phase": PHASES[OWN[int(more.argmax())]],
            "slowest_sec": seconds,
            "slowest_share": seconds * float(steps[last] / phases[last, [*OWN, VOTE]].sum()),
        }  # fmt: skip
    return found
