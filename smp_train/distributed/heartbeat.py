"""Step and phase of each rank of this node, in memory that the node's ranks share and that outlives a dead rank.

A rank's slot holds its process, step, phase and two times of the node's monotonic clock: when the main thread entered
the phase, and when the rank's watcher (`distributed.watch`) last ran. `enter` is one write to mapped memory, without a
system call, in less than a microsecond. Telemetry that measures phases listens to it.
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
"""Phases with about the same duration in every step. The duration of other phases has no limit."""

SLOT_BYTES = 4096
_WHO = struct.Struct("<qq")  # rank, process
_BEAT = struct.Struct("<qqd")  # step, phase, since
_TICK = struct.Struct("<d")
_AT_BEAT, _AT_TICK, _AT_TEXT = _WHO.size, _WHO.size + _BEAT.size, _WHO.size + _BEAT.size + _TICK.size
_CRASH_BYTES = 1 << 16
_LOGGED = re.compile(r"^\d{4}-\d\d-\d\d ", re.MULTILINE)
_PLACE = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')
USUAL_STEPS = 33
"""The usual time is the median of this many steps; at least three must be done."""


class Beat(NamedTuple):
    """A rank's slot, as another rank reads it."""

    rank: int
    pid: int
    step: int
    phase: int
    since: float
    tick: float
    answer: dict[str, Any]
    """The watcher's report about the main thread, once that has not moved for a while."""


class Board:
    """The slots of this node's ranks, in mapped memory."""

    def __init__(self, memory: mmap.mmap, local_rank: int, rank: int, logs: Path | None = None) -> None:
        self.memory, self.logs = memory, logs or Path()
        self.step, self.phase = 0, START
        self._offset, self._began = local_rank * SLOT_BYTES, 0.0
        self._durations: deque[float] = deque(maxlen=USUAL_STEPS)
        _WHO.pack_into(memory, self._offset, rank, os.getpid())
        self.tick(time.monotonic())
        self.enter(START, 0)

    def enter(self, phase: int, step: int | None = None) -> None:
        """Record that the main thread enters a phase, and with ``step`` that it begins this step."""
        now = time.monotonic()
        if step is not None:
            if step == self.step + 1 and self._began:
                self._durations.append(now - self._began)
            self.step, self._began = step, now
        self.phase = phase
        _BEAT.pack_into(self.memory, self._offset + _AT_BEAT, self.step, phase, now)

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log, which also gets the stacks of `faulthandler`."""
        return self.logs / f"rank-{rank}.log"

    def usual(self) -> float | None:
        """Return the median time of a step in seconds; None before three are done, since the first may compile."""
        durations = list(self._durations)
        return median(durations) if len(durations) >= 3 else None

    def tick(self, now: float) -> None:
        """Record that the watcher runs."""
        _TICK.pack_into(self.memory, self._offset + _AT_TICK, now)

    def answer(self, content: dict[str, Any]) -> None:
        """Write the watcher's report about the main thread, for the node's leader."""
        room = SLOT_BYTES - _AT_TEXT
        text = json.dumps(content).encode()
        if len(text) <= room:  # a part of the JSON would be useless
            self.memory[self._offset + _AT_TEXT : self._offset + SLOT_BYTES] = text.ljust(room, b"\0")

    def read(self) -> list[Beat]:
        """Return the beats of this node's ranks that have opened their slots."""
        beats = []
        for offset in range(0, len(self.memory), SLOT_BYTES):
            rank, pid = _WHO.unpack_from(self.memory, offset)
            step, phase, since = _BEAT.unpack_from(self.memory, offset + _AT_BEAT)
            (tick,) = _TICK.unpack_from(self.memory, offset + _AT_TICK)
            answer: dict[str, Any] = {}
            with suppress(ValueError):
                answer = json.loads(self.memory[offset + _AT_TEXT : offset + SLOT_BYTES].rstrip(b"\0") or b"{}")
            if pid:
                beats.append(Beat(rank, pid, step, phase, since, tick, answer))
        return beats


_board: Board | None = None
_listeners: list[Callable[[int], None]] = []
_at_end: list[Callable[[], None]] = []
phase = START
"""The phase of the main thread."""
collective: Callable[[], AbstractContextManager[None]] = nullcontext
"""Context that measures a collective of sharded weights or gradients; telemetry sets it."""


def open_board(name: str, local_rank: int, local_world_size: int, rank: int, logs: Path | None = None) -> Board:
    """Map the node's file ``name``, which the first rank creates, and let `enter` write to this rank's slot.

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
    """Delete the file, which every rank has mapped by now, so that no end of the run leaves it."""
    with suppress(OSError):
        os.unlink(_path(name))


def _path(name: str) -> str:
    return os.path.join("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir(), name)


def listen(listener: Callable[[int], None]) -> None:
    """Call ``listener`` with each phase that the main thread enters, until `end`."""
    _listeners.append(listener)


def enter(entered: int, step: int | None = None) -> None:
    """Record that this rank enters a phase. There is no slot in a world of one, and none is written after `end`."""
    global phase
    phase = entered
    for listener in _listeners:
        listener(entered)
    if _board is not None and _board.phase != END:
        _board.enter(entered, step)


def at_end(work: Callable[[], None]) -> None:
    """Call ``work`` when the heartbeat ends."""
    _at_end.append(work)


def end() -> None:
    """Record that this rank leaves in an orderly way, so that its end does not count as a crash."""
    global collective
    _listeners.clear()
    collective = nullcontext
    enter(END)
    while _at_end:
        _at_end.pop()()


def ordered() -> dict[str, Any] | None:
    """Return the leader's order to end this node's ranks, if it has given the order."""
    beats = _board.read() if _board is not None else []
    return next((beat.answer for beat in beats if "end" in beat.answer), None)


def killed_here(host: str, alive: Iterable[int] = ()) -> str:
    """Return which of this node's ranks died without a report, and in which step; ranks in ``alive`` cannot have."""
    if _board is None:
        return ""
    deaths = []
    for beat in _board.read():
        if beat.phase != END and beat.rank not in alive and state(beat.pid) == "gone":
            crash = crash_of(_board.log(beat.rank))
            death, line = ("crashed", f", at {crash}") if crash else ("was killed", "")
            deaths.append(f"rank {beat.rank} on {host} {death} in step {beat.step}, {PHASES[beat.phase]}{line}")
    return ", ".join(deaths)


def crash_of(log: Path) -> str:
    """Return where and why a process crashed, if its log ends with the crash; else ""."""
    dump = ""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _CRASH_BYTES))
        dump = file.read().decode(errors="replace")
    _, crash, dump = dump.rpartition("Fatal Python error: ")
    if not crash or _LOGGED.search(dump):  # an earlier start crashed
        return ""
    stack = innermost(dump.partition("urrent thread 0x")[2].partition("\n\n")[0])
    return f"{stack or 'no line of Python'} ({dump.partition(chr(10))[0]})"


def innermost(dump: str) -> str:
    """Return the innermost two functions of a stack that `faulthandler` wrote."""
    return " < ".join(f"{name} ({os.path.basename(path)}:{line})" for path, line, name in _PLACE.findall(dump)[:2])


def state(pid: int) -> str:
    """Return ``gone``, ``stopped`` or ``blocked`` (in the kernel); "" for a process that may run, or is unknown."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone" if os.path.exists("/proc/self/stat") else ""
    except OSError:
        return "gone"  # it ended while it was read
    return {"Z": "gone", "X": "gone", "T": "stopped", "t": "stopped", "D": "blocked"}.get(letter, "")
