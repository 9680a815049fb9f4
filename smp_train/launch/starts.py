"""The crash-loop guard: a record of a Slurm job's starts since its run last committed a checkpoint.

The batch script records every start, also those that never reach a node. The first node's agent adds the run's newest
checkpoint, which may be in S3, where the batch script cannot look. Standard library only and Python 3.8 or newer.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from smp_train.errors import SmpTrainError

UNKNOWN = "?"
SENT, BEGAN, ENDED = "sent", "began", "ended"
"""States of a start: srun was called; the first node's agent has begun; that agent has reported its failure."""


class CrashLoopError(SmpTrainError):
    """A job starts again and again without a new checkpoint."""

    cause = "crash-loop"


class Starts:
    """The starts of one job without a new checkpoint: lines of start, newest checkpoint's step, and state.

    A start is named restart.step; HyperPod's auto-resume runs several steps in one restart of a job.
    """

    def __init__(self, run_dir: str | Path, job: str) -> None:
        self.job, self.logs = job, Path(run_dir, "logs")
        self.path = self.logs / f"starts-{job}"

    def read(self) -> dict[str, tuple[str, str]]:
        """Return (newest checkpoint's step, state) by start, oldest first."""
        with suppress(OSError):
            rows = [line.split() for line in self.path.read_text(encoding="utf-8").splitlines()]
            return {row[0]: (row[1], row[2]) for row in rows if len(row) == 3}
        return {}

    def write(self, starts: dict[str, tuple[str, str]]) -> None:
        """Replace the record. A full disk does not prevent the next start."""
        with suppress(OSError):
            text = "".join(f"{start} {step} {state}\n" for start, (step, state) in starts.items())
            self.path.write_text(text, encoding="utf-8")

    def add(self, start: str, state: str, newest_step: int | None = None) -> None:
        """Add or update a start; a newest checkpoint other than the recorded one clears the record first."""
        starts = self.read()
        recorded = list(starts.values())[-1][0] if starts else UNKNOWN
        step = recorded if newest_step is None else str(newest_step)
        has_progress = recorded not in (UNKNOWN, step)
        starts = {} if has_progress else starts
        if not (has_progress and state == ENDED):  # a start that committed a checkpoint does not count
            starts[start] = (step, state)
        self.write(starts)

    def remove(self, restart: int) -> None:
        """Remove the starts of one restart of the job, which Slurm itself ended."""
        self.write({start: row for start, row in self.read().items() if not start.startswith(f"{restart}.")})

    def has_saved(self, folders: Sequence[str]) -> bool:
        """Return whether the run committed a checkpoint in one of its folders since the record was written."""
        markers = [marker for folder in folders for marker in glob.glob(f"{glob.escape(folder)}/*/COMMITTED")]
        with suppress(OSError):
            written = self.path.stat().st_mtime_ns
            return any(os.stat(marker).st_mtime_ns > written for marker in markers)
        return False

    def refuse_loop(self, limit: int, *, without: str = "", reported_only: bool = False) -> None:
        """Raise `CrashLoopError` if at least ``limit`` starts other than ``without`` brought no checkpoint.

        With ``reported_only``, a start whose agent did not report its end does not count: it may have committed a
        checkpoint in S3.
        """
        states = [state for start, (_, state) in self.read().items() if start != without]
        count = sum(state != BEGAN for state in states) if reported_only else len(states)
        if count >= limit:
            raise CrashLoopError(
                f"{count} starts of job {self.job} brought no new checkpoint: not trying again; logs: "
                f"{self.logs}/{self.job}.* and the output of srun. Lower --checkpoint_freq if they needed longer"
            )
