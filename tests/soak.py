"""Kill a tiny training at random moments, many times, and prove that nothing committed is ever lost.

    python -m tests.soak --kills 200 [--place folder|s3] [--seed N]

Two ranks train, saving every other step. At a random moment after a commit rank 0, rank 1 or both are killed (SIGKILL),
the survivor a little later; then the same command starts again. Some starts are killed before they have trained, too.
After each kill the newest committed checkpoint must be there, not older than the one before, and intact; at the end
every step that was ever logged, and the last checkpoint, must be those of a run that was never disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from smp_train.checkpoints.dcp.trees import read_tensor, saved_entries
from smp_train.checkpoints.find import open_checkpoint, open_verified
from smp_train.checkpoints.folder import open_folder
from smp_train.telemetry.metrics import read_metrics
from tests.harness import as_torchrun, run
from tests.s3_server import environment, in_environment, serving
from tests.system.command import Ranks
from tests.training import TINY, flags, train

WORLD = 2
OPTIONS = {
    "attn_pdrop": 0.1, "checkpoint_freq": 2, "num_kept_checkpoints": 2, "lr_decay_style": "constant",
    "logging_freq": 1, "num_layers": 1,
}  # fmt: skip
EXACT = ("loss", "grad_norm", "lr", "tokens", "consumed")


class Soak:
    """One training that is killed over and over; its checkpoints are below ``parent``."""

    def __init__(self, folder: Path, parent: str, seed: int, variables: dict[str, str]) -> None:
        self.folder, self.parent, self.variables = folder, parent, variables
        self.random = random.Random(seed)
        self.newest = (0, 0)
        """Generation and step of the newest checkpoint that has been seen."""
        self.killed: Counter[str] = Counter()

    def words(self, last: int) -> list[str]:
        """Return the command line, the same every time."""
        options = {"checkpoint_dir": self.parent, "resume_from_checkpoint": self.parent, "max_steps": last}
        return flags(self.folder, **OPTIONS | options)

    def kill_once(self) -> None:
        """Start, kill at a random moment after a commit, and check what is left."""
        if self.random.random() < 0.1:
            self.killed["a start"] += 1
            self.start_and_kill(lambda ranks: self.random.uniform(0, 2))
        before = self.newest
        victims = self.start_and_kill(self.wait_for_commit)
        self.killed["both ranks" if len(victims) == 2 else f"rank {victims[0]}"] += 1
        assert self.newest > before, "it had committed a checkpoint before the kill"

    def wait_for_commit(self, ranks: Ranks) -> float:
        """Return, after a commit of a start, how many seconds to wait before the kill."""
        ranks[0].until(lambda: self.committed() > self.newest, "a commit", 300)
        return self.random.uniform(0, 1.5)

    def start_and_kill(self, wait: Callable[[Ranks], float]) -> list[int]:
        """Start, kill ranks after ``wait`` and the seconds that it returns, check what is left; return the ranks."""
        victims = self.random.choice(([0], [1], [0, 1]))
        launcher = lambda *place: as_torchrun(*place) | self.variables  # noqa: E731
        with Ranks(self.folder / "log", WORLD, "train", *self.words(10**6), launcher=launcher) as ranks:
            time.sleep(wait(ranks))
            for number in victims:
                os.kill(ranks[number].pid, signal.SIGKILL)
            time.sleep(self.random.uniform(0, 0.2))  # a survivor may go on a little
        self.check()
        return victims

    @property
    def run_folder(self) -> str:
        """The folder of the run's checkpoints."""
        return f"{self.parent}/{TINY['run_name']}"

    def committed(self) -> tuple[int, int]:
        """Return generation and step of the newest committed checkpoint."""
        return max((each[:2] for each in open_folder(self.run_folder).committed()[:1]), default=(0, 0))

    def check(self) -> None:
        """Nothing committed is lost or damaged."""
        newest = self.committed()
        logs = self.folder / "run"
        records = read_metrics(logs) if (logs / "metrics.jsonl").exists() else []
        told = max([record["step"] for record in records if record.get("event") == "save"], default=0)
        assert newest >= self.newest, f"{self.newest} was committed, {newest} is the newest now"
        assert newest[1] >= told, f"step {told} was committed, {newest} is the newest now"
        if newest[1]:
            problems = open_checkpoint(self.run_folder).verify()
            assert problems == [], problems
        self.newest = newest

    def finish(self) -> int:
        """Train on to the end, and compare with a run that was never disturbed; return its last step."""
        last = self.newest[1] + 4
        run(in_environment, WORLD, self.variables, train, self.words(last), timeout=600)
        straight = self.folder / "straight"
        run(train, WORLD, flags(straight, **OPTIONS | {"max_steps": last, "checkpoint_freq": last}), timeout=600 + last)
        expected = {r["step"]: [r[key] for key in EXACT] for r in logged(straight)}
        ours = logged(self.folder)
        assert {record["step"] for record in ours} == set(expected) == set(range(1, last + 1))
        for record in ours:
            assert [record[key] for key in EXACT] == expected[record["step"]], f"step {record['step']} differs"
        theirs, found = tensors(f"{straight}/checkpoints/{TINY['run_name']}"), tensors(self.run_folder)
        assert found.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in found.items())
        return last


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return every record of a step, also where a step was done again."""
    return [record for record in read_metrics(folder / "run") if "event" not in record]


def tensors(run_folder: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a run's newest checkpoint."""
    reader = open_verified(run_folder).reader()
    return {key: read_tensor(reader, key) for key, entry in saved_entries(reader).items() if hasattr(entry, "size")}


def soak(kills: int, *, s3: bool, seed: int, folder: Path, tell: Any = lambda line: None) -> Soak:
    """Kill ``kills`` times and compare; raises AssertionError for anything that is not as it should be."""
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        parent = str(folder / "checkpoints")
        if s3:
            logging.getLogger("werkzeug").setLevel(logging.ERROR)
            variables = environment(stack.enter_context(serving()).url)
            os.environ.update(variables)
            from smp_train.storage.client import client

            client().create_bucket(Bucket="soak")
            parent = "s3://soak/checkpoints"
        done = Soak(folder, parent, seed, variables)
        for number in range(1, kills + 1):
            done.kill_once()
            if number % 10 == 0:
                tell(f"{number} kills, step {done.newest[1]} committed")
        last = done.finish()
        tell(f"{kills} kills ({dict(done.killed)}), each after a commit: no checkpoint lost, none damaged; all of "
             f"{last} steps and the last checkpoint are those of an undisturbed run")  # fmt: skip
        return done


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--place", choices=("folder", "s3"), default="folder")
    parser.add_argument("--seed", type=int, default=0)
    options, began = parser.parse_args(), time.monotonic()
    tell = lambda line: print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        soak(options.kills, s3=options.place == "s3", seed=options.seed, folder=Path(folder), tell=tell)


if __name__ == "__main__":
    main()
