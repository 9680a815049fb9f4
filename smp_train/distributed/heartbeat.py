"""What each rank of this node is doing, in memory that its peers on the node read even when it is stopped or dead.

A rank's slot holds its process, step, phase and two times of the node's monotonic clock: when the main thread entered
the phase, and when the rank's watcher (`distributed.watch`) last ran. `at` is one store into mapped memory, below a
microsecond; no system call. What measures by phases (`telemetry.step_times`, `telemetry.memory_tracker`) listens to it.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

START, DATA, VOTE, FORWARD, BACKWARD, CLIP, UPDATE, OUTCOME, LOG, CALLBACK, SAVE, VALIDATION, END = range(13)
PHASES = (
    "the start", "reading data", "the vote", "forward", "backward", "clipping", "the update", "the vote's outcome",
    "logging", "a callback", "a save", "a validation", "the end",
)  # fmt: skip
IN_A_STEP = {DATA, VOTE, FORWARD, BACKWARD, CLIP, UPDATE, OUTCOME, LOG}
"""Phases that last about as long in every step. Others may last as long as they like."""

SLOT_BYTES = 4096
_WHO = struct.Struct("<qq")  # rank, process
_BEAT = struct.Struct("<qqd")  # step, phase, since
_TICK = struct.Struct("<d")
_AT_BEAT, _AT_TICK, _AT_TEXT = _WHO.size, _WHO.size + _BEAT.size, _WHO.size + _BEAT.size + _TICK.size
_CRASH_BYTES = 1 << 16
_LOGGED = re.compile(r"^\d{4}-\d\d-\d\d ", re.MULTILINE)
_PLACE = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')
USUAL_STEPS = 33
"""Steps whose median time is the usual one; at least three must be done."""


class Beat(NamedTuple):
    """A rank's slot, as another rank reads it."""

    rank: int
    pid: int
    step: int
    phase: int
    since: float
    tick: float
    answer: dict[str, Any]
    """What its watcher says of its main thread, once that has stood still for a while."""


class Board:
    """The slots of this node's ranks, in mapped memory."""

    def __init__(self, memory: mmap.mmap, local_rank: int, rank: int, logs: Path | None = None) -> None:
        self.memory, self.logs = memory, logs or Path()
        self.step, self.phase = 0, START
        self._offset, self._began = local_rank * SLOT_BYTES, 0.0
        self._durations: deque[float] = deque(maxlen=USUAL_STEPS)
        _WHO.pack_into(memory, self._offset, rank, os.getpid())
        self.tick(time.monotonic())
        self.at(START, 0)

    def at(self, phase: int, step: int | None = None) -> None:
        """Note that the main thread enters a phase; ``step`` where a step begins."""
        now = time.monotonic()
        if step is not None:
            if step == self.step + 1 and self._began:
                self._durations.append(now - self._began)
            self.step, self._began = step, now
        self.phase = phase
        _BEAT.pack_into(self.memory, self._offset + _AT_BEAT, self.step, phase, now)

    def log(self, rank: int) -> Path:
        """Return the log of a rank, into which `faulthandler` writes its stacks as well."""
        return self.logs / f"rank-{rank}.log"

    def usual(self) -> float | None:
        """Return the seconds that a step takes; None before three are done: the first ones may compile."""
        durations = list(self._durations)
        return median(durations) if len(durations) >= 3 else None

    def tick(self, now: float) -> None:
        """Note that the watcher runs."""
        _TICK.pack_into(self.memory, self._offset + _AT_TICK, now)

    def answer(self, content: dict[str, Any]) -> None:
        """Leave word of the main thread, for whoever judges."""
        room = SLOT_BYTES - _AT_TEXT
        text = json.dumps(content).encode()
        if len(text) <= room:  # a text that does not fit says nothing
            self.memory[self._offset + _AT_TEXT : self._offset + SLOT_BYTES] = text.ljust(room, b"\0")

    def read(self) -> list[Beat]:
        """Return the beats of this node's ranks that have opened their slots."""
        found = []
        for offset in range(0, len(self.memory), SLOT_BYTES):
            rank, pid = _WHO.unpack_from(self.memory, offset)
            step, phase, since = _BEAT.unpack_from(self.memory, offset + _AT_BEAT)
            (tick,) = _TICK.unpack_from(self.memory, offset + _AT_TICK)
            answer: dict[str, Any] = {}
            with suppress(ValueError):
                answer = json.loads(self.memory[offset + _AT_TEXT : offset + SLOT_BYTES].rstrip(b"\0") or b"{}")
            if pid:
                found.append(Beat(rank, pid, step, phase, since, tick, answer))
        return found


