"""Starts the processes of one node, passes signals on to them, and exits with their result. Standard library only.

Like torchrun for a fixed set of processes, with three differences: the supervisor exits with the exit code of the first
process that failed, logs that process's rank and node in one line, and passes stop requests on without a traceback.
A failed node ends the whole step, and the cluster (or the user) starts it again from the last checkpoint. With
``recovery`` the coordinator decides whether a dead worker ends the run or is replaced (`launch.coordinator`).
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from smp_train.distributed import heartbeat
from smp_train.distributed.environment import GENERATION
from smp_train.errors import CAUSE_VARIABLE, LOST_PEER
from smp_train.launch import coordinator
from smp_train.launch.command import die_with_parent, node_name, replace_rank, say
from smp_train.launch.coordinator import End, Event, Generation, Joined, Recovery, Warm
from smp_train.launch.node import Failure, Node
from smp_train.launch.spare import Spare

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
GRACE_SECONDS = 15.0
"""How long peers of a failed worker may take to exit: they commit a save in progress
(`checkpoints.save.ABANDON_SECONDS`), print their reason, and release the run's checkpoints."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code after a second ^C. Workers that end with it have not failed."""
DRAIN_SECONDS = 30.0
CAUSES = {2: "configuration", 3: "data", 4: "checkpoint", 137: "killed", 134: "aborted", 139: "segfault"}
"""Cause by exit code, with 128 + N for signal N."""
RELEASE_SECONDS = 10.0
"""How long to wait for a killed process to end before its replacement starts."""


def supervise(
    command: Sequence[str], node: Node, *, environ: Mapping[str, str] | None = None, log_dir: Path | None = None,
    grace_seconds: float = GRACE_SECONDS, say: Callable[[str], None] = say, recovery: Recovery | None = None,
) -> tuple[int, Failure | None]:  # fmt: skip
    """Run ``command`` once per process of a node and wait for all; return (exit code, first failure).

    With ``log_dir``, the output of each worker is also written to ``<log_dir>/rank-<r>.log``, except for rank 0 on a
    terminal. The exit code is 0 if every worker's is 0, else that of the first failed worker. With ``recovery``,
    only failures that end the run count, on any node. Main thread only, since it handles signals.
    """
    workers = _Workers(command, node, environ or os.environ, log_dir, say, recovery)
    previous = {number: signal.signal(number, workers.on_signal) for number in FORWARDED}
    try:
        if recovery is None or node.node_rank == 0:  # other nodes may have been started again
            workers.start_all()
        if recovery:
            recovery.start(workers.inbox.put, workers.is_warm)
        failure = workers.wait(grace_seconds)
    finally:
        workers.end()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if workers.interrupted and failure is None and any(process.wait() for process in workers.processes.values()):
        return INTERRUPTED, None
    unfinished = workers.replaced or (workers.signals and not workers.processes and node.node_rank < node.nodes)
    return (failure.code if failure else int(bool(unfinished))), failure


Message = subprocess.Popen[bytes] | coordinator.Message
"""A rank's process that ended, or a message of the coordinator."""


