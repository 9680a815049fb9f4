"""Names the rank that a hung run waits for, and ends the run when it stays away.

Every rank has a thread that watches; there is no watcher whose death goes unseen. On a node the lowest rank whose
thread still runs, the leader, judges: it reads its peers' slots (`distributed.heartbeat`), and those of other nodes in
the store where the ranks met, into which each leader writes its node's every few seconds. The leader of the lowest node
that still writes reports. No collective is used: those are what hangs.

A rank is late when its main thread stands still in a phase of a step for ten times the usual time of a step, and at
least --hang_report_seconds. Its watcher then leaves its stack, and what torch's flight recorder has in flight, for the
leader. Before three steps are done, and in saves, validations and callbacks, nobody is late; a process that is
stopped, or gone, is found there too.
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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from smp_train.distributed import failures, group, heartbeat
from smp_train.distributed.agree import gather
from smp_train.distributed.environment import Runtime

TIMES_USUAL = 10
GONE_SECONDS = 10.0
"""How long a process may be gone before its peers are ended: most find that out, and say so, by themselves."""
GIVE_WAY_SECONDS = 5.0
"""How much later the others end than the missing rank, for launchers that report the first process to end."""
STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""Makes a process write its stacks that cannot run Python: its C code holds the interpreter's lock."""
STOP_SECONDS = 5.0
"""How long the end waits for a watcher that waits for the store, or for a stack."""
NAMED = 8
"""Ranks that a verdict names at most."""
COMPILERS = ("torch/_dynamo", "torch/_inductor", "torch/_functorch", "/triton/")

logger = logging.getLogger("smp_train.watch")

T = TypeVar("T")


CONDITIONS = {
    "gone": "was killed, or crashed,", "left": "has left,", "stopped": "is stopped,", "silent": "does not answer,",
    "cut off": "is cut off, its node writes nothing,", "": "is",
}  # fmt: skip
"""What may be wrong with a rank, the surest sign first, in words. A silent one's watcher does not run either."""


class Report(NamedTuple):
    """What is known of a rank."""

    host: str
    step: int
    phase: int
    condition: str = ""
    """One of `CONDITIONS`, or ""."""
    waits: str | None = None
    """The collective that it waits in; "" for none; None where that is not known."""
    stack: str = ""
    compiling: bool = False

    def patient(self) -> bool:
        """Return whether it does what may take long."""
        return self.compiling or self.phase not in heartbeat.IN_A_STEP

    def place(self) -> str:
        """Return step, phase, line of code and collective in words."""
        known = f"in step {self.step}, {heartbeat.PHASES[self.phase]}" if self.step >= 0 else "in an unknown step"
        at = f", at {self.stack}" if self.stack else ""
        return known + at + (f", waiting in {self.waits}" if self.waits else "")


def missing(reports: Mapping[int, Report]) -> list[int]:
    """Return the ranks that the others wait for, by the surest sign that any rank shows; none where all wait."""
    for condition in filter(None, CONDITIONS):
        if found := [rank for rank, report in reports.items() if report.condition == condition]:
            return found
    idle = [rank for rank, report in reports.items() if report.waits == ""]
    if idle and any(report.waits for report in reports.values()):
        return idle
    furthest = max((report.step, report.phase) for report in reports.values())
    return [rank for rank, report in reports.items() if (report.step, report.phase) < furthest]


def verdict(reports: Mapping[int, Report]) -> str:
    """Return in one line which ranks are missing, on which node, in which step, doing what; and what the others do."""
    found = missing(reports)
    named = [(rank, reports[rank]) for rank in found[:NAMED]]
    parts = [f"rank {rank} on {one.host} {CONDITIONS[one.condition]} {one.place()}" for rank, one in named]
    if len(found) > NAMED:
        parts.append(f"so are {len(found) - NAMED} more")
    rest = [rank for rank in reports if rank not in found]
    if rest:
        example = next((rank for rank in rest if reports[rank].waits), rest[0])
        waiting = f"{len(rest)} others wait" if len(rest) > 1 else "1 other waits"
        others = waiting if found else f"no rank is missing: all {len(rest)} stand still"
        parts.append(f"{others}, rank {example} {reports[example].place()}")
    return "; ".join(parts)


