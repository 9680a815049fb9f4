"""Start the processes of one node, pass signals on to them, and end as they end. Standard library only.

Like torchrun for a fixed set of processes, with three differences: the exit code is that of the process that failed
first, one line names its rank and node, and a signal that asks for a stop reaches the workers without a traceback.
A failed node ends the whole step, and the cluster (or the user) starts it again from the last checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from smp_train.distributed.environment import LAUNCH
from smp_train.distributed.host import cores
from smp_train.errors import CAUSE_VARIABLE, LOST_PEER
from smp_train.launch.command import node_name, say

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
GRACE_SECONDS = 15.0
"""How long peers of a failed worker may take to exit: they commit a save in progress
(`checkpoints.save.ABANDON_SECONDS`), print their reason, and release the run's checkpoints."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after a second ^C. Workers that end with it have not failed."""
DRAIN_SECONDS = 30.0
CAUSES = {2: "configuration", 3: "data", 4: "checkpoint", 137: "killed", 134: "aborted", 139: "segfault"}
"""Cause by exit code, with 128 + N for signal N."""
# Left by an outer launcher, or by hooks of containers; every worker gets new values.
STALE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip


@dataclass(frozen=True)
class Node:
    """One node of a run, in which each node has ``processes``; ranks follow the order of nodes."""

    processes: int
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of one worker: ``environ`` with torchrun's variables for this rank."""
        inherited = {name: value for name, value in environ.items() if name not in STALE}
        inherited.setdefault("OMP_NUM_THREADS", str(max(1, cores() // self.processes // 2)))
        return inherited | {
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.nodes * self.processes),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_NAME": LAUNCH,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @property
    def first_rank(self) -> int:
        """Rank of this node's first process."""
        return self.node_rank * self.processes


@dataclass(frozen=True)
class Failure:
    """The worker that failed first on this node; ``code`` is 128 + N for signal N."""

    rank: int
    node: str
    code: int
    cause: str

    def line(self) -> str:
        """Return the line to search logs for."""
        return f"LAUNCH-FAIL node={self.node} rank={self.rank} rc={self.code} cause={self.cause}"


def supervise(
    command: Sequence[str], node: Node, *, environ: Mapping[str, str] | None = None, log_dir: Path | None = None,
    grace_seconds: float = GRACE_SECONDS, say: Callable[[str], None] = say,
) -> tuple[int, Failure | None]:  # fmt: skip
    """Run ``command`` once per process of a node and wait for all; return (exit code, first failure).

    With ``log_dir``, the output of each worker is also written to ``<log_dir>/rank-<r>.log``, except for rank 0 on a
    terminal. The exit code is 0 if every worker's is 0, else that of the first worker that failed. Main thread only:
    it handles signals.
    """
    workers = _Workers(log_dir, say)
    previous = {number: signal.signal(number, workers.on_signal) for number in FORWARDED}
    try:
        for local_rank in range(node.processes):
            workers.start(command, node.first_rank + local_rank, node.environment(local_rank, environ or os.environ))
        if workers.signals:
            workers.send(signal.SIGTERM, workers.processes.keys() - workers.asked)  # those that missed the request
        failure = workers.wait(grace_seconds)
    finally:
        workers.send(signal.SIGKILL)
        workers.drain()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if workers.interrupted and failure is None and any(process.wait() for process in workers.processes.values()):
        return INTERRUPTED, None
    return (failure.code if failure else 0), failure


class _Workers:
    """The processes of this node by rank."""

    def __init__(self, log_dir: Path | None, say: Callable[[str], None]) -> None:
        self.log_dir, self.say = log_dir, say
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.pumps: list[threading.Thread] = []
        self.signals: list[int] = []
        self.asked: set[int] = set()
        """Ranks that were sent a request. A second one could kill a Python program that has saved and is ending."""
        self.interrupted = False

    def start(self, command: Sequence[str], rank: int, environ: dict[str, str]) -> None:
        # Rank 0 draws its progress line on the terminal itself; its log is also in the run folder.
        pipe = subprocess.PIPE if self.log_dir and not (rank == 0 and sys.stderr.isatty()) else None
        process = self.processes[rank] = subprocess.Popen(
            command,
            env=environ | ({CAUSE_VARIABLE: str(self.log_dir / f"cause-rank-{rank}")} if self.log_dir else {}),
            stdout=pipe,
            stderr=pipe,
            # ^C of a terminal reaches this process alone, which turns it into a request to stop.
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._in_thread(self._watch, rank)
        if self.log_dir and pipe:
            log = self.log_dir / f"rank-{rank}.log"
            for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                self.pumps.append(self._in_thread(_copy, source, log, sink))

    def _watch(self, rank: int) -> None:
        self.processes[rank].wait()
        self.ended.put(rank)

    @staticmethod
    def _in_thread(target: Callable[..., object], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    def wait(self, grace_seconds: float) -> Failure | None:
        """Wait until all have ended; after a first failure the others have ``grace_seconds``."""
        failure: Failure | None = None
        deadline = float("inf")
        remaining = len(self.processes)
        while remaining:
            if time.monotonic() >= deadline:
                self.send(signal.SIGKILL)
                deadline = float("inf")
            try:
                # A signal handler runs only between two waits, so no wait is long.
                rank = self.ended.get(timeout=max(0.0, min(0.5, deadline - time.monotonic())))
            except queue.Empty:
                continue
            remaining -= 1
            code = self.processes[rank].wait()
            if code and failure is None and not self.interrupted:
                failure = self._failure(rank, code if code > 0 else 128 - code)
                self.say(failure.line())
                deadline = time.monotonic() + grace_seconds
                self.send(signal.SIGTERM)
        return failure

    def _failure(self, rank: int, code: int) -> Failure:
        cause = CAUSES.get(code, "error" if code < 128 else f"signal-{code - 128}")
        if code in (137, 143) and self.signals:
            cause = "stopped-before-saving"
        if self.log_dir:
            with suppress(OSError):
                if (self.log_dir / f"cause-rank-{rank}").read_text(encoding="utf-8") == LOST_PEER:
                    cause = LOST_PEER
        return Failure(rank, node_name(), code, cause)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on; ^C is a request to stop, like SIGTERM, and a second ^C ends everything."""
        again = number == signal.SIGINT and number in self.signals
        self.signals.append(number)
        if again:
            self.interrupted = True
            if any(process.poll() is None for process in self.processes.values()):
                self.say("ended at once, as asked: what was not saved yet is lost")
            self.send(signal.SIGKILL)
            return
        if number == signal.SIGINT:
            self.say("^C: saving after this step (processes get SIGTERM); ^C again ends everything at once")
        self.asked.update(self.processes)
        self.send(signal.SIGTERM if number in (signal.SIGINT, signal.SIGHUP) else number)

    def send(self, number: int, ranks: Collection[int] | None = None) -> None:
        for rank in self.processes if ranks is None else ranks:
            with suppress(ProcessLookupError):
                self.processes[rank].send_signal(number)  # does nothing if the process has ended

    def drain(self) -> None:
        """Wait until the output is copied, within a limit: children of a worker may keep it open."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for pump in self.pumps:
            pump.join(max(0.0, deadline - time.monotonic()))


def _die_with_parent() -> None:
    """In the child: end with the supervisor, however that ends, and ignore requests to stop during start-up.

    SIGUSR1 and SIGUSR2 would kill the program before it has its handlers; ignored signals stay ignored over exec.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent


def _copy(source: IO[bytes], path: Path, sink: TextIO) -> None:
    """Copy each line to the log and to this process's output.

    After a failed write, as on a full disk, reading goes on: the worker would block on its output.
    """
    log: IO[bytes] | None = None
    with suppress(OSError):
        log = path.open("ab", buffering=0)
    for line in source:
        with suppress(OSError):
            if log:
                log.write(line)
        with suppress(OSError):
            sink.buffer.write(line)
            sink.buffer.flush()
    if log:
        log.close()
