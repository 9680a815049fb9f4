"""Seconds of each phase of a step on every rank, and the rank that the other ranks wait for.

A phase begins at a mark, which is a call of `heartbeat.enter`. On a CPU a mark is a reading of the clock. On a GPU it
is an event in the device's queue, so a phase's time is the device's: reading data takes no time while the host is
ahead, and otherwise the time for which the device is idle. All phases add up to the whole time. An event is read once
the device has passed it; nothing waits for it.

FSDP2's collectives are timed as well. On a GPU they overlap compute and are not part of the sum; the profiler
(`telemetry.verdict`) measures how much is exposed. A rank that is slow in forward or backward makes all other ranks
wait in these collectives, so a rank's work is its phases without its collectives. The vote, the first collective of a
step, carries three numbers: its time is spent waiting for slower ranks.
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
from smp_train.distributed.heartbeat import PHASES
from smp_train.distributed.to_host import ToHost
from smp_train.telemetry.logging_utils import get_logger
from smp_train.telemetry.metrics import NAMED_FROM, TIME_FIELDS

SHARES = {
    "forward": (heartbeat.FORWARD,), "backward": (heartbeat.BACKWARD,), "clip": (heartbeat.CLIP,),
    "update": (heartbeat.UPDATE,), "wait_for_ranks": (heartbeat.VOTE,), "data": (heartbeat.DATA,),
    "host": (heartbeat.OUTCOME, heartbeat.LOG, heartbeat.CALLBACK, heartbeat.START), "save": (heartbeat.SAVE,),
    "validation": (heartbeat.VALIDATION,),
}  # fmt: skip
"""For each field of ``time_shares``, the phases that it sums."""
WORK = (
    heartbeat.DATA, heartbeat.FORWARD, heartbeat.BACKWARD, heartbeat.CLIP, heartbeat.UPDATE, heartbeat.OUTCOME,
    heartbeat.LOG,
)  # fmt: skip
"""Phases in which a slow rank makes all other ranks wait."""
NAMED_AFTER = 3
"""The log names a rank after so many consecutive records in which it delays all other ranks by `NAMED_FROM`."""
_COLLECTIVES = {heartbeat.FORWARD: len(PHASES), heartbeat.BACKWARD: len(PHASES) + 1}
"""For each phase with collectives, the column of their seconds."""
_COLUMNS = len(PHASES) + 4

log = get_logger()


class StepTimes:
    """Measures a rank's seconds per phase, and gathers those of all ranks at each record."""

    def __init__(self, ranks: Runtime, device: torch.device) -> None:
        """Measure until the heartbeat ends; collective."""
        self.hosts = gather("naming the nodes", lambda: ranks.hostname)
        self._device, self._on_gpu = device, device.type == "cuda"
        # Seconds of each phase, of collectives in forward and in backward, and of the host's wait; number of steps.
        self._sums = [0.0] * _COLUMNS
        self._phase, self._since = heartbeat.START, time.perf_counter()
        self._marks: deque[tuple[int, torch.cuda.Event]] = deque()
        self._collectives: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._unused: list[torch.cuda.Event] = []
        self._coming: ToHost | None = None
        self._late: tuple[int, int] | None = None
        self._late_for = 0
        heartbeat.listeners.append(self.mark)
        heartbeat.collective = self.collective

    def mark(self, phase: int) -> None:
        """Record that the main thread enters a phase; does not wait for the device."""
        now = time.perf_counter()
        if self._on_gpu:
            if self._phase == heartbeat.OUTCOME:
                self._sums[-2] += now - self._since
            self._marks.append((phase, self._event()))
            if phase == heartbeat.DATA:
                self._read_marks()
        else:
            self._add(self._phase, now - self._since)
        self._phase, self._since = phase, now

    def _event(self) -> torch.cuda.Event:
        """Record an event in this thread's CUDA stream now, and return it."""
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Measure the collective in the body if the phase is forward or backward; does not wait for the device."""
        column, began = _COLLECTIVES.get(heartbeat.phase), time.perf_counter()
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
        """Add the times between marks that the device has passed."""
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
        self._sums[-1] += phase == heartbeat.DATA

    def gather(self) -> None:
        """Start sending the times since the last call to all hosts; collective, does not wait for the device."""
        self._read_marks()
        everyone = torch.zeros(len(self.hosts), _COLUMNS)
        everyone[rank()] = torch.tensor(self._sums)
        self._sums = [0.0] * _COLUMNS
        if self._on_gpu:
            everyone = everyone.pin_memory().to(self._device, non_blocking=True)
        dist.all_reduce(everyone)
        self._coming = ToHost(everyone)

    def fields(self) -> dict[str, Any]:
        """Return the fields of `metrics.TIME_FIELDS`; waits for the last `gather` only."""
        assert self._coming is not None, "gathered with the record's other numbers"
        coming, self._coming = self._coming, None
        record = summary(coming.values(), self.hosts, with_host=self._on_gpu)
        self._name_slowest(record)
        return record

    def _name_slowest(self, record: dict[str, Any]) -> None:
        """Log the slowest rank once it has been slowest in the same phase for `NAMED_AFTER` records."""
        late = None
        if (record["slowest_share"] or 0) >= NAMED_FROM:
            late = record["slowest_rank"], PHASES.index(record["slowest_phase"])
        self._late_for = self._late_for + 1 if late == self._late else 1
        self._late = late
        if late is not None and self._late_for == NAMED_AFTER:
            log.warning(
                "The other ranks wait for rank %d on %s: %.2g s in every step, %.0f%% of it; it differs from them most "
                "in %s", record["slowest_rank"], record["slowest_host"], record["slowest_sec"],
                100 * record["slowest_share"], record["slowest_phase"], extra=ALL_RANKS,
            )  # fmt: skip


def summary(rows: Any, hosts: Sequence[str], *, with_host: bool = False) -> dict[str, Any]:
    """Return the fields of `metrics.TIME_FIELDS`, with None for unknown values.

    Every rank calls this at every log line, so it computes all ranks' rows at once.

    Args:
        rows: ``[ranks, columns]``; the columns are the seconds in each phase of `PHASES`, in collectives of forward, in
            collectives of backward, of the host's wait for the device, and the number of steps.
        hosts: name of each rank's node.
        with_host: whether the device works asynchronously to the host.
    """
    record: dict[str, Any] = dict.fromkeys(TIME_FIELDS)
    rows = np.asarray(rows, dtype=np.float64)
    steps, phases, talk = rows[:, -1], rows[:, : len(PHASES)], float(rows[:, list(_COLLECTIVES.values())].sum())
    total = float(phases.sum())
    if total <= 0 or not steps.all():
        return record
    record["time_shares"] = {name: float(phases[:, list(parts)].sum()) / total for name, parts in SHARES.items()}
    record["communication_share"] = talk / total if talk else None
    if with_host:
        record["host_ahead_sec"] = float((rows[:, -2] / steps).min())
    if len(rows) > 1:
        work = phases.copy()
        work[:, list(_COLLECTIVES)] -= rows[:, list(_COLLECTIVES.values())]
        work = work[:, list(WORK)] / steps[:, None]
        sums = work.sum(axis=1)
        slowest = int(sums.argmax())
        excess = work[slowest] - np.median(np.delete(work, slowest, axis=0), axis=0)
        seconds = max(0.0, float(sums[slowest] - np.median(np.delete(sums, slowest))))
        record |= {
            "slowest_rank": slowest, "slowest_host": hosts[slowest], "slowest_sec": seconds,
            "slowest_phase": PHASES[WORK[int(excess.argmax())]],
            "slowest_share": seconds * float(steps[slowest] / phases[slowest, [*WORK, heartbeat.VOTE]].sum()),
        }  # fmt: skip
    return record