_board: Board | None = None
_listeners: list[Callable[[int], None]] = []
_at_end: list[Callable[[], None]] = []
phase = START
"""The phase that the main thread is in."""
collective: Callable[[], AbstractContextManager[None]] = nullcontext
"""Takes the time of the collective in its body, one of sharded weights or gradients; of whoever measures it."""


def open_board(name: str, local_rank: int, local_world_size: int, rank: int, logs: Path | None = None) -> Board:
    """Map the file ``name`` of this node, made by whichever rank is first, and let `at` write into it.

    ``logs`` is the folder of the ranks' logs.
    """
    global _board
    size = local_world_size * SLOT_BYTES
    descriptor = os.open(_path(name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, size)
        _board = Board(mmap.mmap(descriptor, size), local_rank, rank, logs)
    finally:
        os.close(descriptor)
    return _board


def unlink(name: str) -> None:
    """Remove the file, which every rank has mapped by now: nothing stays behind, however the run ends."""
    with suppress(OSError):
        os.unlink(_path(name))


def _path(name: str) -> str:
    return os.path.join("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir(), name)


def listen(listener: Callable[[int], None]) -> None:
    """Let ``listener`` have each phase as the main thread enters it, until `end`."""
    _listeners.append(listener)


def at(entered: int, step: int | None = None) -> None:
    """Note that this rank enters a phase; no slot shows it in a world of one, and once it leaves."""
    global phase
    phase = entered
    for listener in _listeners:
        listener(entered)
    if _board is not None and _board.phase != END:
        _board.at(entered, step)


def at_end(work: Callable[[], None]) -> None:
    """Let ``work`` be done when the heartbeat ends."""
    _at_end.append(work)


def end() -> None:
    """Note that this rank leaves by itself: from here on nobody takes its end for a crash."""
    global collective
    _listeners.clear()
    collective = nullcontext
    at(END)
    while _at_end:
        _at_end.pop()()


def ordered() -> dict[str, Any] | None:
    """Return the order of this node's watcher that ends its ranks, if there is one."""
    beats = _board.read() if _board is not None else []
    return next((beat.answer for beat in beats if "end" in beat.answer), None)


def killed_here(host: str, heard: Iterable[int] = ()) -> str:
    """Return which ranks of this node ended without a word, and in which step; ``heard`` have given a sign of life."""
    if _board is None:
        return ""
    found = []
    for beat in _board.read():
        if beat.phase != END and beat.rank not in heard and state(beat.pid) == "gone":
            crash = crash_of(_board.log(beat.rank))
            what, at = ("crashed", f", at {crash}") if crash else ("was killed", "")
            found.append(f"rank {beat.rank} on {host} {what} in step {beat.step}, {PHASES[beat.phase]}{at}")
    return ", ".join(found)


def crash_of(log: Path) -> str:
    """Return where a process crashed, and of what, if that is the last that it wrote into its log; else ""."""
    dump = ""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _CRASH_BYTES))
        dump = file.read().decode(errors="replace")
    _, found, dump = dump.rpartition("Fatal Python error: ")
    if not found or _LOGGED.search(dump):  # a crash of an earlier start
        return ""
    stack = innermost(dump.partition("urrent thread 0x")[2].partition("\n\n")[0])
    return f"{stack or 'no line of Python'} ({dump.partition(chr(10))[0]})"


def innermost(dump: str) -> str:
    """Return the innermost functions of a thread's stack as `faulthandler` writes it."""
    return " < ".join(f"{name} ({os.path.basename(path)}:{line})" for path, line, name in _PLACE.findall(dump)[:2])


def state(pid: int) -> str:
    """Return ``gone``, ``stopped``, ``blocked`` (in the kernel), or "" for a process that may run, or is unknown."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone" if os.path.exists("/proc/self/stat") else ""
    except OSError:
        return "gone"  # it ended while it was read
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped", "D": "blocked"}.get(letter, "")
