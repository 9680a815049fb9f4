"""Starts the processes of one node, passes signals on to them, and ends as they end. Standard library only.

As torchrun for a fixed set of processes, with three differences: the exit code is that of the process that failed
first, one line names its rank and node, and a signal that asks for a stop reaches the workers without a traceback.
There is no restart in place: a failed node ends the whole step, and the cluster (or the person) starts it again from
the last checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from smp_train.errors import CAUSE_VARIABLE, LOST_PEER

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
GRACE_SECONDS = 15.0
"""How long peers of a failed worker may take to exit: they commit a save in progress
(`checkpoints.manager.ABANDON_SECONDS`), print their reason, and release a lock."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code where a second ^C ended everything: the user's doing, and no failure."""
# Left by an outer launcher, or by hooks of containers; ours are set anew for every worker.
STALE = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A node's rank among the nodes of a run, each with ``processes``; ranks follow the order of nodes."""

    processes: int
    nodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of one worker: ``environ`` with torchrun's variables for it."""
        kept = {name: value for name, value in environ.items() if name not in STALE}
        kept.setdefault("OMP_NUM_THREADS", str(max(1, (_cpus() // self.processes) // 2)))
        return kept | {
            "RANK": str(self.first_rank + local_rank),
            "WORLD_SIZE": str(self.nodes * self.processes),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }

    @property
    def first_rank(self) -> int:
        """Rank of this node's first process."""
        return self.node_rank * self.processes


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_port() -> int:
    """Return a TCP port that is free on this machine now, outside of the range of ephemeral ports.

    Rank 0 listens there seconds later: an ephemeral port (Linux: from 32768 on) may be taken by then.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port


@dataclass(frozen=True)
class Failure:
    """The worker that failed first on this node."""

    rank: int
    node: str
    code: int
    """Exit code as a shell shows it: 128 + N for signal N."""
    cause: str

    def line(self) -> str:
        """Return the line to search logs for."""
        return f"LAUNCH-FAIL node={self.node} rank={self.rank} rc={self.code} cause={self.cause}"


def supervise(
    command: Sequence[str],
    place: Place,
    *,
    environ: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    grace_seconds: float = GRACE_SECONDS,
    say: Callable[[str], None] | None = None,
) -> tuple[int, Failure | None]:
    """Run ``command`` once per process of ``place`` and wait for all; return (exit code, first failure).

    With ``log_dir``, what each worker prints is also written to ``<log_dir>/rank-<r>.log``. The exit code is 0 when
    every worker's is 0, else that of the first that failed. Main thread only: it handles signals.
    """
    say = say or _say
    return _Supervisor(list(command), place, dict(environ or os.environ), log_dir, grace_seconds, say).run()


class _Supervisor:
    def __init__(
        self,
        command: list[str],
        place: Place,
        environ: dict[str, str],
        log_dir: Path | None,
        grace_seconds: float,
        say: Callable[[str], None],
    ) -> None:
        self.command, self.place, self.environ, self.log_dir = command, place, environ, log_dir
        self.grace_seconds, self.say = grace_seconds, say
        self.workers: list[subprocess.Popen[bytes]] = []
        self.ended: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.asked: list[signal.Signals] = []
        self.interrupted = False

    def run(self) -> tuple[int, Failure | None]:
        previous = {number: signal.signal(number, self._on_signal) for number in FORWARDED}
        pumps: list[threading.Thread] = []
        try:
            for local_rank in range(self.place.processes):
                self._start(local_rank)
            pumps = [thread for index in range(len(self.workers)) for thread in self._pump(index)]
            if self.asked:
                self._send(signal.SIGTERM)  # those that were not there yet when it came
            for index in range(len(self.workers)):
                threading.Thread(target=self._watch, args=(index,), daemon=True).start()
            failure = self._wait()
        finally:
            for worker in self.workers:
                if worker.poll() is None:
                    worker.kill()
            _drain(pumps)
            for number, handler in previous.items():
                signal.signal(number, handler)
        if self.interrupted and failure is None and any(worker.returncode for worker in self.workers):
            return INTERRUPTED, None
        return (failure.code if failure else 0), failure

    def _start(self, local_rank: int) -> None:
        self.workers.append(
            subprocess.Popen(
                self.command,
                env=self.place.environment(local_rank, self.environ) | self._cause_file(local_rank),
                stdout=subprocess.PIPE if self.log_dir else None,
                stderr=subprocess.PIPE if self.log_dir else None,
                # ^C of a terminal reaches this process alone, which turns it into a request to stop.
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        )

    def _cause_file(self, local_rank: int) -> dict[str, str]:
        if self.log_dir is None:
            return {}
        return {CAUSE_VARIABLE: str(self.log_dir / f"cause-rank-{self.place.first_rank + local_rank}")}

    def _watch(self, index: int) -> None:
        self.workers[index].wait()
        self.ended.put(index)

    def _pump(self, index: int) -> list[threading.Thread]:
        """Copy what a worker prints to its log; both streams to one file, in the order they come."""
        worker = self.workers[index]
        if self.log_dir is None or worker.stdout is None or worker.stderr is None:
            return []
        path = self.log_dir / f"rank-{self.place.first_rank + index}.log"
        threads = [
            threading.Thread(target=_copy, args=(source, path, sink), daemon=True)
            for source, sink in ((worker.stdout, sys.stdout), (worker.stderr, sys.stderr))
        ]
        for thread in threads:
            thread.start()
        return threads

    def _wait(self) -> Failure | None:
        """Wait until all workers have ended, or until one has failed and the others were given their time."""
        failure: Failure | None = None
        deadline: float | None = None
        remaining = len(self.workers)
        while remaining:
            # Woken up now and then: a signal handler runs only between two waits.
            patience = 0.5 if deadline is None else max(0.0, min(0.5, deadline - time.monotonic()))
            try:
                index = self.ended.get(timeout=patience)
            except queue.Empty:
                index = None
            if index is not None:
                remaining -= 1
                code = _shell_code(self.workers[index].returncode)
                if code and failure is None and not self.interrupted:
                    failure = self._failed(index, code)
                    deadline = time.monotonic() + self.grace_seconds
                    self._send(signal.SIGTERM)
            elif deadline is not None and time.monotonic() >= deadline:
                self._send(signal.SIGKILL)
                deadline = None
        return failure

    def _failed(self, index: int, code: int) -> Failure:
        rank = self.place.first_rank + index
        cause = _cause(code, self.asked)
        for told in self._cause_file(index).values():
            with suppress(OSError):
                if Path(told).read_text(encoding="utf-8") == LOST_PEER:
                    cause = LOST_PEER
        here = os.environ.get("SLURMD_NODENAME") or socket.gethostname()  # as Slurm calls it
        failure = Failure(rank, here, code, cause)
        self.say(failure.line())
        return failure

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # ^C is a request to stop, like SIGTERM; the second ends everything.
        again = number == signal.SIGINT and signal.SIGINT in self.asked
        self.asked.append(signal.Signals(number))
        if again:
            self.interrupted = True
            if any(worker.poll() is None for worker in self.workers):
                self.say("ended at once, as asked: what was not saved yet is lost")
            self._send(signal.SIGKILL)
        elif number == signal.SIGINT:
            self.say("asked to stop: saving after this step; ^C again ends everything at once")
            self._send(signal.SIGTERM)
        else:
            self._send(signal.SIGTERM if number == signal.SIGHUP else signal.Signals(number))

    def _send(self, number: signal.Signals) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                with suppress(ProcessLookupError):
                    worker.send_signal(number)


def _die_with_parent() -> None:
    """In the child: end with the supervisor, however that ends, and ignore requests to stop during start-up.

    Until the program has its handlers, SIGUSR1 and SIGUSR2 would kill it; ignored signals stay ignored over exec.
    """
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _copy(source: IO[bytes], path: Path, sink: TextIO) -> None:
    """Write each line to the log and to our own output; continue reading when either cannot be written."""
    # A full disk, a folder that cannot be written or a closed terminal must not stop the reading: the worker would
    # wait for ever.
    with source, ExitStack() as opened:
        log: IO[bytes] | None = None
        with suppress(OSError):
            log = opened.enter_context(path.open("ab", buffering=0))
        for line in iter(source.readline, b""):
            if log is not None:
                with suppress(OSError):
                    log.write(line)
            with suppress(OSError):
                sink.buffer.write(line)
                sink.buffer.flush()


def _drain(pumps: Sequence[threading.Thread]) -> None:
    """Wait until the workers' output is copied, within a limit: their children may hold it open.

    In many short waits: a machine that was suspended has then lost one of them, not the time for copying.
    """
    for _ in range(300):
        busy = next((pump for pump in pumps if pump.is_alive()), None)
        if busy is None:
            return
        busy.join(0.1)


def _shell_code(returncode: int) -> int:
    return 128 - returncode if returncode < 0 else returncode


def _cause(code: int, asked: Sequence[signal.Signals]) -> str:
    """Return the cause of an exit code, in one word."""
    named = {2: "configuration", 3: "data", 4: "checkpoint", 137: "killed", 134: "aborted", 139: "segfault"}
    if code in (137, 143) and asked:
        return "stopped-before-saving"
    return named.get(code, "error" if code < 128 else f"signal-{code - 128}")


def _say(line: str) -> None:
    print(f"smp-train: {line}", file=sys.stderr, flush=True)
