"""From the command to the end of the first step: this package against a bare FSDP2 loop, in fresh processes, in turn.

The clock, and the CPU time of all processes of the command until then. torchrun imports torch before it starts a rank;
``smp-train launch local`` does not, so that it is measured beside our command under torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.parts.peers import SMALL, make
from benchmarks.peers.job import Job
from benchmarks.program import ROOT, STEADY, below, logged, scratch, words
from smp_train.errors import ConfigError

BARE, UNDER_TORCHRUN, LAUNCHED = "bare FSDP2, torchrun", "this package, torchrun", "this package, launch local"
LIMIT_SECONDS = 600.0


def main(argv: Sequence[str]) -> int:
    """Measure, and print the ratios to the bare loop of the same round."""
    parser = argparse.ArgumentParser(prog="smp-train bench start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="starts of each kind (default 5)")
    parser.add_argument("--processes", type=int, default=2, help="of each start (default 2)")
    options = parser.parse_args(argv)
    found: dict[str, list[tuple[float, float]]] = {BARE: [], UNDER_TORCHRUN: [], LAUNCHED: []}
    shape: dict[str, Any] = {"steps": 2, "warm": 1, "batch": 2, "seq_len": 256, "bf16": False, "lr": 1e-3}
    shape["cuda"] = False
    with scratch() as given:
        make(dict(SMALL), str(given), shape, options.processes)
        for _ in range(options.rounds):
            for kind, seconds in found.items():
                with scratch() as folder:
                    seconds.append(started(line(kind, given, folder, shape, options.processes), folder))
    for kind, seconds in found.items():
        clock, cpu = zip(*seconds, strict=True)
        ratios = [[mine[i] / bare[i] for mine, bare in zip(seconds, found[BARE], strict=True)] for i in (0, 1)]
        said = ", ".join(f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in ratios)
        print(f"{kind}: at best {min(clock):.1f} s, CPU {min(cpu):.1f} s; of bare, clock and CPU: {said}", flush=True)
    return 0


def line(kind: str, given: Path, folder: Path, shape: dict[str, Any], processes: int) -> list[str]:
    """Return the command that trains the same model on the same rows."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
    if kind == BARE:
        job = Job(model=f"{given}/model", rows=f"{given}/rows", compiled=False, began=0.0, out=str(folder / "result"),
                  flags={}, **shape)  # fmt: skip
        job.write(folder / "job.json")
        return [*torchrun, "benchmarks.peers", "bare", str(folder / "job.json")]
    flags = words({
        **STEADY, **below(folder), "use_synthetic_data": None, "hf_pretrained_model_name_or_dir": given / "model",
        "training_dir": given / "rows", "train_batch_size": 2, "max_context_width": 256, "bf16": 0, "max_steps": 2,
        "activation_checkpointing": "none", "logging_freq": 1, "distributed_backend": "gloo",
    })  # fmt: skip
    start = [*torchrun, "smp_train", "train"] if kind == UNDER_TORCHRUN else ["-m", "smp_train", "launch", "local"]
    return [*start, *([f"--nproc={processes}"] if kind == LAUNCHED else []), *flags]


def started(arguments: Sequence[str], folder: Path) -> tuple[float, float]:
    """Run a command until its first step is done; return the seconds by the clock and of its processes' CPUs."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    with (folder / "output").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environ, stdout=out, stderr=out, start_new_session=True
        )
    try:
        while not first_step_done(folder):
            if process.poll() is not None or time.perf_counter() > began + LIMIT_SECONDS:
                raise RuntimeError(f"no first step: {(folder / 'output').read_text()[-2000:]}")
            time.sleep(0.02)
        return time.perf_counter() - began, cpu_seconds(process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def first_step_done(folder: Path) -> bool:
    """Return whether the bare loop's clock or our metrics have a step."""
    with contextlib.suppress(ConfigError):  # no metrics yet
        return (folder / "result.first").exists() or bool(logged(folder))
    return False


def cpu_seconds(process: int) -> float:
    """Return the CPU time of a process and of all that it started, directly or not, with what has ended since."""
    parents, ticks = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)], ticks[int(stat.parent.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    family = {process}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")
