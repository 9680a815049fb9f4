"""Names the rank that a hung run waits for, and ends the run if that rank does not go on.

Every rank has a watcher thread. A node's leader is its lowest rank whose watcher still runs. The leader reads the slots
of its node's ranks (`distributed.heartbeat`), and every few seconds writes them to the store where the ranks met, for
the other leaders. The leader of the lowest node that still writes reports. No collective is used, as collectives hang.

A rank is late if its main thread stays in one phase of a step for ten times the usual time of a step, and for at least
--hang_report_seconds. Its watcher then writes the thread's stack, and the collective that torch's flight recorder shows
in flight, for the leader. No rank is late before three steps are done, nor in saves, validations and callbacks; but a
stopped or dead process is reported at any time.
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
"""The peers of a dead process have this long to notice the death and report it themselves."""
GIVE_WAY_SECONDS = 5.0
"""The missing rank ends this much earlier than its peers, as launchers report the process that ends first."""
STACK_SIGNAL = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
"""Makes a process write its stacks even if C code holds the interpreter's lock."""
STOP_SECONDS = 5.0
"""At its end, a rank waits this long for its watcher, which may be waiting for the store or for a stack."""
NAMED = 8
"""Most ranks that a verdict names."""
COMPILERS = ("torch/_dynamo", "torch/_inductor", "torch/_functorch", "/triton/")

logger = logging.getLogger("smp_train.watch")

T = TypeVar("T")


CONDITIONS = {
    "gone": "was killed, or crashed,", "left": "has left,", "stopped": "is stopped,", "silent": "does not answer,",
    "cut off": "is cut off, its node writes nothing,", "": "is",
}  # fmt: skip
"""Conditions of a rank in words, the surest sign of a fault first. A silent rank's watcher does not run either."""


