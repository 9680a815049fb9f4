"""Step and phase of each rank of this node, in memory that the node's ranks share and that outlives a dead rank.

A rank's slot holds its process, step, phase and two times of the node's monotonic clock: when the main thread entered
the phase, and when the rank's watcher (`distributed.watch`) last ran. `enter` writes to mapped memory, without a system
call, in about a microsecond. Telemetry that measures phases listens to it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from statistics import median
from typing import Any

START, DATA, VOTE, FORWARD, BACKWARD, CLIP, UPDATE, OUTCOME, LOG, CALLBACK, SAVE, VALIDATION, END = range(13)
PHASES = (
    "the start", "reading data", "the vote", "forward", "backward", "clipping", "the update", "the vote's outcome",
    "logging", "a callback", "a save", "a validation", "the end",
)  # fmt: skip
IN_A_STEP = {DATA, VOTE, FORWARD, BACKWARD, CLIP, UPDATE, OUTCOME, LOG}
"""Phases with about the same duration in every step. The duration of other phases has no limit."""
USUAL_STEPS = 33
"""The usual time is the median of this many steps; at least three must be done, since the first may compile."""

NOTE_BYTES = 4000


class Slot(ctypes.Structure):
    """A rank's slot."""

    rank: int
    pid: int
    step: int
    phase: int
    since: float
    tick: float
    text: bytes
    """What the rank's watcher has to report, as JSON."""
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rank", "pid", "step", "phase")),
        *((name, ctypes.c_double) for name in ("since", "tick")), ("text", ctypes.c_char * NOTE_BYTES),
    ]  # fmt: skip

    @property
    def note(self) -> dict[str, Any]:
        """What the rank's watcher has to report."""
        try:
            return dict(json.loads(self.text or b"{}"))
        except ValueError:  # the watcher is writing the text right now
            return {}


class Board:
    """The slots of this node's ranks, in mapped memory."""

    def __init__(self, memory: mmap.mmap, local_rank: int, rank: int, logs: Path) -> None:
        """Open this rank's slot; ``logs`` is the folder of the ranks' logs."""
        self.memory, self.logs = memory, logs
        self._slots = (Slot * (len(memory) // ctypes.sizeof(Slot))).from_buffer(memory)
        self.slot = self._slots[local_rank]
        self._began = 0.0
        self._durations: deque[float] = deque(maxlen=USUAL_STEPS)
        self.slot.rank, self.slot.pid = rank, os.getpid()
        self.slot.tick = time.monotonic()
        self.enter(START, 0)

    def enter(self, phase: int, step: int | None = None) -> None:
        """Record that the main thread enters a phase, and with ``step`` that it begins this step."""
        slot, now = self.slot, time.monotonic()
        if step is not None:
            if step == slot.step + 1 and self._began:
                self._durations.append(now - self._began)
            slot.step, self._began = step, now
        slot.phase, slot.since = phase, now

    def usual(self) -> float | None:
        """Return the median time of a step in seconds; None before three are done."""
        durations = list(self._durations)
        return median(durations) if len(durations) >= 3 else None

    def note(self, content: dict[str, Any]) -> None:
        """Write the watcher's note for the node's other ranks."""
        text = json.dumps(content).encode()
        if len(text) <= NOTE_BYTES:  # a JSON text that is cut off would be useless
            self.slot.text = text

    def read(self) -> list[Slot]:
        """Return copies of the slots of this node's ranks that have opened theirs."""
        return [Slot.from_buffer_copy(slot) for slot in self._slots if slot.pid]

    def log(self, rank: int) -> Path:
        """Return the path of a rank's log, which also gets the stacks of `faulthandler`."""
        return self.logs / f"rank-{rank}.log"


board: Board | None = None
"""This process's board; None in a world of one and without shared memory."""
phase = START
"""The phase of the main thread."""
collective: Callable[[], AbstractContextManager[None]] = nullcontext
"""Context that measures a collective of sharded weights or gradients; telemetry sets it."""
listeners: list[Callable[[int], None]] = []
"""Functions to call with each phase that the main thread enters, until `end`."""
at_end: list[Callable[[], None]] = []
"""Functions to call when the heartbeat ends."""


def open_board(name: str, local_rank: int, local_world_size: int, rank: int, logs: Path) -> Board:
    """Map the node's file ``name``, which the first rank creates, and let `enter` write to this rank's slot."""
    global board
    board = None  # if the file cannot be opened, the board of an earlier number of ranks must not stay
    size = local_world_size * ctypes.sizeof(Slot)
    descriptor = os.open(_path(name), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(descriptor, size)
        board = Board(mmap.mmap(descriptor, size), local_rank, rank, logs)
    finally:
        os.close(descriptor)
    return board


def lasting_name(address: str, port: int, node_rank: int) -> str:
    """Return the name of a node's file if dead ranks are replaced; the supervisor deletes it."""
    return f"smp-train-{address}-{port}-{node_rank}"


def unlink(name: str) -> None:
    """Delete the file, which every rank has mapped by now, so that it does not outlive the run."""
    with suppress(OSError):
        os.unlink(_path(name))


def _path(name: str) -> str:
    return os.path.join("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir(), name)


def enter(entered: int, step: int | None = None) -> None:
    """Record that this rank enters a phase; after `end`, its slot stays as it is."""
    global phase
    phase = entered
    for listener in listeners:
        listener(entered)
    if board is not None and board.slot.phase != END:
        board.enter(entered, step)


def end() -> None:
    """Record that this rank leaves in an orderly way, so that its end does not count as a crash."""
    global collective
    listeners.clear()
    collective = nullcontext
    enter(END)
    while at_end:
        at_end.pop()()


def ending() -> dict[str, Any] | None:
    """Return the note by which a watcher ends this node's ranks: ``end`` is the reason, ``missing`` the ranks to blame.

    None while the run goes on.
    """
    notes = [slot.note for slot in board.read()] if board is not None else []
    return next((note for note in notes if "end" in note), None)