class _Workers:
    """The processes of this node by rank."""

    def __init__(
        self, command: Sequence[str], node: Node, environ: Mapping[str, str], log_dir: Path | None,
        say: Callable[[str], None], recovery: Recovery | None,
    ) -> None:  # fmt: skip
        self.command, self.node, self.environ = command, node, environ
        self.log_dir, self.say = log_dir, say
        self.recovery = recovery
        self.decided = recovery is None
        """Whether a failure ends the run without asking: there is no coordinator, or it has decided."""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.generations: dict[int, int] = {}
        """The generation that each process joined first."""
        self.known = 1
        """The newest generation that this supervisor has handled."""
        self.world_size: int | None = None
        """The present number of ranks; None if it has never changed."""
        self.running: set[int] = set()
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.pumps: list[threading.Thread] = []
        self.signals: list[int] = []
        self.asked: set[int] = set()
        """Ranks that were sent a request. A second one could kill a Python program that has saved and is ending."""
        self.interrupted = False
        self.spares: list[Spare] = []
        self.replaced = False
        """Another node has taken this node's place."""
        self.number = node.node_rank
        """This node's number in generations."""

    def start_all(self) -> None:
        """Start the processes of this node."""
        for rank in range(self.node.first_rank, self.node.first_rank + self.node.processes):
            self.start(rank)
        if self.signals:
            self.send(signal.SIGTERM, self.processes.keys() - self.asked)  # workers that missed the request

    def start(self, rank: int, generation: int = 1) -> None:
        environ = self.node.environment(rank, self.environ, self.world_size)
        if self.log_dir:
            with suppress(OSError):
                self._cause_file(rank).unlink()  # of the process that this one replaces
            environ[CAUSE_VARIABLE] = str(self._cause_file(rank))
        if self.recovery:
            environ[GENERATION] = str(generation)
        # Rank 0 draws its progress line on the terminal itself; its log is also in the run folder.
        pipes = [os.pipe() for _ in "12"] if self.log_dir and not (rank == 0 and sys.stderr.isatty()) else []
        outputs: list[int | None] = [*(write for _, write in pipes)] or [None, None]
        process = None
        if self.spares:
            process = self.spares.pop(0).become(self.command[2:], environ, outputs)
        process = process or subprocess.Popen(
            self.command,
            env=environ,
            stdout=outputs[0],
            stderr=outputs[1],
            # ^C of a terminal reaches this process alone, which turns it into a request to stop.
            start_new_session=True,
            preexec_fn=die_with_parent if generation == 1 else replace_rank,
        )
        self.processes[rank], self.generations[rank] = process, generation
        self.running.add(rank)
        self._in_thread(self._watch, process)
        for (read, write), sink in zip(pipes, (sys.stdout, sys.stderr), strict=False):
            os.close(write)
            if self.log_dir:
                log = self.log_dir / f"rank-{rank}.log"
                self.pumps.append(self._in_thread(_copy, os.fdopen(read, "rb"), log, sink))

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self.inbox.put(process)

    @staticmethod
    def _in_thread(target: Callable[..., object], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    def wait(self, grace_seconds: float) -> Failure | None:
        """Wait until all workers have ended; kill those that still run ``grace_seconds`` after the first failure."""
        failure: Failure | None = None
        deadline = float("inf")
        while self.running or self._may_get_ranks():
            if os.getpid() == 1:
                self._reap_orphans()
            if time.monotonic() >= deadline:
                self.send(signal.SIGKILL)
                deadline = float("inf")
            try:
                # A signal handler runs only between two waits, so no wait is long.
                message = self.inbox.get(timeout=max(0.0, min(0.5, deadline - time.monotonic())))
            except queue.Empty:
                if self.decided or not (self.recovery and self.recovery.silent()):
                    continue
                message = self.recovery.lost()
            first = self._on_message(message)
            if first is not None and failure is None and not self.interrupted:
                failure = first
                self.say(failure.line())
                deadline = time.monotonic() + grace_seconds
                self.send(signal.SIGTERM)
        return failure

    def _reap_orphans(self) -> None:
        """Collect the ended children of ended ranks: process 1 of a container is their new parent."""
        own = {process.pid for process in (*self.processes.values(), *(spare.process for spare in self.spares))}
        with suppress(ChildProcessError):  # no children
            while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and child.si_pid not in own:
                os.waitpid(child.si_pid, 0)

    def _spares_wanted(self) -> int:
        """Return how many processes to keep warm: one, or all of a node that has no rank yet."""
        if [*self.command[:2]] != [sys.executable, "-m"]:
            return 0
        return 1 if self.processes else self.node.processes

    def is_warm(self) -> bool:
        """Return whether this node's warm processes have done their imports, and no stop was requested."""
        return not self.signals and sum(spare.imported() for spare in [*self.spares]) >= self._spares_wanted()

    def _may_get_ranks(self) -> bool:
        """Return whether the coordinator may still give ranks to this node."""
        was_asked = self.interrupted or (self.signals and not self.processes)
        return not (self.decided or was_asked or self.replaced)

    def _on_message(self, message: Message) -> Failure | None:
        """Handle a message; return the failure if the message ends the run."""
        if isinstance(message, Warm):
            while len(self.spares) < self._spares_wanted():
                self.spares.append(Spare(self.node.environment(0, self.environ)))
        elif isinstance(message, Joined):
            self.number = message.node
            if 0 < self.number < self.node.nodes:
                self.start_all()
        elif isinstance(message, Generation):
            if not self.interrupted:
                self._replace(message)
        elif isinstance(message, End):
            self.decided = True
            if message.why:
                self.say(f"no process is replaced: {message.why}")
            return message.failure
        else:
            return self._on_end(message)
        return None

    def _on_end(self, process: subprocess.Popen[bytes]) -> Failure | None:
        """Handle the end of a process; return its failure if that ends the run."""
        rank = next((rank for rank, each in self.processes.items() if each is process), None)
        if rank is None:  # it was replaced
            return None
        self.running.discard(rank)
        code = process.wait()
        failure = self._failure(rank, code if code > 0 else 128 - code)
        if self.recovery is None or self.decided or self.interrupted:
            return failure if code else None
        self.recovery.report(
            Event(
                rank, self.generations[rank], failure.code if code else 0, failure.node, failure.cause,
                bool(self.signals), self.known,
            )
        )  # fmt: skip
        return None

    def _replace(self, generation: Generation) -> None:
        """Start this node's replacements, and end processes that another node replaces."""
        if self.node.node_rank == 0:
            self.say(f"generation {generation.number}: {generation.reason}")
        self.known = generation.number
        if generation.world is not None:
            self._renumber(generation.world)
        for rank in generation.replaced:
            old = self.processes.pop(rank, None)
            if old is not None:
                old.kill()
                self.running.discard(rank)
                with suppress(subprocess.TimeoutExpired):
                    old.wait(RELEASE_SECONDS)  # it may hold memory of a GPU
            if generation.nodes[rank] == self.number:
                self.start(rank, generation.number)
            elif old is not None and not self.processes:
                self.say("another node has taken this one's place, which gave no sign of life: its ranks were ended")
                self.replaced = True

    def _renumber(self, world: Sequence[int]) -> None:
        """Give this node's processes their new ranks; kill processes without a new rank."""
        before, generations, running = self.processes, self.generations, self.running
        new = {old: rank for rank, old in enumerate(world) if old in before}
        left_out = [before[rank] for rank in before.keys() - new.keys()]
        for process in left_out:
            process.kill()
        for process in left_out:
            with suppress(subprocess.TimeoutExpired):
                process.wait(RELEASE_SECONDS)  # it may hold memory of a GPU
        self.processes = {rank: before[old] for old, rank in new.items()}
        self.generations = {rank: generations[old] for old, rank in new.items()}
        self.running = {new[old] for old in running if old in new}
        self.world_size = len(world)
        for rank in self.processes.keys() - self.running:
            self._on_end(self.processes[rank])  # the coordinator knows the end under the old rank only

    def _failure(self, rank: int, code: int) -> Failure:
        cause = CAUSES.get(code, "error" if code < 128 else f"signal-{code - 128}")
        if code in (137, 143) and self.signals:
            cause = "stopped-before-saving"
        if self.log_dir:
            with suppress(OSError):
                if self._cause_file(rank).read_text(encoding="utf-8") == LOST_PEER:
                    cause = LOST_PEER
        return Failure(rank, node_name(), code, cause)

    def _cause_file(self, rank: int) -> Path:
        """Return the file in which a rank's process reports its cause; a new number of the rank does not change it."""
        assert self.log_dir is not None
        return self.log_dir / f"cause-node-{self.node.node_rank}-{rank % self.node.processes}"

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

    def end(self) -> None:
        """Kill the remaining processes, and wait until their output is copied."""
        self.send(signal.SIGKILL)
        for spare in self.spares:
            spare.end()
        if self.recovery:
            self.recovery.flush()
            for node_rank in range(self.node.nodes):
                heartbeat.unlink(heartbeat.lasting_name(self.node.master_addr, self.node.master_port, node_rank))
        self.drain()

    def drain(self) -> None:
        """Wait until the output is copied, within a limit: children of a worker may keep it open."""
        deadline = time.monotonic() + DRAIN_SECONDS
        for pump in self.pumps:
            pump.join(max(0.0, deadline - time.monotonic()))


def _copy(source: IO[bytes], path: Path, sink: TextIO) -> None:
    """Copy each line to the log and to this process's output.

    After a failed write, for example on a full disk, keep reading, or the worker would block on its output.
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
