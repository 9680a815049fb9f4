"""Kill ranks of one run at random moments, many times: it recovers in place each time, and no number changes.

    python -m tests.soak_recovery --kills 200 [--seed N]

Four ranks train with two replicas of each part of the state. At a random moment after a step, one rank or two are
killed (SIGKILL); in every fourth recovery one more, which may be the replacement during its start. Of a pair, some are
the two replicas of a part: then all ranks go back to a checkpoint. One rank is never killed: its threads, descriptors,
sockets and memory must not grow. At the end each step that was ever logged, and the last checkpoint, must be those of a
run that was never disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import psutil

from smp_train.launch.coordinator import End
from tests.harness import run
from tests.recovering import Recovering
from tests.system.command import Command
from tests.training import TINY, flags, read_checkpoint, records, same, steps, train

WORLD = 4
OPTIONS: dict[str, Any] = {
    "sharding_strategy": "hybrid_shard", "hybrid_shard_degree": 2, "attn_pdrop": 0.1, "lr_decay_style": "constant",
    "checkpoint_freq": 5, "num_kept_checkpoints": 2, "distributed_timeout_minutes": 3, "num_layers": 1,
}  # fmt: skip
EXACT = ("loss", "grad_norm", "lr", "tokens", "consumed")
EVERY = 20
"""The surviving rank is measured after so many kills."""
MOST_PER_KILL = 0.5
"""The surviving rank may grow by so many threads, descriptors, sockets or MiB; a group has three threads."""


class Use(NamedTuple):
    """What a process takes from the machine."""

    threads: int
    descriptors: int
    sockets: int
    mib: float

    @staticmethod
    def of(pid: int) -> Use:
        """Return what a process takes now."""
        process, targets = psutil.Process(pid), []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed by now
                targets.append(os.readlink(entry))
        sockets = sum(target.startswith("socket:") for target in targets)
        return Use(process.num_threads(), len(targets), sockets, process.memory_info().rss / 2**20)


class RecoverySoak:
    """One run whose ranks are killed over and over."""

    def __init__(self, folder: Path, seed: int, tell: Callable[[str], object]) -> None:
        self.folder, self.random, self.tell = folder, random.Random(seed), tell
        self.survivor = self.random.randrange(WORLD)
        self.kills: Counter[str] = Counter()
        self.killed: set[Command] = set()
        self.since = 1
        """The generation that the survivor's process joined first."""
        self.use: list[Use] = []
        """What the survivor takes after each `EVERY` kills."""
        words = flags(folder, recovery="in_place", **OPTIONS, max_steps=10**6)
        self.ranks = Recovering(folder / "log", WORLD, *words)

    def run(self, kills: int) -> None:
        """Kill ranks, ``kills`` in all, then stop the run and compare it."""
        with self.ranks:
            self.attend(lambda: self.last_step() > OPTIONS["checkpoint_freq"] + 1, "a checkpoint")
            while (killed := self.kills.total()) < kills:
                self.disturb(kills - killed)
                self.attend(self.quiet(), "a step after a recovery")
                if self.kills.total() // EVERY > killed // EVERY:
                    self.measure()
            (self.folder / "run" / "STOP").touch()
            end = self.ranks.until_the_end()
        assert end == End(None), f"{end}\n{self.ranks.err}"
        self.compare()
        self.check_use()

    def disturb(self, most: int) -> None:
        """Kill ranks at a random moment; sometimes one more while the run recovers."""
        time.sleep(self.random.uniform(0, 0.6))
        count = min(most, self.random.choice((1, 1, 2)))
        self.kill(self.random.sample([rank for rank in range(WORLD) if rank != self.survivor], count))
        if count < most and self.random.random() < 0.25:
            before = len(self.ranks.generations)
            self.attend(lambda: len(self.ranks.generations) > before, "a recovery")
            moment = time.monotonic() + self.random.uniform(0, 2)
            self.attend(lambda: time.monotonic() > moment, "the moment of the next death")
            self.kill([self.random.choice([rank for rank in range(WORLD) if rank != self.survivor])])

    def kill(self, victims: list[int]) -> None:
        for rank in victims:
            generation, command = self.ranks.ranks[rank]
            new = generation > 1 and generation == len(self.ranks.generations) + 1
            self.kills[f"rank {rank}{', a replacement,' * new}"] += 1
            self.killed.add(command)
            with suppress(ProcessLookupError):  # it was killed a moment ago
                os.kill(command.pid, signal.SIGKILL)

    def attend(self, condition: Callable[[], bool], what: str) -> None:
        end = self.ranks.attend(condition, what)
        assert end is None, f"{end}\n{self.ranks.err}"

    def quiet(self) -> Callable[[], bool]:
        """Return whether all killed ranks are replaced, and a step has been made that is further than any before."""
        last, killed = self.last_step() + 1, {*self.killed}
        return lambda: killed.isdisjoint(each for _, each in self.ranks.ranks.values()) and self.last_step() > last

    def last_step(self) -> int:
        """Return the last step that the run has logged."""
        with suppress(OSError), (self.folder / "run" / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            for line in reversed(file.read().splitlines()):
                with suppress(ValueError):
                    record = json.loads(line)
                    if "event" not in record and "step" in record:
                        return int(record["step"])
        return 0

    def measure(self) -> None:
        """Note what the survivor takes. It may have ended itself, if gloo forgot a send: then begin again."""
        generation, command = self.ranks.ranks[self.survivor]
        self.use = [*self.use, Use.of(command.pid)] if generation == self.since else []
        self.since = generation
        self.tell(f"{self.kills.total()} kills, step {self.last_step()}, rank {self.survivor}: {[*self.use[-1:]]}")

    def compare(self) -> None:
        """Compare each logged step and the last checkpoint with those of an undisturbed run."""
        ours, straight = steps(self.folder), self.folder / "straight"
        last = max(record["step"] for record in ours)
        run(train, WORLD, flags(straight, **OPTIONS | {"max_steps": last, "checkpoint_freq": last}), timeout=600 + last)
        expected = {record["step"]: [record[name] for name in EXACT] for record in steps(straight)}
        assert {record["step"] for record in ours} == expected.keys()
        for record in ours:
            assert [record[name] for name in EXACT] == expected[record["step"]], f"step {record['step']} differs"
        same(last_checkpoint(self.folder, last), last_checkpoint(straight, last))

    def check_use(self) -> None:
        """Compare what the survivor takes on average in both halves of the soak."""
        half = len(self.use) // 2
        if half >= 2:  # groups that were just left may still be open
            early, late = (map(fmean, zip(*part, strict=True)) for part in (self.use[:half], self.use[half:]))
            grown = [(after - before) / (EVERY * half) for before, after in zip(early, late, strict=True)]
            assert max(grown) <= MOST_PER_KILL, f"{Use(*grown)} more after each kill: {self.use}"

    def report(self) -> str:
        """Return what happened, in words."""
        events = [record for record in records(self.folder) if record.get("event") == "recovery"]
        seconds = sorted(event["seconds"] for event in events)
        made = len(steps(self.folder))
        return (
            f"{self.kills.total()} kills ({dict(sorted(self.kills.items()))}), {len(self.ranks.generations)} "
            f"generations, {len(events)} recoveries in {median(seconds):.1f} s (median) to {seconds[-1]:.1f} s, "
            f"{made} steps logged, {made - self.last_step()} of them again; every step and the last checkpoint are "
            "those of an undisturbed run"
        )


def last_checkpoint(folder: Path, step: int) -> dict[str, Any]:
    """Return the entries of the checkpoint of a step of a run below ``folder``."""
    saved = (folder / "checkpoints" / TINY["run_name"]).glob(f"*-{step}steps*/COMMITTED")
    return read_checkpoint(max(saved, key=lambda marker: marker.stat().st_mtime).parent)


def soak(kills: int, *, seed: int, folder: Path, tell: Callable[[str], object] = lambda line: None) -> RecoverySoak:
    """Kill ``kills`` times and compare; raises AssertionError for anything that is not as it should be."""
    done = RecoverySoak(folder, seed, tell)
    done.run(kills)
    tell(done.report())
    return done


def main() -> None:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options, began = parser.parse_args(), time.monotonic()
    tell = lambda line: print(f"{time.monotonic() - began:6.0f} s  {line}", flush=True)  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        soak(options.kills, seed=options.seed, folder=Path(folder), tell=tell)


if __name__ == "__main__":
    main()