class Report(NamedTuple):
    """A leader's knowledge about a rank."""

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
    """Return the innermost two functions of the main thread, with one of this package, and whether it compiles."""
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
        self, board: heartbeat.Board, ranks: Runtime, logs: Path, *, report_seconds: float, end_seconds: float
    ) -> None:
        """Begin to watch.

        Args:
            board: the slots of this node.
            ranks: this rank's place.
            logs: folder of the ranks' logs, for stacks and for the flight recorder's records.
            report_seconds: a rank that does not move for this long, and ten times the usual time of a step, is late.
            end_seconds: a rank that does not move for this long ends the run; 0 never ends it.
        """
        self.board, self.ranks, self.logs = board, ranks, logs
        self.report_seconds, self.end_seconds = report_seconds, end_seconds or float("inf")
        self.interval = min(1.0, report_seconds / 30)
        self.publish_seconds = 3 * self.interval
        self.stale_seconds = max(3.0, 5 * self.interval)
        self._others: dict[int, tuple[float, int, dict[int, Report]]] = {}
        """For each other node: when its last message came, the message's number, and its reports."""
        self._published = self._answered = self._asked = -float("inf")
        self._ran = self._awake = time.monotonic()
        self._answer: dict[str, Any] = {}
        with suppress(OSError, ValueError, AttributeError):
            self._log = board.log(ranks.rank).open("a")
            faulthandler.enable(self._log)  # a crash writes its stack to the log
            faulthandler.register(STACK_SIGNAL, file=self._log, all_threads=True)  # type: ignore[arg-type]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="smp-train-watch", daemon=True)
        self._thread.start()
        heartbeat.at_end(self._stop)

    def _stop(self) -> None:
        """Wait for the thread, which must not outlive Python, nor use torch while the process group is destroyed."""
        self._ended.set()
        self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            try:
                self._look(time.monotonic())
            except Exception as failure:  # a watcher that fails must not harm the run
                logger.debug("the watcher: %s: %s", type(failure).__name__, failure)

    def _look(self, now: float) -> None:
        if now - self._ran > self.stale_seconds:  # this process was stopped itself, so nothing is late yet
            self._awake = now
        self._ran = now
        self.board.tick(now)
        beats = self.board.read()
        if order := heartbeat.ordered():
            self._leave(order["end"], order["missing"])
        (my_beat,) = (beat for beat in beats if beat.rank == self.ranks.rank)
        usual = self.board.usual()
        limit = float("inf") if usual is None else max(self.report_seconds, TIMES_USUAL * usual)
        still = now - max(my_beat.since, self._awake) if my_beat.phase in heartbeat.IN_A_STEP else 0.0
        if still > limit / 2 and now - self._answered > self.report_seconds / 3:
            self._answered = now
            functions, compiling = stack()
            waits = in_flight(self.logs / f"flight-recorder-rank-{self.ranks.rank}.json")
            if waits is None and my_beat.phase in (heartbeat.VOTE, heartbeat.OUTCOME):
                waits = "the vote"
            self._answer |= {"since": my_beat.since, "waits": waits, "stack": functions, "compiling": compiling}
            self.board.answer(self._answer)
        if self.ranks.rank == min(beat.rank for beat in beats if now - beat.tick < self.stale_seconds):
            self._lead(beats, now, still, limit, usual)

    def _lead(self, beats: list[heartbeat.Beat], now: float, still: float, limit: float, usual: float | None) -> None:
        """Report or end a hung run, as this node's leader; this rank has not moved for ``still`` seconds."""
        of_node = {beat.rank: self._report(beat, now) for beat in beats}
        quiet = {
            condition: max((now - b.tick for b in beats if of_node[b.rank].condition == condition), default=0.0)
            for condition in ("gone", "stopped")
        }
        gone, stopped = quiet["gone"] > GONE_SECONDS, quiet["stopped"] > self.report_seconds
        reports, reporting = of_node, True
        if self.ranks.num_nodes > 1:
            self._publish(of_node, now)
            if still > limit / 2 or gone or stopped:
                reports, reporting = self._everywhere(of_node, now)
        if not (still > limit or gone or stopped):
            if self._answer.pop("said", None) is not None:
                logger.warning("The run goes on")
            return
        absent = missing(reports)
        suspects = [reports[rank] for rank in absent or reports]
        if not any(report.condition for report in suspects) and any(report.patient() for report in suspects):
            return
        seconds = max(still, *quiet.values())
        waited = f"no progress for {seconds:.0f} s" + (f", where a step takes {usual:.2g} s" if usual else "")
        text = f"{waited}: {verdict(reports)}"
        step = self.board.step
        # Read the slots again: on a busy node another rank may have become the leader meanwhile, and reported.
        if reporting and all(beat.answer.get("said") != step for beat in self.board.read()):
            logger.warning("%s", text)
            self._answer["said"] = step  # so that the next leader does not repeat it
            self.board.answer(self._answer)
        # Data may be slow for good reasons; --distributed_timeout_minutes limits it.
        reading = all(report.phase == heartbeat.DATA and not report.condition for report in suspects)
        if gone or (seconds > max(self.end_seconds, limit if still > limit else 0.0) and not reading):
            self._end(text, absent, {beat.rank: beat.pid for beat in beats}, of_node, reporting)

    def _report(self, beat: heartbeat.Beat, now: float) -> Report:
        """Return the report about a rank of this node."""
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
        """Return the store's answer. If it does not answer, raise an error, and do not ask it again for a while."""
        met = group.meeting()
        if met is None or now < self._asked + 30 * self.interval:
            raise TimeoutError

        try:
            return failures.within(self.stale_seconds / 2, lambda: ask(met.store))
        except Exception:
            self._asked = now
            raise

    def _publish(self, of_node: dict[int, Report], now: float) -> None:
        if now - self._published > self.publish_seconds:
            self._published = now
            with suppress(Exception):
                text = json.dumps([now, list(of_node.items())])
                self._ask(now, lambda store: store.set(f"beats/{self.ranks.node_rank}", text))

    def _everywhere(self, of_node: dict[int, Report], now: float) -> tuple[dict[int, Report], bool]:
        """Return the reports about all ranks, and whether this node is the one that reports the hang."""
        nodes = [node for node in range(self.ranks.num_nodes) if node != self.ranks.node_rank]
        reports = dict(of_node)
        try:
            messages = self._ask(now, lambda store: store.multi_get([f"beats/{node}" for node in nodes]))
        except Exception:  # the rank or agent that serves the store is stopped or dead: each node reports for itself
            reports.setdefault(0, Report(self.ranks.master_addr, -1, heartbeat.START, "cut off"))
            return reports, True
        first = True
        for node, text in zip(nodes, messages, strict=True):
            number, items = json.loads(text)
            theirs = {int(rank): Report(*report) for rank, report in items}
            came, last_number, _ = self._others.get(node, (now, number, theirs))
            came = now if number != last_number else came
            self._others[node] = (came, number, theirs)
            if now - came > 3 * self.publish_seconds + 1:
                theirs = {rank: report._replace(condition="cut off") for rank, report in theirs.items()}
            else:
                first = first and node > self.ranks.node_rank
            reports |= theirs
        return dict(sorted(reports.items())), first

    def _end(
        self, text: str, absent: list[int], processes: dict[int, int], of_node: dict[int, Report], reporting: bool
    ) -> None:
        """End the run: the missing ranks first, then this node's other ranks, which read the order in this slot."""
        text += "; ended here, start it again to go on from the last checkpoint"
        if reporting:
            sys.stderr.write(f"smp-train: [rank {self.ranks.rank} on {self.ranks.hostname}] error: {text}\n")
        self.board.answer({"end": text[: heartbeat.SLOT_BYTES // 4], "missing": absent})
        for rank in absent:
            if rank in of_node and of_node[rank].condition in ("stopped", "silent"):
                os.kill(processes[rank], signal.SIGKILL)
        failures.tell_peers(text.partition("; ")[0])
        self._leave(text, absent)

    def _leave(self, text: str, absent: Iterable[int]) -> None:
        if self.ranks.rank not in absent:
            time.sleep(GIVE_WAY_SECONDS)
        failures.write_error_file(text, 1)
        failures.write_cause()
        sys.stdout.flush()
        os._exit(1)


def stack_of(log: Path, process: int) -> str:
    """Return the main thread's innermost functions in a process whose watcher does not run; "" if that fails."""
    with suppress(OSError, IndexError, ValueError):
        size = log.stat().st_size
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if not STACK_SIGNAL or not caught >> (STACK_SIGNAL - 1) & 1:
            return ""  # without a handler the signal would end the process
        os.kill(process, STACK_SIGNAL)
        time.sleep(0.5)
        return heartbeat.innermost(log.read_bytes()[size:].decode(errors="replace").rpartition("hread 0x")[2])
    return ""


def watch(ranks: Runtime, logs: Path, *, report_seconds: float, end_seconds: float) -> None:
    """Watch this run until `heartbeat.end`, unless the world is one rank or a node lacks shared memory; collective.

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