def in_flight(into: Path | None = None) -> str | None:
    """Return the oldest collective that torch's flight recorder has in flight on this rank; "" for none.

    None where it records nothing. What it has is written to the file ``into``.
    """
    library = getattr(getattr(sys.modules.get("torch"), "_C", None), "_distributed_c10d", None)
    recorded: list[Any] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # of GPUs, of CPUs
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
    """Return the innermost functions of this process's main thread, and whether it compiles."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found: list[tuple[str, str]] = []
    compiling = False
    while frame is not None:
        path = frame.f_code.co_filename
        compiling = compiling or any(name in path for name in COMPILERS)
        if path.endswith("c10d_logger.py"):
            pass
        elif len(found) < 2 or ("smp_train" in path and not any("smp_train" in path for path, _ in found)):
            found.append((path, f"{frame.f_code.co_name} ({os.path.basename(path)}:{frame.f_lineno})"))
        frame = frame.f_back
    return " < ".join(text for _, text in found), compiling


class Watcher:
    """The watcher of this rank: a thread until `heartbeat.end`."""

    def __init__(
        self, board: heartbeat.Board, ranks: Runtime, logs: Path, *, report_seconds: float, end_seconds: float
    ) -> None:
        """Begin to watch.

        Args:
            board: the slots of this node.
            ranks: this rank's place.
            logs: folder of the ranks' logs, for stacks and for what the flight recorder has.
            report_seconds: a step is late after ten times its usual time, and at least so long.
            end_seconds: a step as late as this ends the run; 0: never.
        """
        self.board, self.ranks, self.logs = board, ranks, logs
        self.report_seconds, self.end_seconds = report_seconds, end_seconds or float("inf")
        self.interval = min(1.0, report_seconds / 30)
        self.publish_seconds = 3 * self.interval
        self.stale_seconds = max(3.0, 5 * self.interval)
        self._others: dict[int, tuple[float, int, dict[int, Report]]] = {}
        """Of each other node: when its last word came, its number, and what it says."""
        self._published = self._answered = self._asked = -float("inf")
        self._ran = self._awake = time.monotonic()
        self._answer: dict[str, Any] = {}
        with suppress(OSError, ValueError, AttributeError):
            self._log = board.log(ranks.rank).open("a")
            faulthandler.enable(self._log)  # a crash leaves its stack there
            faulthandler.register(STACK_SIGNAL, file=self._log, all_threads=True)  # type: ignore[arg-type]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smp-train-watch", daemon=True)
        self._thread.start()
        heartbeat.at_end(self._stop)

    def _stop(self) -> None:
        """Wait for the thread: it must not ask torch about a process group that goes away, nor outlive Python."""
        self._ended.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            try:
                self._look(time.monotonic())
            except Exception as failure:  # a watcher that fails must not harm the run
                logger.debug("the watcher: %s: %s", type(failure).__name__, failure)

    def _look(self, now: float) -> None:
        if now - self._ran > self.stale_seconds:  # this process was stopped itself: so far, nothing is late
            self._awake = now
        self._ran = now
        self.board.tick(now)
        beats = self.board.read()
        if order := heartbeat.ordered():
            self._leave(order["end"], order["missing"])
        (mine,) = (beat for beat in beats if beat.rank == self.ranks.rank)
        usual = self.board.usual()
        limit = float("inf") if usual is None else max(self.report_seconds, TIMES_USUAL * usual)
        still = now - max(mine.since, self._awake) if mine.phase in heartbeat.IN_A_STEP else 0.0
        if still > limit / 2 and now - self._answered > self.report_seconds / 3:
            self._answered = now
            at, compiling = stack()
            waits = in_flight(self.logs / f"flight-recorder-rank-{self.ranks.rank}.json")
            if waits is None and mine.phase in (heartbeat.VOTE, heartbeat.OUTCOME):
                waits = "the vote"
            self._answer |= {"since": mine.since, "waits": waits, "stack": at, "compiling": compiling}
            self.board.answer(self._answer)
        if self.ranks.rank == min(beat.rank for beat in beats if now - beat.tick < self.stale_seconds):
            self._lead(beats, now, still, limit, usual)

    def _lead(self, beats: list[heartbeat.Beat], now: float, still: float, limit: float, usual: float | None) -> None:
        """Judge, as this node's leader; ``still``: seconds for which this rank has stood still in a step."""
        here = {beat.rank: self._report(beat, now) for beat in beats}
        quiet = {
            condition: max((now - b.tick for b in beats if here[b.rank].condition == condition), default=0.0)
            for condition in ("gone", "stopped")
        }
        gone, stopped = quiet["gone"] > GONE_SECONDS, quiet["stopped"] > self.report_seconds
        reports, reporting = here, True
        if self.ranks.num_nodes > 1:
            self._publish(here, now)
            if still > limit / 2 or gone or stopped:
                reports, reporting = self._everywhere(here, now)
        if not (still > limit or gone or stopped):
            if self._answer.pop("said", None) is not None:
                logger.warning("The run goes on")
            return
        found = missing(reports)
        suspects = [reports[rank] for rank in found or reports]
        if not any(report.condition for report in suspects) and any(report.patient() for report in suspects):
            return
        seconds = max(still, *quiet.values())
        waited = f"no progress for {seconds:.0f} s" + (f", where a step takes {usual:.2g} s" if usual else "")
        text = f"{waited}: {verdict(reports)}"
        step = self.board.step
        # Read again: on a busy node this thread may have taken so long that another rank led, and said it.
        if reporting and all(beat.answer.get("said") != step for beat in self.board.read()):
            logger.warning("%s", text)
            self._answer["said"] = step  # also for the next leader
            self.board.answer(self._answer)
        # Data may be slow for good reasons: that is for --distributed_timeout_minutes to end.
        reading = all(report.phase == heartbeat.DATA and not report.condition for report in suspects)
        if gone or (seconds > max(self.end_seconds, limit if still > limit else 0.0) and not reading):
            self._end(text, found, {beat.rank: beat.pid for beat in beats}, here, reporting)

    def _report(self, beat: heartbeat.Beat, now: float) -> Report:
        """Return what is known of a rank of this node."""
        answer = beat.answer if beat.answer.get("since") == beat.since else {}
        report = Report(
            self.ranks.hostname, beat.step, beat.phase, waits=answer.get("waits"), stack=answer.get("stack", ""),
            compiling=answer.get("compiling", False),
        )  # fmt: skip
        if now - beat.tick < 3 * self.interval:
            return report
        condition = heartbeat.state(beat.pid)
        if beat.phase == heartbeat.END:
            return report._replace(condition="left" if condition == "gone" else "")
        if condition == "gone":
            return report._replace(condition=condition, stack=heartbeat.crash_of(self.board.log(beat.rank)))
        if condition == "stopped":
            return report._replace(condition=condition)
        if now - beat.tick < self.report_seconds:
            return report
        return report._replace(condition="silent", stack=stack_of(self.board.log(beat.rank), beat.pid) or condition)

    def _ask(self, now: float, ask: Callable[[Any], T]) -> T:
        """Return what the store says; raises where it does not answer, and for a while afterwards does not ask."""
        met = group.meeting()
        if met is None or now < self._asked + 30 * self.interval:
            raise TimeoutError

        try:
            return failures.within(self.stale_seconds / 2, lambda: ask(met.store))
        except Exception:
            self._asked = now
            raise

    def _publish(self, here: dict[int, Report], now: float) -> None:
        if now - self._published > self.publish_seconds:
            self._published = now
            with suppress(Exception):
                text = json.dumps([now, list(here.items())])
                self._ask(now, lambda store: store.set(f"beats/{self.ranks.node_rank}", text))

    def _everywhere(self, here: dict[int, Report], now: float) -> tuple[dict[int, Report], bool]:
        """Return what is known of all ranks, and whether this node is the one to report it."""
        nodes = [node for node in range(self.ranks.num_nodes) if node != self.ranks.node_rank]
        reports = dict(here)
        try:
            said = self._ask(now, lambda store: store.multi_get([f"beats/{node}" for node in nodes]))
        except Exception:  # whoever serves the store is stopped or gone: each node reports for itself
            reports.setdefault(0, Report(self.ranks.master_addr, -1, heartbeat.START, "cut off"))
            return reports, True
        first = True
        for node, text in zip(nodes, said, strict=True):
            number, items = json.loads(text)
            theirs = {int(rank): Report(*report) for rank, report in items}
            came, before, _ = self._others.get(node, (now, number, theirs))
            came = now if number != before else came
            self._others[node] = (came, number, theirs)
            if now - came > 3 * self.publish_seconds + 1:
                theirs = {rank: report._replace(condition="cut off") for rank, report in theirs.items()}
            else:
                first = first and node > self.ranks.node_rank
            reports |= theirs
        return dict(sorted(reports.items())), first

    def _end(
        self, text: str, found: list[int], processes: dict[int, int], here: dict[int, Report], reporting: bool
    ) -> None:
        """End the run: the missing rank first, then this node's others, which read it in this slot."""
        text += "; ended here, start it again to go on from the last checkpoint"
        if reporting:
            sys.stderr.write(f"smp-train: [rank {self.ranks.rank} on {self.ranks.hostname}] error: {text}\n")
        self.board.answer({"end": text[: heartbeat.SLOT_BYTES // 4], "missing": found})
        for rank in found:
            if rank in here and here[rank].condition in ("stopped", "silent"):
                os.kill(processes[rank], signal.SIGKILL)
        failures.tell_peers(text.partition("; ")[0])
        self._leave(text, found)

    def _leave(self, text: str, found: Iterable[int]) -> None:
        if self.ranks.rank not in found:
            time.sleep(GIVE_WAY_SECONDS)
        failures.write_error_file(text, 1)
        failures.write_cause()
        sys.stdout.flush()
        os._exit(1)


def stack_of(log: Path, process: int) -> str:
    """Return where the main thread is of a process that runs no Python; "" where that does not come out."""
    with suppress(OSError, IndexError, ValueError):
        before = log.stat().st_size
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if not STACK_SIGNAL or not caught >> (STACK_SIGNAL - 1) & 1:
            return ""  # without a handler the signal would end the process
        os.kill(process, STACK_SIGNAL)
        time.sleep(0.5)
        return heartbeat.innermost(log.read_bytes()[before:].decode(errors="replace").rpartition("hread 0x")[2])
    return ""


def watch(ranks: Runtime, logs: Path, *, report_seconds: float, end_seconds: float) -> None:
    """Watch this run until `heartbeat.end`, but in a world of one and where a node has no memory to share; collective.

    The arguments are `Watcher`'s.
    """
    met = group.meeting()
    if met is None:
        return
    name = f"smp-train-{met.prefix.rpartition('/')[2]}-{ranks.node_rank}"
    board: list[heartbeat.Board] = []

    def opened() -> bool:
        with suppress(OSError, ValueError):
            board.append(heartbeat.open_board(name, ranks.local_rank, ranks.local_world_size, ranks.rank, logs))
        return bool(board)

    everywhere = all(gather("opening the heartbeat", opened))
    heartbeat.unlink(name)
    if everywhere:
        Watcher(board[0], ranks, logs, report_seconds=report_seconds, end_seconds=end_seconds)
    else:
        heartbeat.end()
