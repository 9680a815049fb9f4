"""Kill a tiny training at random moments, many times, and prove that nothing committed is ever lost.

    python -m tests.soak --kills 200 [--place folder|s3] [--seed N]

Two ranks train, saving every other step. At a random moment rank 0, rank 1 or both are killed (SIGKILL), the survivor
a little later; then the same command starts again. After each kill the newest committed checkpoint must be there, not
older than the one before, and intact; at the end every step that was ever logged, and the last checkpoint, must be
those of a run that was never disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from smp_train.checkpoints.commit import open_folder
from smp_train.checkpoints.discovery import committed_names, find, open_checkpoint
from smp_train.checkpoints.manifest import parse_folder_name

from smp_train.checkpoints.dcp.trees import read_tensor, saved_entries
from smp_train.telemetry.metrics import read_metrics
from tests.harness import as_torchrun, forkserver, free_port, run
from tests.s3_server import environment, serving
from tests.training import flags, train

WORLD = 2
OPTIONS = {
    "attn_pdrop": 0.1, "checkpoint_freq": 2, "num_kept_checkpoints": 2, "lr_decay_style": "constant",
    "logging_freq": 1, "num_layers": 1,
}  # fmt: skip
EXACT = ("loss", "grad_norm", "lr", "tokens", "consumed")


def rank(number: int, port: int, variables: dict[str, str], log: str, words: list[str]) -> None:
    """Train as one rank, saying nothing."""
    os.setpgid(0, 0)
    with open(log, "a") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.environ.update(as_torchrun(number, WORLD, port) | variables | {"OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    os._exit(train(words))


def trained(variables: dict[str, str], words: list[str]) -> None:
    """Train to the end, in a rank of the harness."""
    os.environ.update(variables)
    train(words)


class Soak:
    """One training that is killed over and over."""

    def __init__(self, folder: Path, place: str, seed: int, variables: dict[str, str]) -> None:
        self.folder, self.place, self.variables = folder, place, variables
        self.random = random.Random(seed)
        self.newest = 0
        self.killed: Counter[str] = Counter()
        self.saves = 0

    def words(self, last: int) -> list[str]:
        """Return the command line, the same every time."""
        options = {"checkpoint_dir": self.place, "resume_from_checkpoint": self.place, "max_steps": last}
        return flags(self.folder, **OPTIONS | options)

    def kill_once(self) -> None:
        """Start, kill at a random moment, and check what is left."""
        port, log = free_port(), str(self.folder / "log")
        context = forkserver()
        ranks = [
            context.Process(target=rank, args=(number, port, self.variables, log, self.words(10**6)), daemon=True)
            for number in range(WORLD)
        ]
        before = size(self.metrics)
        for process in ranks:
            process.start()
        victims = self.random.choice(([0], [1], [0, 1]))
        early = self.random.random() < 0.1
        deadline = time.monotonic() + 300
        while not early and size(self.metrics) == before:
            assert time.monotonic() < deadline, f"no step within five minutes; see {log}"
            assert all(process.exitcode is None for process in ranks), f"a rank ended by itself; see {log}"
            time.sleep(0.005)
        time.sleep(self.random.uniform(0, 2.0 if early else 1.5))
        for number in victims:
            os.kill(ranks[number].pid, signal.SIGKILL)
        time.sleep(self.random.uniform(0, 0.2))  # a survivor may go on a little
        for process in ranks:
            process.kill()
            process.join()
        self.killed["both ranks" if len(victims) == 2 else f"rank {victims[0]}"] += 1
        self.check()

    @property
    def metrics(self) -> Path:
        """The file that grows with each step."""
        return self.folder / "run" / "metrics.jsonl"

    def check(self) -> None:
        """Nothing committed is lost or damaged."""
        storage = open_folder(self.place)
        steps = sorted(parse_folder_name(name)[1] for name in committed_names(storage))
        newest = steps[-1] if steps else 0
        records = read_metrics(self.folder / "run") if self.metrics.exists() else []
        told = [record["step"] for record in records if record.get("event") == "save"]
        known = max([self.newest, *told])
        assert newest >= known, f"step {known} was committed, {newest} is the newest now"
        if newest:
            problems = open_checkpoint(f"{self.place}/llama_v2-{newest}steps").verify()
            assert problems == [], problems
        self.saves += (newest - self.newest) // OPTIONS["checkpoint_freq"]
        self.newest = newest

    def finish(self) -> int:
        """Train on to the end, and compare with a run that was never disturbed; return its last step."""
        last = self.newest + 4
        run(trained, WORLD, self.variables, self.words(last), timeout=600)
        straight = self.folder / "straight"
        run(train, WORLD, flags(straight, **OPTIONS | {"max_steps": last, "checkpoint_freq": last}), timeout=600 + last)
        expected = {r["step"]: [r[key] for key in EXACT] for r in logged(straight)}
        ours = logged(self.folder)
        assert {record["step"] for record in ours} == set(expected) == set(range(1, last + 1))
        for record in ours:
            assert [record[key] for key in EXACT] == expected[record["step"]], f"step {record['step']} differs"
        name = f"llama_v2-{last}steps"
        theirs, found = tensors(f"{straight}/checkpoints/{name}"), tensors(f"{self.place}/{name}")
        assert found.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[key]) for key, value in found.items())
        return last


def size(path: Path) -> int:
    """Return a file's size, 0 where it is not there."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return every record of a step, also where a step was done again."""
    return [record for record in read_metrics(folder / "run") if "event" not in record]


def tensors(checkpoint: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    reader = find(checkpoint).reader()
    return {key: read_tensor(reader, key) for key, entry in saved_entries(reader).items() if hasattr(entry, "size")}


def soak(kills: int, *, s3: bool, seed: int, folder: Path, tell: Any = lambda line: None) -> Soak:
    """Kill ``kills`` times and compare; raises AssertionError for anything that is not as it should be."""
    with contextlib.ExitStack() as stack:
        variables: dict[str, str] = {}
        place = str(folder / "checkpoints")
        if s3:
            logging.getLogger("werkzeug").setLevel(logging.ERROR)
            variables = environment(stack.enter_context(serving()).url)
            os.environ.update(variables)
            from smp_train.storage.client import client

            client().create_bucket(Bucket="soak")
            place = "s3://soak/run"
        done = Soak(folder, place, seed, variables)
        for number in range(1, kills + 1):
            done.kill_once()
            if number % 10 == 0:
                tell(f"{number} kills, step {done.newest} committed")
        last = done.finish()
        tell(f"{kills} kills ({dict(done.killed)}), {done.saves} checkpoints between them: none lost, none damaged; "
             f"all of {last} steps and the last checkpoint are those of an undisturbed run")  # fmt: skip
        return done


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--place", choices=("folder", "s3"), default="folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        soak(
            options.kills, s3=options.place == "s3", seed=options.seed, folder=Path(folder),
            tell=lambda line: print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True),
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
