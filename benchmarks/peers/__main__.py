"""Run one driver on this rank: ``python -m benchmarks.peers NAME JOB.json``."""

from __future__ import annotations

import importlib
import sys

from benchmarks.peers import DRIVERS
from benchmarks.peers.job import Clock, Job


def main(name: str, path: str) -> None:
    """Drive a job."""
    if name not in DRIVERS:
        sys.exit(f"{name}: is not one of {', '.join(DRIVERS)}")
    job = Job.read(path)
    importlib.import_module(f"benchmarks.peers.{name}").drive(job, Clock(job))


if __name__ == "__main__":
    main(*sys.argv[1:])
