"""One rank fails: all end within seconds, each with the right code, and the failing rank's message is there to read."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness import as_torchrun
from tests.system.command import Command, Ranks, torchrun, write_shard
from tests.training import flags

pytestmark = [pytest.mark.system, pytest.mark.slow]

CONFIG, DATA, CHECKPOINT = 2, 3, 4
FAR = 1_000_000
"""A step that no run here comes to, however late what ends it is."""
GONE_SECONDS = 240.0
"""From the failing rank's message until no process of the job is left, on a machine that others use too.

By itself it takes one or two; who waited for a collective to give up would wait half an hour.
"""


def ended(command: Command, pattern: str, *, codes: dict[int, int]) -> list[str]:
    """Wait for the message and the end; check how long the end took and the ranks' codes, and return our lines."""
    command.until(lambda: any(re.search(pattern, line) for line in command.complaints), f"message {pattern}")
    deadline = time.monotonic() + GONE_SECONDS
    code = command.code(GONE_SECONDS)
    while left := command.processes():  # torchrun's helpers end once it has
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert code == 1  # torchrun's own, whatever its ranks' are
    # What torchrun says of its ranks, in the order of their failures.
    found = re.findall(r"rank +: (\d+) \(.*\)\n +exitcode +: (-?\d+) ", command.err)
    assert {int(rank): int(code) for rank, code in found} == codes, command.err
    # No traceback but torchrun's own.
    assert command.err.count("Traceback (most") == 1
    assert command.err.index("smp-train: ") < command.err.index("Traceback (most")
    return command.complaints


def data(folder: Path, **changes: Any) -> dict[str, Any]:
    """Flags of two shards such that rank 0 of two reads nothing but the first, and rank 1 nothing but the second."""
    for number in range(2):
        write_shard(folder / "data" / f"part-{number}.jsonl", 4, first=4 * number)
    return {
        "use_synthetic_data": None, "training_dir": folder / "data", "shuffle": "none", "train_batch_size": 4,
        "max_steps": FAR, "checkpoint_freq": FAR, "lr_decay_iters": 10, **changes,
    }  # fmt: skip


def running(command: Command, folder: Path, step: int = 3) -> None:
    """Wait until ``step`` steps have been logged."""
    metrics = folder / "run" / "metrics.jsonl"
    command.until(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(), f"step {step}")


# --- before training -------------------------------------------------------------------------------


def refused(folder: Path, code: int, world: int = 2, **changes: Any) -> list[str]:
    """Return what ranks that some launcher started said when all ended in time with ``code``."""
    with Ranks(folder, world, "train", *flags(folder, **changes), launcher=as_torchrun) as ranks:
        assert ranks.codes(GONE_SECONDS) == [code] * world, ranks.err
        lines = ranks.err.splitlines()
    assert all(line.startswith("smp-train: [rank ") for line in lines), lines
    return lines


@pytest.mark.core
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_step": 3}, r"^smp-train: \[rank 0 on .*\] error: unknown flag --max_step; did you mean --max_steps\?$"),
        ({"hybrid_shard_degree": 3}, r"--hybrid_shard_degree 3 does not divide the 2 processes .*; 1, 2 would$"),
    ],
    ids=["flag", "degree"],
)
def test_arguments(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    first, second = refused(tmp_path, CONFIG, **changes)
    assert re.search(message, first)
    assert second == first.replace("rank 0", "rank 1")  # nobody has ended it


def test_a_bad_shard_that_only_one_rank_converts(tmp_path: Path) -> None:
    changes = data(tmp_path)
    # The larger shard is rank 0's to convert.
    write_shard(tmp_path / "data" / "part-0.jsonl", 8)
    with (tmp_path / "data" / "part-1.jsonl").open("a") as file:
        file.write('{"input_ids": [1, 2]\n')
    with torchrun(tmp_path, 2, "train", *flags(tmp_path, **changes)) as command:
        first, second = sorted(ended(command, r"\[rank 1 on ", codes={0: DATA, 1: DATA}))
        rank, code, message = root_cause(command)
    where = f"{tmp_path}/data/part-1.jsonl:5: broken JSON"
    assert (rank, code) == (1, DATA)
    assert where in message
    assert re.match(rf"smp-train: \[rank 0 on \S+\] error: rank 1 on \S+: {re.escape(where)}", first)
    assert re.match(rf"smp-train: \[rank 1 on \S+\] error: {re.escape(where)}", second)


# --- in mid-training -------------------------------------------------------------------------------


def tokens_of(folder: Path, shard: str) -> Path:
    """Return the token file of a shard."""
    (found,) = [path for path in folder.glob(".smp_train_cache/*.idx") if shard.encode() in path.read_bytes()]
    return found.with_suffix(".tok")


@pytest.mark.core
def test_data_that_vanishes_under_one_rank(tmp_path: Path) -> None:
    with Ranks(tmp_path, 2, "train", *flags(tmp_path, **data(tmp_path)), launcher=as_torchrun) as ranks:
        running(ranks[0], tmp_path)
        cache = tokens_of(tmp_path / "data", "part-1.jsonl")
        cache.write_bytes(b"")
        assert ranks.codes(GONE_SECONDS) == [DATA, DATA]
        lines = [line for rank in ranks.ranks for line in rank.complaints]
    # The first row of a step, unless it was damaged in the middle of one.
    told = rf"{re.escape(str(cache))}: row \d \(part-1.jsonl:\d\) does not match its checksum; remove it"
    assert len(lines) == 2
    assert re.match(rf"smp-train: \[rank 0 on \S+\] error: rank 1 on \S+: {told}", lines[0])
    assert re.match(rf"smp-train: \[rank 1 on \S+\] error: {told}", lines[1])
    (saved,) = tmp_path.glob("checkpoints/run/*steps")  # the last completed step
    assert (saved / "COMMITTED").exists()


def root_cause(command: Command) -> tuple[int, int, str]:
    """Return the rank, the exit code and the message that torchrun takes for the cause."""
    cause = command.err.partition("Root Cause ")[2]
    found = [re.search(rf"^  {name} *: (.*)$", cause, re.MULTILINE) for name in ("rank", "exitcode", "traceback")]
    rank, code, message = (match[1] for match in found if match is not None)
    return int(rank.split()[0]), int(code.split()[0]), message


def test_a_rank_that_is_killed(tmp_path: Path) -> None:
    with torchrun(tmp_path, 2, "train", *flags(tmp_path, max_steps=FAR)) as command:
        running(command, tmp_path)
        command.signal(signal.SIGKILL, rank=1)
        (line,) = ended(command, r"\[rank 0 on ", codes={0: 1, 1: -signal.SIGKILL})
        assert root_cause(command)[:2] == (1, -signal.SIGKILL)
    assert re.search(r"error: lost touch with another rank; (no word from )?rank 1 on \S+.*\(", line)
