"""Names the rank that a hung run waits for, and ends the run if that rank does not go on.

Every rank has a watcher thread, and the lowest rank of a node whose watcher still runs is the node's leader. It reads
the slots of its node's ranks (`distributed.heartbeat`), and publishes them for the other leaders in the store where the
ranks met. The leader that first claims a report in the store logs it. No collective is used: it could hang.

A rank is late if its main thread stays in one phase of a step for ten times the usual time of a step, and for at least
--hang_report_seconds. Its watcher then notes the thread's stack, and the collective that torch's flight recorder shows
in flight, for the leader. No rank is late before three steps are done, nor in saves, validations and callbacks; but a
stopped or dead process is reported at any time. If C code holds Python's lock, the watcher cannot run either: then
`faulthandler` writes the stacks to the rank's log, from a thread that needs no lock.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from smp_train.distributed import failures, generation, group, heartbeat
from smp_train.distributed.agree import gather
from smp_train.distributed.environment import GENERATION, Runtime

TIMES_USUAL = 10
GONE_SECONDS = 10.0
"""The peers of a dead process have at least this long to notice the death and report it themselves."""
STOP_SECONDS = 5.0
"""At its end, a rank waits this long for its watcher, which may be waiting for the store or for a stack."""
NAMED = 8
"""A verdict names at most this many ranks."""
COMPILERS = ("torch/_dynamo", "torch/_inductor", "torch/_functorch", "/triton/")

logger = logging.getLogger("smp_train.watch")

CONDITIONS = {
    "gone": "was killed, or crashed,", "left": "has left,", "stopped": "is stopped,", "silent": "does not answer,",
    "cut off": "is cut off, its node writes nothing,", "": "is",
}  # fmt: skip
"""Conditions of a rank in words, the surest sign of a fault first. A silent rank's watcher does not run either."""


class Report(NamedTuple):
    """What a node's leader knows about a rank."""

    host: str
    step: int
    phase: int
    condition: str = ""
    """One of `CONDITIONS`, or ""."""
    waits: str | None = None
    """The collective that the rank waits in: "" if it is in no collective, None if that is unknown."""
    stack: str = ""
    compiling: bool = False

    def patient(self) -> bool:
        """Return whether the rank does something that may take long."""
        return self.compiling or self.phase not in heartbeat.IN_A_STEP

    def position(self) -> str:
        """Return step, phase, line of code and collective in words."""
        step = f"in step {self.step}, {heartbeat.PHASES[self.phase]}" if self.step >= 0 else "in an unknown step"
        line = f", at {self.stack}" if self.stack else ""
        return step + line + (f", waiting in {self.waits}" if self.waits else "")


