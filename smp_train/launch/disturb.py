"""Signals to random ranks of a run on this machine, after random steps: the disturbances of `smp-train chaos`."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch.command import say
from smp_train.telemetry.metrics import FILE_NAME
from smp_train.telemetry.run_folder import RunFolder

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
SPACING = 50
"""Mean number of steps per disturbance; a short run has fewer."""
POLL_SECONDS = 0.02
FIRST_STEP = 4
"""First step that is disturbed: a frozen rank is noticed only once the usual time of a step is known."""


class Follower:
    """The records of a run's metrics, read as they are written, until the run's supervisor ends."""

    def __init__(self, folder: Path, supervisor: int) -> None:
        self.path, self.supervisor, self.read = folder / FILE_NAME, supervisor, 0
        self.step, self.step_seconds, self.ended = 0, 0.0, False
        self.recoveries: list[dict[str, Any]] = []

    def reaches(self, *, step: int = 0, recoveries: int = 0) -> bool:
        """Read records until the run has reached this step and number of recoveries; return False if it ends first."""
        while True:
            lives = is_alive(self.supervisor)
            with suppress(FileNotFoundError), self.path.open("rb") as file:
                file.seek(self.read)
                lines = file.read().rpartition(b"\n")[0]
                self.read += len(lines) + bool(lines)
                for record in map(json.loads, lines.splitlines()):
                    self._add(record)
            if self.step >= step and len(self.recoveries) >= recoveries:
                return True
            if self.ended or not lives:
                return False
            time.sleep(POLL_SECONDS)

    def _add(self, record: dict[str, Any]) -> None:
        if record.get("event") == "recovery":
            self.recoveries.append(record | {"repeated": max(0, self.step - record["step"])})
        if record.get("event") in (None, "resume", "recovery"):
            self.step, self.step_seconds = record["step"], record.get("step_sec") or self.step_seconds
        self.ended = record.get("event") in ("stop", "finish")


def disturb(
    folder: Path, supervisor: int, count: int, kinds: Sequence[str], dice: random.Random
) -> list[dict[str, Any]]:  # fmt: skip
    """Disturb a run ``count`` times, after random steps, and wait each time until it has recovered or ended."""
    run, found = Follower(folder, supervisor), list[dict[str, Any]]()
    if not run.reaches(step=1):
        return found
    first, total = max(FIRST_STEP, run.step + 1), RunFolder(folder).read_run()["total_steps"]
    steps = range(first, min(total - max(2, total // 10), first + SPACING * count))  # nothing is replaced at the end
    if len(steps) < count:
        left = f"{len(steps)} of the run's {total} steps are left for it"
        raise ConfigError(f"chaos: --kills {count}: {left}; give fewer, or more --max_steps")
    for after in sorted(dice.sample(steps, count)):
        if not run.reaches(step=after):
            break
        time.sleep(dice.uniform(0, run.step_seconds))
        victim, kind = dice.choice(ranks(supervisor)), dice.choice(kinds)
        now, earlier = time.time(), len(run.recoveries)
        with suppress(ProcessLookupError):
            os.kill(victim, SIGNALS[kind])
        say(f"step {run.step}: {SIGNALS[kind].name} to process {victim}")
        found.append({"kind": kind, "pid": victim, "after_step": run.step})
        if run.reaches(recoveries=earlier + 1):
            event = run.recoveries[earlier]
            found[-1] |= {name: event[name] for name in ("step", "replaced", "reason", "repeated")}
            found[-1]["down_sec"] = event["time"] - now
            say(f"recovered at step {event['step']} after {event['time'] - now:.1f} s: {event['reason']}")
        elif run.ended and kind == "freeze":  # it has just finished
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)
            found.pop()
    return found


def processes() -> Iterator[tuple[int, int, str, bytes]]:
    """Yield id, parent's id, state and command line of each process that this user may examine."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            yield int(entry.name), int(parent), state, b"\0" + (entry / "cmdline").read_bytes()


def is_alive(process: int) -> bool:
    """Return whether a process has not ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def ranks(supervisor: int) -> list[int]:
    """Return the ids of a supervisor's ranks, without its warm process, whose stdin is still a socket."""
    children = [(pid, words) for pid, parent, state, words in processes() if parent == supervisor and state not in "ZT"]
    return [
        pid for pid, words in children
        if b"launch.spare" not in words or not os.readlink(f"/proc/{pid}/fd/0").startswith("socket:")
    ]  # fmt: skip


def find_supervisor(run: Path) -> int:
    """Return the supervisor of a run's ranks on this machine. Raises `ConfigError` if no supervisor is found."""
    if RunFolder(run).read_run().get("config", {}).get("recovery") != "in_place":
        raise ConfigError(f"{run}: is no folder of a run with --recovery in_place, which a dead rank would not end")
    flag = f"\0--run_dir={run.absolute()}\0".encode()
    for _, parent, _, words in processes():
        if flag in words and b"\0train\0" in words:
            return parent
    raise ConfigError(f"{run}: none of its ranks is on this machine")
