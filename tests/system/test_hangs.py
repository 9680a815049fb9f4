"""A rank stops, dies or stands still: it is named within seconds, and the others end; slow ones are not blamed."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import harness
from tests.harness import as_torchrun
from tests.system.command import Ranks, torchrun
from tests.system.test_failing_ranks import FAR, running
from tests.training import flags

pytestmark = [pytest.mark.system, pytest.mark.slow]

HANGS: dict[str, Any] = {"max_steps": FAR, "checkpoint_freq": FAR, "lr_decay_iters": 100, "hang_report_seconds": 2}


def two_nodes(rank: int, world: int, port: int) -> dict[str, str]:
    """Return torchrun's variables of ranks on two nodes."""
    half = world // 2
    place = {"LOCAL_RANK": rank % half, "LOCAL_WORLD_SIZE": half, "GROUP_RANK": rank // half, "GROUP_WORLD_SIZE": 2}
    return as_torchrun(rank, world, port) | {name: str(value) for name, value in place.items()}


def log(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted((folder / "run/logs").glob("rank-*.log")))


@pytest.mark.parametrize(
    ("world", "stopped", "launcher"), [(3, 0, as_torchrun), (4, 3, two_nodes)], ids=["the store's rank", "another node"]
)
def test_a_stopped_rank_is_named_and_ended(world: int, stopped: int, launcher: Any, tmp_path: Path) -> None:
    words = flags(tmp_path, **HANGS, train_timeout_seconds=5)
    with Ranks(tmp_path, world, "train", *words, launcher=launcher) as ranks:
        running(ranks[0], tmp_path, 4)
        ranks[stopped].signal(signal.SIGSTOP)
        if launcher is as_torchrun:  # a launcher asks the others to stop once the first has ended
            ranks[stopped].code(120)
            for rank in range(1, world):
                with suppress(ProcessLookupError):  # on a busy machine it may have ended as well
                    ranks[rank].signal(signal.SIGTERM)
        codes = ranks.codes()
        assert [codes.pop(stopped), *codes] == [-signal.SIGKILL, *[1] * (world - 1)], ranks.err
        assert re.search(rf"error: no progress.*: rank {stopped} on \S+ is stopped, in step \d+", ranks.err)
        assert launcher is two_nodes or ranks.err.count("smp-train: ") == 1
    assert "asked to stop" not in log(tmp_path), "who ends a run that hangs promises no save"


def test_a_stopped_rank_is_named_and_may_go_on(tmp_path: Path) -> None:
    words = flags(tmp_path, **HANGS)
    with Ranks(tmp_path, 4, "train", *words, launcher=as_torchrun) as ranks:
        running(ranks[0], tmp_path, 5)
        ranks[2].signal(signal.SIGSTOP)
        ranks[0].until(lambda: "rank 2 on" in log(tmp_path), "name of the missing rank")
        (line,) = (line for line in log(tmp_path).splitlines() if "rank 2 on" in line)
        assert re.search(r"no progress for \d+ s.*: rank 2 on \S+ is stopped, in step \d+, .*; 3 others wait", line)
        recorded = tmp_path / "run/logs/flight-recorder-rank-0.json"
        ranks[0].until(recorded.exists, "record of the collectives")
        ranks[2].signal(signal.SIGCONT)
        ranks[0].until(lambda: "The run goes on" in log(tmp_path), "word of it")


def test_a_node_that_stops_whole(tmp_path: Path) -> None:
    """The node of the store: the other one reports by itself."""
    words = flags(tmp_path, **HANGS, train_timeout_seconds=0)
    with Ranks(tmp_path, 4, "train", *words, launcher=two_nodes) as ranks:
        running(ranks[0], tmp_path, 5)
        for rank in (0, 1):
            ranks[rank].signal(signal.SIGSTOP)
        ranks[2].until(lambda: "is cut off" in log(tmp_path), "name of the missing rank")
        assert re.search(r"no progress for .*: rank 0 on \S+ is cut off", log(tmp_path))


@pytest.mark.parametrize(
    ("world", "rank", "number", "launcher", "said"),
    [
        (3, 0, signal.SIGKILL, as_torchrun, r"was killed in step \d+, \w+"),
        (4, 3, signal.SIGKILL, two_nodes, r"was killed in step \d+, \w+"),
        (2, 1, signal.SIGSEGV, as_torchrun, r"crashed in step \d+, [^,]*, at \S+ \(\S+:\d+\).*\(Segmentation fault\)"),
    ],
    ids=["rank 0", "another node", "crash"],
)
def test_a_rank_that_ends_is_named_with_its_step(
    world: int, rank: int, number: int, launcher: Any, said: str, tmp_path: Path
) -> None:
    with Ranks(tmp_path, world, "train", *flags(tmp_path, **HANGS), launcher=launcher) as ranks:
        running(ranks[0], tmp_path, 5)
        ranks[rank].signal(number)
        codes = ranks.codes(120)
    assert [codes.pop(rank), *codes] == [-number, *[1] * (world - 1)]
    (line,) = ranks[0 if rank else 1].complaints
    assert re.search(rf"rank {rank} on \S+ {said}", line), line


def test_under_torchrun_the_missing_rank_is_its_root_cause(tmp_path: Path) -> None:
    with torchrun(tmp_path, 2, "train", *flags(tmp_path, **HANGS, train_timeout_seconds=5)) as command:
        running(command, tmp_path, 5)
        command.signal(signal.SIGSTOP, rank=1)
        assert command.code() == 1
        assert re.search(r"Root Cause [^=]*=*\s.*\n.*\n  rank +: 1 ", command.err), command.err


LATE_SECONDS = 2.5
"""More than what is reported, 1 s."""


def steps_with_delays(folder: str) -> list[str]:
    """Take steps in which two ranks meet, and return rank 0's warnings.

    Rank 1 is late in its first step, a save and a validation, which have no limit, and then hangs in its data until
    that is reported.
    """
    from smp_train import distributed
    from smp_train.distributed import heartbeat
    from smp_train.distributed.watch import watch

    ranks = distributed.detect()
    distributed.start(ranks, timeout_seconds=240)
    warnings: list[str] = []
    handler = logging.Handler()
    reported = Path(folder) / "reported"
    if ranks.is_main:
        os.mkfifo(reported)

    def emit(record: logging.LogRecord) -> None:
        warnings.append(record.getMessage())
        with suppress(OSError):  # nobody waits for it
            os.close(os.open(reported, os.O_WRONLY | os.O_NONBLOCK))

    handler.emit = emit  # type: ignore[method-assign]
    logging.getLogger("smp_train.watch").addHandler(handler)
    watch(ranks, Path(folder), report_seconds=1, end_seconds=0)

    def late_data() -> None:
        os.open(reported, os.O_RDONLY)

    for step in range(1, 16):
        heartbeat.enter(heartbeat.DATA, step)
        if (step, ranks.rank) == (15, 1):
            late_data()
        for phase in (heartbeat.FORWARD, {5: heartbeat.SAVE, 6: heartbeat.VALIDATION}.get(step, heartbeat.LOG)):
            heartbeat.enter(phase)
            if ranks.rank == 1 and (step == 1 or phase in (heartbeat.SAVE, heartbeat.VALIDATION)):
                time.sleep(LATE_SECONDS)
            distributed.any_rank(False)
    heartbeat.enter(heartbeat.CALLBACK)
    deadline = time.monotonic() + 60
    while ranks.is_main and len(warnings) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    heartbeat.end()
    distributed.stop()
    return warnings


@pytest.mark.core
def test_slow_steps_that_are_no_hang_and_one_that_is(tmp_path: Path) -> None:
    first, *more = harness.run(steps_with_delays, 2, str(tmp_path), timeout=120)[0]
    assert re.search(r"rank 1 on \S+ is in step 15, reading data, at late_data \(test_hangs", first)
    assert more == ["The run goes on"]
