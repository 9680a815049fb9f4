"""Faults in random ranks of a run on this machine, after random steps: the disturbances of `smp-train chaos`."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from smp_train.errors import ConfigError
from smp_train.launch.command import say
from smp_train.launch.s3_proxy import Proxy
from smp_train.telemetry.metrics import FILE_NAME
from smp_train.telemetry.run_folder import RunFolder

SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
KINDS = (*SIGNALS, "disk", "s3")
CUT_SECONDS = 2.0, 6.0
"""Least and most time without S3. A request is tried again for a minute or two."""
SPACING = 50
"""Mean number of steps per disturbance; a short run has fewer."""
POLL_SECONDS = 0.02
FIRST_STEP = 4
"""First step that is disturbed: a frozen rank is noticed only once the usual time of a step is known."""


class Training:
    """A command that trains, with its output in a file; on exit, what is left of it is killed, with its ranks."""

    def __init__(self, words: Sequence[str], log: Path, variables: Mapping[str, str]) -> None:
        self.words, self.log, self.environ = words, log, os.environ | variables
        log.parent.mkdir(parents=True, exist_ok=True)

    def start(self) -> int:
        """Start the command, also once it has ended; return its process id."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=self.environ,
            )  # fmt: skip
        return self.process.pid

    def __enter__(self) -> Training:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its ranks die with it
        self.process.wait()

    def logged_step(self) -> int:
        """Return the last step in the log, which has steps that rank 0 could not write to the metrics."""
        return int(([b"0", *re.findall(rb"Batch (\d+) Loss", self.log.read_bytes())])[-1])


class Follower:
    """The records of a run's metrics, read as they are written, until the run's supervisor ends."""

    def __init__(self, folder: Path, supervisor: int) -> None:
        self.path, self.supervisor, self.read = folder / FILE_NAME, supervisor, 0
        self.step, self.step_seconds, self.ended = 0, 0.0, False
        self.recoveries: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []

    def reaches(
        self, *, step: int = 0, recoveries: int = 0, starts: int = 0, until: Callable[[], object] = lambda: True
    ) -> bool:
        """Read records until the run has reached this step and these numbers; return False if it ends first."""
        while True:
            lives = is_alive(self.supervisor)
            with suppress(FileNotFoundError), self.path.open("rb") as file:
                file.seek(self.read)
                lines = file.read().rpartition(b"\n")[0]
                self.read += len(lines) + bool(lines)
                for line in lines.splitlines():
                    with suppress(ValueError):  # a line that a killed process has cut
                        self._add(json.loads(line))
            if self.step >= step and len(self.recoveries) >= recoveries and len(self.starts) >= starts and until():
                return True
            if self.ended or not lives:
                return False
            time.sleep(POLL_SECONDS)

    def _add(self, record: dict[str, Any]) -> None:
        if record.get("event") == "recovery":
            self.recoveries.append(record | {"repeated": max(0, self.step - record["step"])})
        if record.get("event") in ("start", "resume"):
            self.starts.append(record)
        if record.get("event") in (None, "start", "resume", "recovery"):
            self.step, self.step_seconds = record["step"], record.get("step_sec") or self.step_seconds
        self.ended = record.get("event") in ("stop", "finish")