def missing(reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that their peers wait for, by the surest sign of a fault; empty if all ranks wait."""
    for condition in filter(None, CONDITIONS):
        if faulty := [rank for rank, report in reports.items() if report.condition == condition]:
            return faulty
    idle = [rank for rank, report in reports.items() if report.waits == ""]
    if idle and any(report.waits for report in reports.values()):
        return idle
    furthest = max((report.step, report.phase) for report in reports.values())
    return [rank for rank, report in reports.items() if (report.step, report.phase) < furthest]


def verdict(reports: Mapping[int, Report]) -> str:
    """Return in one line the missing ranks with host, step and phase, and the step and phase of a waiting rank."""
    absent = missing(reports)
    first = [(rank, reports[rank]) for rank in absent[:NAMED]]
    parts = [f"rank {rank} on {peer.host} {CONDITIONS[peer.condition]} {peer.position()}" for rank, peer in first]
    if len(absent) > NAMED:
        parts.append(f"so are {len(absent) - NAMED} more")
    waiting = [rank for rank in reports if rank not in absent]
    if waiting:
        example = next((rank for rank in waiting if reports[rank].waits), waiting[0])
        text = f"{len(waiting)} others wait" if len(waiting) > 1 else "1 other waits"
        text = text if absent else f"no rank is missing: all {len(waiting)} stand still"
        parts.append(f"{text}, rank {example} {reports[example].position()}")
    return "; ".join(parts)


def in_flight(into: Path | None = None) -> str | None:
    """Return this rank's oldest collective in flight, by torch's flight recorder; "" if no collective is in flight.

    Returns None if the recorder is off. Its records are written to the file ``into``.
    """
    library = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    recorded: list[Any] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # collectives of GPUs, and of CPUs
        with suppress(Exception):
            recorded += json.loads(getattr(library, name)()).get("entries") or []
    if not recorded:
        return None
    if into is not None:
        with suppress(OSError):
            into.write_text(json.dumps(recorded), encoding="utf-8")
    flying = [entry for entry in recorded if not entry.get("retired") and entry.get("state") != "completed"]
    if not flying:
        return ""
    first = flying[0]
    return f"{first['profiling_name']} {first['collective_seq_id']} of group {' '.join(first['process_group'])}"


def stack() -> tuple[str, bool]:
    """Return the main thread's two innermost functions, the innermost of this package, and whether it is compiling."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    functions: list[tuple[str, str]] = []
    compiling = False
    while frame is not None:
        path = frame.f_code.co_filename
        compiling = compiling or any(name in path for name in COMPILERS)
        if path.endswith("c10d_logger.py"):
            pass
        elif len(functions) < 2 or ("smp_train" in path and not any("smp_train" in path for path, _ in functions)):
            functions.append((path, f"{frame.f_code.co_name} ({os.path.basename(path)}:{frame.f_lineno})"))
        frame = frame.f_back
    return " < ".join(text for _, text in functions), compiling


class Watcher:
    """The watcher thread of this rank, until `heartbeat.end`."""

    def __init__(
        self, board: heartbeat.Board, ranks: Runtime, *, report_seconds: float, end_seconds: float
    ) -> None:  # fmt: skip
        """Begin to watch.

        Args:
            board: the slots of this node.
            ranks: this rank's place.
            report_seconds: a rank that does not move for this long, and ten times the usual time of a step, is late.
            end_seconds: a rank that does not move for this long ends the run; 0 never ends it.
        """
        self.board, self.ranks = board, ranks
        self.report_seconds, self.end_seconds = report_seconds, end_seconds or float("inf")
        self.interval = min(1.0, report_seconds / 30)
        self.stale_seconds = max(3.0, 5 * self.interval)
        self.messages: dict[int, tuple[bytes, float]] = {}
        """Each other node's last message, and when it came."""
        self.published = self.noted = self.unanswered = -float("inf")
        self.ran = self.awake = time.monotonic()
        self.hung_step: int | None = None
        self.reports = False
        """Whether this rank, and no other, reports that step ``hung_step`` hangs."""
        self.log: Any = None
        with suppress(OSError, ValueError, AttributeError):
            self.log = board.log(ranks.rank).open("a")
            faulthandler.enable(self.log)  # a crash writes its stack to the log
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name="smp-train-watch", daemon=True)
        self.thread.start()
        heartbeat.at_end.append(self._stop)

    def _stop(self) -> None:
        """Wait for the thread, which must not outlive Python, nor use torch while the process group is destroyed."""
        self.ended.set()
        self.thread.join(STOP_SECONDS)
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self.ended.wait(self.interval):
            try:
                self._look(time.monotonic())
            except Exception as failure:  # a watcher that fails must not harm the run
                logger.debug("the watcher: %s: %s", type(failure).__name__, failure)

    def _look(self, now: float) -> None:
        if now - self.ran > self.stale_seconds:  # this process was stopped itself, so nothing is late yet
            self.awake = now
        self.ran = self.board.slot.tick = now
        if self.log is not None:
            faulthandler.dump_traceback_later(self.report_seconds, repeat=True, file=self.log)
        if (note := heartbeat.ending()) is not None:
            self._leave(note["end"], note["missing"])
        beats = {beat.rank: beat for beat in self.board.read()}
        beat, usual = beats[self.ranks.rank], self.board.usual()
        limit = float("inf") if usual is None else max(self.report_seconds, TIMES_USUAL * usual)
        still = now - max(beat.since, self.awake) if beat.phase in heartbeat.IN_A_STEP else 0.0
        if still > limit / 2 and now - self.noted > self.report_seconds / 3:
            self.noted = now
            functions, compiling = stack()
            waits = in_flight(self.board.logs / f"flight-recorder-rank-{self.ranks.rank}.json")
            if waits is None and beat.phase in (heartbeat.VOTE, heartbeat.OUTCOME):
                waits = "the vote"
            self.board.note({"since": beat.since, "waits": waits, "stack": functions, "compiling": compiling})
        if self.ranks.rank == min(rank for rank, beat in beats.items() if now - beat.tick < self.stale_seconds):
            self._lead(beats, now, still, limit)

    def _lead(self, beats: dict[int, heartbeat.Slot], now: float, still: float, limit: float) -> None:
        """Report or end a hung run, as this node's leader; this rank has not moved for ``still`` seconds."""
        on_node = {rank: self._report(beat, now) for rank, beat in beats.items()}
        replaces = GENERATION in os.environ  # the supervisors replace dead ranks
        patience = {"stopped": self.report_seconds, "gone": float("inf") if replaces else GONE_SECONDS}
        quiet = {rank: now - beat.tick for rank, beat in beats.items()}
        faulty = [rank for rank in quiet if quiet[rank] > patience.get(on_node[rank].condition, float("inf"))]
        reports = self._exchange(on_node, now, all_nodes=bool(faulty) or still > limit / 2)
        if not faulty and still <= limit:
            if self.hung_step is not None and self.reports:
                logger.warning("The run goes on")
            self.hung_step = None
            return
        absent = missing(reports)
        suspects = [reports[rank] for rank in absent or reports]
        if not any(report.condition for report in suspects) and any(report.patient() for report in suspects):
            return
        usual, step = self.board.usual(), self.board.slot.step
        seconds = max([still, *(quiet[rank] for rank in faulty)])
        waited = f"no progress for {seconds:.0f} s" + (f", where a step takes {usual:.2g} s" if usual else "")
        text = f"{waited}: {verdict(reports)}"
        if self.hung_step != step:
            self.hung_step, self.reports = step, self._claims(f"hang/{step}")
            if self.reports:
                logger.warning("%s", text)
        # Data may be slow for good reasons; --distributed_timeout_minutes limits it.
        reading = all(report.phase == heartbeat.DATA and not report.condition for report in suspects)
        if not any(on_node[rank].condition == "gone" for rank in faulty) and (seconds <= self.end_seconds or reading):
            return
        alive = [rank for rank in absent if rank in on_node and on_node[rank].condition not in ("gone", "left")]
        if replaces and absent:
            for rank in alive:
                logger.warning("Rank %d is killed, and replaced", rank)
                os.kill(beats[rank].pid, signal.SIGKILL)
            return
        text += "; ended here, start it again to go on from the last checkpoint"
        if self._claims("end"):
            sys.stderr.write(f"smp-train: [rank {self.ranks.rank} on {self.ranks.hostname}] error: {text}\n")
        # The node's other ranks read this and leave; a rank whose watcher does not run is killed.
        self.board.note({"end": text[: heartbeat.NOTE_BYTES // 4], "missing": absent})
        for rank in alive:
            if on_node[rank].condition:
                os.kill(beats[rank].pid, signal.SIGKILL)
        failures.tell_peers(text.partition("; ")[0])
        self._leave(text, absent)

    def _report(self, beat: heartbeat.Slot, now: float) -> Report:
        """Return the report about a rank of this node."""
        note = beat.note
        known = {name: note[name] for name in ("waits", "stack", "compiling") if note.get("since") == beat.since}
        report, quiet = Report(self.ranks.hostname, beat.step, beat.phase, **known), now - beat.tick
        if quiet < 3 * self.interval:
            return report
        condition = failures.process_state(beat.pid)
        if beat.phase == heartbeat.END:
            return report._replace(condition="left" if condition == "gone" else "")
        if condition == "gone":
            return report._replace(condition=condition, stack=failures.crash_in(self.board.log(beat.rank)))
        if condition == "stopped":
            return report._replace(condition=condition)
        if quiet < self.report_seconds + self.interval:
            return report
        return report._replace(condition="silent", stack=failures.stack_in(self.board.log(beat.rank)) or condition)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        """Return the store's answer. If it does not answer, raise an error, and do not ask it again for a while."""
        met = group.meeting()
        if met is None or time.monotonic() < self.unanswered + 30 * self.interval:
            raise TimeoutError
        try:
            return failures.within(self.stale_seconds / 2, lambda: question(met.store))
        except Exception:
            self.unanswered = time.monotonic()
            raise

    def _claims(self, report: str) -> bool:
        """Return whether this leader is the first to claim a report; True if the store does not answer."""
        rank = str(self.ranks.rank).encode()
        with suppress(Exception):
            return bool(self._ask(lambda store: store.compare_set(report, "", rank.decode())) == rank)
        return True

    def _exchange(self, on_node: dict[int, Report], now: float, *, all_nodes: bool) -> dict[int, Report]:
        """Publish this node's reports; return the reports about the ranks of this node, or of ``all_nodes``."""
        node, every = self.ranks.node_rank, 3 * self.interval
        if self.ranks.num_nodes > 1 and now - self.published > every:
            self.published = now
            text = json.dumps([now, list(on_node.items())])
            with suppress(Exception):
                self._ask(lambda store: store.set(f"beats/{node}", text))
        if self.ranks.num_nodes == 1 or not all_nodes:
            return on_node
        peers = [peer for peer in range(self.ranks.num_nodes) if peer != node]
        try:
            messages = self._ask(lambda store: store.multi_get([f"beats/{peer}" for peer in peers]))
        except Exception:  # the rank or agent that serves the store is stopped or dead
            return {0: Report(self.ranks.master_addr, -1, heartbeat.START, "cut off"), **on_node}
        reports = dict(on_node)
        for peer, message in zip(peers, messages, strict=True):
            if self.messages.get(peer, (b"", 0.0))[0] != message:
                self.messages[peer] = message, now
            cut_off = now - self.messages[peer][1] > 3 * every + 1
            for rank, values in json.loads(message)[1]:
                report = Report(*values)
                reports[rank] = report._replace(condition="cut off") if cut_off else report
        return dict(sorted(reports.items()))

    def _leave(self, text: str, absent: Collection[int]) -> None:
        failures.give_way(text, wait=self.ranks.rank not in absent)
        sys.stdout.flush()
        os._exit(1)


def watch(ranks: Runtime, logs: Path, *, report_seconds: float, end_seconds: float) -> None:
    """Watch this run until `heartbeat.end`, unless the world is one rank or a node lacks shared memory; collective.

    ``logs`` is the folder of the ranks' logs, for stacks and the flight recorder's records; see `Watcher` for the rest.
    """
    met = group.meeting()
    if met is None:
        return
    name = f"smp-train-{met.prefix.rpartition('/')[2]}-{ranks.node_rank}"
    if generation.member is not None:  # a replacement opens the file, too
        name = heartbeat.lasting_name(ranks.master_addr, ranks.master_port, ranks.node_rank)

    def opened() -> bool:
        with suppress(OSError, ValueError):
            heartbeat.open_board(name, ranks.local_rank, ranks.local_world_size, ranks.rank, logs)
        return heartbeat.board is not None

    everywhere = all(gather("opening the heartbeat", opened))
    if generation.member is None:
        heartbeat.unlink(name)
    if everywhere and heartbeat.board is not None:
        Watcher(heartbeat.board, ranks, report_seconds=report_seconds, end_seconds=end_seconds)
    else:
        heartbeat.end()
