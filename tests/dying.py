"""``python tests/dying.py train FLAGS``: smp-train, but ranks send themselves signals at marked points.

`DEATHS` is a JSON list of [rank, step, phase, signal]: the rank that enters the phase in that step for the first time,
or with "a save 3" for the third time, sends itself the signal, or fails if that is 0. Marker files in the folder
`MARKERS` remember which have happened. Besides the phases of `heartbeat` there is "the groups": all ranks of a
generation after the first have met, and this one has yet to form its groups. `CALLBACK` is a step at which a callback
of the program fails, `FREE_BYTES` the free memory of the host.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

DEATHS, MARKERS = "SMP_TRAIN_TEST_DEATHS", "SMP_TRAIN_TEST_MARKERS"
CALLBACK, FREE_BYTES = "SMP_TRAIN_TEST_CALLBACK", "SMP_TRAIN_TEST_FREE_BYTES"


def die_at(points: list[tuple[int, int, str, int]], markers: Path) -> None:
    """Let this process die when it enters one of the points."""
    from smp_train.distributed import generation, heartbeat

    enter, join, current = heartbeat.enter, generation.Member.join, 0
    times = Counter[tuple[int, str]]()

    def reached(phase: str) -> None:
        times[current, phase] += 1
        names = (phase, f"{phase} {times[current, phase]}")
        for rank, at_step, name, number in points:
            marker = markers / f"{rank}-{at_step}-{name}"
            if (str(rank), at_step) == (os.environ["RANK"], current) and name in names and not marker.exists():
                marker.touch()
                if not number:
                    raise ValueError("this rank fails")
                os.kill(os.getpid(), number)

    def entered(phase: int, step: int | None = None) -> None:
        nonlocal current
        enter(phase, step)
        current = current if step is None else step
        reached(heartbeat.PHASES[phase])

    def joined(member: generation.Member, seconds: float) -> Any:
        met = join(member, seconds)
        if member.joined > 1:
            reached("the groups")
        return met

    heartbeat.enter, generation.Member.join = entered, joined  # type: ignore[method-assign]


def fail_at(step: int) -> None:
    """Give the run a callback that fails at a step."""
    from smp_train.arguments.program_inputs import ProgramInputs

    def burst(record: dict[str, Any]) -> None:
        if record["step"] == step:
            raise ValueError("no more")

    ProgramInputs.__init__.__kwdefaults__["on_step"] = burst  # type: ignore[misc]


if __name__ == "__main__":
    if CALLBACK in os.environ:
        fail_at(int(os.environ[CALLBACK]))
    if FREE_BYTES in os.environ:
        from smp_train.run import recovery

        recovery.free_host_bytes = lambda: int(os.environ[FREE_BYTES])
    die_at(json.loads(os.environ[DEATHS]), Path(os.environ[MARKERS]))
    from smp_train.cli import main

    sys.exit(main(sys.argv[1:]))