def disturb(
    folder: Path, supervisor: int, count: int, kinds: Sequence[str], dice: random.Random,
    training: Training | None = None, proxy: Proxy | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Disturb a run ``count`` times, after random steps, and wait each time until it has recovered or ended.

    ``training`` is the run's command, for the kind ``disk``; ``proxy`` is the run's way to S3, for the kind ``s3``.
    """
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
        if not (living := ranks(run.supervisor)):  # it ended during the last disturbance
            break
        victim, kind = dice.choice(living), dice.choice(kinds)
        found.append({"kind": kind, "after_step": run.step})
        if kind == "s3" and proxy:
            found[-1] |= cut_s3(run, proxy, dice.uniform(*CUT_SECONDS))
        elif kind == "disk" and training:
            found[-1] |= {"pid": victim, **fill_disk(run, training, victim)}
        else:
            found[-1] |= {"pid": victim, **signal_rank(run, victim, SIGNALS[kind])}
            if kind == "freeze" and run.ended and "step" not in found[-1]:  # it has just finished
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGCONT)
                found.pop()
    return found


def signal_rank(run: Follower, victim: int, number: signal.Signals) -> dict[str, Any]:
    """Send a signal to a process, and return the run's recovery; {} if the run ends."""
    now, earlier = time.time(), len(run.recoveries)
    with suppress(ProcessLookupError):
        os.kill(victim, number)
    say(f"step {run.step}: {number.name} to process {victim}")
    return recovery(run, earlier, now) if run.reaches(recoveries=earlier + 1) else {}


def recovery(run: Follower, number: int, since: float) -> dict[str, Any]:
    """Return what the report shows of the run's recovery of a fault at the time ``since``."""
    event = run.recoveries[number]
    say(f"recovered at step {event['step']} after {event['time'] - since:.1f} s: {event['reason']}")
    facts = {name: event[name] for name in ("step", "replaced", "reason", "repeated")}
    return facts | {"down_sec": event["time"] - since}


def fill_disk(run: Follower, training: Training, victim: int) -> dict[str, Any]:
    """Make each write of a process to a file fail. When that has ended the run, start its command again.

    The limit fills no disk, does not concern other processes, and ends with the process.
    """
    now, earlier, starts, rank = time.time(), len(run.recoveries), len(run.starts), rank_of(victim)
    limits = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    with suppress(ProcessLookupError):
        limits = resource.prlimit(victim, resource.RLIMIT_FSIZE)
        resource.prlimit(victim, resource.RLIMIT_FSIZE, (0, limits[1]))
    say(f"step {run.step}: process {victim} can write no file")
    if run.reaches(recoveries=earlier + 1):  # the failed write ended a rank, not the run
        with suppress(ProcessLookupError):  # that rank may have been another one
            resource.prlimit(victim, resource.RLIMIT_FSIZE, limits)
        return recovery(run, earlier, now)
    if not (code := training.process.wait()):
        return {"rank": rank, "unnoticed": True}
    ended, step = time.time(), max(run.step, training.logged_step())
    say(f"it ended after step {step} with exit code {code}; starting it again")
    run.supervisor = training.start()
    if not run.reaches(starts=starts + 1):
        return {"rank": rank, "exit_code": code}
    again = run.starts[starts]
    facts = {"step": again["step"], "repeated": step - again["step"], "down_sec": again["time"] - ended}
    return {"rank": rank, "exit_code": code, **facts}


def cut_s3(run: Follower, proxy: Proxy, seconds: float) -> dict[str, Any]:
    """Cut a run off from S3, and return how long it had no connection, if it gets one again before it ends."""
    say(f"step {run.step}: S3 is cut off for {seconds:.1f} s from the run's next connection")
    proxy.cut(seconds)
    if not run.reaches(until=lambda: proxy.restored):
        return {"unnoticed": proxy.refused is None}
    down = (proxy.restored or 0) - (proxy.refused or 0)
    say(f"S3 is back at step {run.step} after {down:.1f} s")
    return {"step": run.step, "repeated": 0, "down_sec": down}


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


def rank_of(process: int) -> int | None:
    """Return the rank whose log a process has open: a process that was kept warm has no rank in its environment."""
    with suppress(OSError):
        for file in Path(f"/proc/{process}/fd").iterdir():
            if match := re.search(r"/logs/rank-(\d+)\.log$", os.readlink(file)):
                return int(match[1])
    return None


def find_supervisor(run: Path) -> int:
    """Return the supervisor of a run's ranks on this machine. Raises `ConfigError` if no supervisor is found."""
    if RunFolder(run).read_run().get("config", {}).get("recovery") != "in_place":
        raise ConfigError(f"{run}: is no folder of a run with --recovery in_place, which a dead rank would not end")
    flag = f"\0--run_dir={run.absolute()}\0".encode()
    for _, parent, _, words in processes():
        if flag in words and b"\0train\0" in words:
            return parent
    raise ConfigError(f"{run}: none of its ranks is on this machine")
