"""Asked to stop, a run saves once and leaves with exit code 0; the same command goes on as if nothing had been."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from smp_train.checkpoints.format import BEGUN, SWEPT
from smp_train.storage.folder import PARTIAL
from smp_train.telemetry.metrics import history, read_metrics
from tests.harness import as_torchrun
from tests.system.command import Command, Ranks, torchrun, warm
from tests.training import flags, read_checkpoint, same

pytestmark = [pytest.mark.system, pytest.mark.slow]

FAR = 1_000_000
"""A last step that no run here comes to: how many steps one makes until it is stopped is the machine's affair."""
EXACT = ("step", "loss", "grad_norm", "lr", "tokens", "consumed")


def command_line(folder: Path, **changes: Any) -> list[str]:
    """Return the one command line of a run, started and resumed alike: dropout on, saved only when it stops or ends."""
    options: dict[str, Any] = {"max_steps": FAR, "lr_decay_iters": 100, "num_layers": 1, "attn_pdrop": 0.1}
    options |= {"checkpoint_freq": FAR, "num_kept_checkpoints": FAR, "resume_from_checkpoint": folder / "checkpoints"}
    return ["train", *flags(folder, **options | changes)]


def last_step(folder: Path) -> int:
    # A line that is just being written is none yet.
    metrics = folder / "run" / "metrics.jsonl"
    return max((record["step"] for record in read_metrics(metrics.parent)), default=0) if metrics.exists() else 0


def stopped_step(folder: Path) -> int:
    return int(json.loads((folder / "run" / "STOPPED").read_text())["step"])


class Chain:
    """One run that is stopped over and over, each time in another way, and each time started by the same command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.words = command_line(folder)
        self.stops: list[int] = []

    def check_stopped(self, err: str) -> None:
        """Check what a stop leaves behind: one new checkpoint, committed; the marker; no complaint."""
        step = stopped_step(self.folder)
        checkpoints = {int(path.parent.name[9:-5]) for path in self.folder.glob("checkpoints/run/*/COMMITTED")}
        assert checkpoints == {*self.stops, step}
        self.stops.append(step)
        assert self.stops == sorted(set(self.stops))
        assert not (self.folder / "run" / "DONE").exists()
        assert not (self.folder / "run" / "STOP").exists()
        assert [line for line in err.splitlines() if line.startswith("smp-train")] == []

    def reach(self, command: Command) -> None:
        """Wait until the run is a few steps further than where it stopped last."""
        before = self.stops[-1] if self.stops else 0
        command.until(lambda: last_step(self.folder) >= before + 3, f"step {before + 3}")

    def stop_ranks(self, ask: Callable[[Ranks], None], *, reach: bool = True) -> None:
        """Run on two ranks until `ask` has them stop."""
        with Ranks(self.folder, 2, *self.words, launcher=as_torchrun) as ranks:
            if reach:
                self.reach(ranks[0])
            ask(ranks)
            assert ranks.codes() == [0, 0], ranks.err
            assert "Stopped at step" in ranks[0].out
            assert "run the same command again to go on" in ranks[0].out
            self.check_stopped(ranks.err)
            assert ranks.err == ""


def run_to(last: int, folder: Path) -> str:
    """Start or go on, to a last step; return what rank 0 says."""
    with Ranks(folder, 2, *command_line(folder, max_steps=last), launcher=as_torchrun) as ranks:
        assert ranks.codes() == [0, 0], ranks.err
    assert json.loads((folder / "run" / "DONE").read_text())["step"] == last
    return ranks[0].out


@pytest.mark.timeout(2400)  # it starts eleven times
def test_stopped_in_every_way_it_ends_where_it_would_have(tmp_path: Path) -> None:
    chain, straight = Chain(tmp_path / "stopped"), tmp_path / "straight"
    run_folder = chain.folder / "run"

    def before_the_first_step(ranks: Ranks) -> None:
        # Its peers have joined to lay out the mesh, so they listen for signals by now.
        ranks[0].until(lambda: "Backend: " in ranks[0].out, "the choice of backend")
        ranks[1].signal(signal.SIGTERM)

    chain.stop_ranks(before_the_first_step, reach=False)
    chain.stop_ranks(lambda ranks: ranks[0].signal(signal.SIGTERM))
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        chain.stop_ranks(lambda ranks, number=number: ranks[1].signal(number))  # type: ignore[misc]
    chain.stop_ranks(lambda ranks: (run_folder / "STOP").touch())

    with torchrun(chain.folder, 2, *chain.words) as command:
        chain.reach(command)
        command.signal(signal.SIGTERM, rank=1)
        assert command.code() == 0, command.err
        assert "Traceback" not in command.err
        chain.check_stopped(command.err)

    # To torchrun itself: it passes the signal on and waits, then ends with a traceback and an exit code of its own.
    for number in (signal.SIGTERM, signal.SIGINT):
        with torchrun(chain.folder, 2, *chain.words) as command:
            chain.reach(command)
            command.signal(number)
            assert command.code() == 1
            assert "SignalException" in command.err
            assert f"{number.name}: asked to stop" in command.out
            assert "SignalException" in command.out.splitlines()[-1]
            chain.check_stopped(command.err)

    last = chain.stops[-1] + 5
    run_to(last, chain.folder)
    run_to(last, straight)
    assert not (run_folder / "STOPPED").exists()
    same_numbers(chain.folder, straight)
    same(*(read_checkpoint(at / f"checkpoints/run/llama_v2-{last}steps") for at in (chain.folder, straight)))
    events = [(record["event"], record["step"]) for record in read_metrics(run_folder) if "event" in record]
    assert [step for event, step in events if event == "resume"] == chain.stops
    assert [step for event, step in events if event == "save"] == [*chain.stops, last]
    assert [step for event, step in events if event == "stop"] == chain.stops


def same_numbers(ours: Path, theirs: Path) -> None:
    def numbers(folder: Path) -> list[list[Any]]:
        steps = [record for record in history(read_metrics(folder / "run")) if "event" not in record]
        return [[record[name] for name in EXACT] for record in steps]

    assert numbers(ours) == numbers(theirs)


def test_started_again_when_done_it_leaves_everything_as_it_is(tmp_path: Path) -> None:
    run_to(3, tmp_path)
    (checkpoint,) = tmp_path.glob("checkpoints/run/*steps*")
    before = {path: path.stat().st_mtime_ns for path in (checkpoint, *checkpoint.rglob("*"))}
    assert "Nothing left to do: step 3 of 3 is done" in run_to(3, tmp_path)
    assert {path: path.stat().st_mtime_ns for path in (checkpoint, *checkpoint.rglob("*"))} == before
    assert list(tmp_path.glob("checkpoints/run/*steps*")) == [checkpoint]


def test_a_second_signal_ends_a_rank_at_once_and_commits_nothing_half(tmp_path: Path) -> None:
    """A rank hangs while the run saves after each step: the other, asked twice, does not wait for it."""
    words = command_line(tmp_path, checkpoint_freq=1)
    with Ranks(tmp_path, 2, *words, launcher=as_torchrun) as ranks:
        ranks[0].until(lambda: last_step(tmp_path) >= 3, "step 3")
        ranks[1].signal(signal.SIGSTOP)
        began = time.monotonic()

        def asked_again() -> bool:
            with suppress(ProcessLookupError):  # it may be gone by now: that is what is waited for
                ranks[0].signal(signal.SIGTERM)
            return time.monotonic() > began + 120

        with pytest.raises(AssertionError, match="ended with code 143"):
            ranks[0].until(asked_again, "end")
        assert time.monotonic() - began > 5
    committed = sorted(int(path.parent.name[9:-5]) for path in tmp_path.glob("checkpoints/run/*steps/COMMITTED"))
    with Ranks(tmp_path, 2, *command_line(tmp_path, max_steps=committed[-1] + 1), launcher=as_torchrun) as ranks:
        assert ranks.codes() == [0, 0], ranks.err
        assert f"llama_v2-{committed[-1]}steps at step {committed[-1]}" in ranks[0].out
    # A save that the kill interrupted keeps its name and no tensors: its step is saved under a second name.
    attempts = [[path.name for path in folder.iterdir()] for folder in tmp_path.glob("checkpoints/run/*steps*")]
    assert sum("COMMITTED" in files for files in attempts) == len(committed) + 1
    left = {file for files in attempts if "COMMITTED" not in files for file in files}
    assert all(file in (BEGUN, SWEPT) or file.endswith(PARTIAL) for file in left), left


IMPATIENT = """
import sys
from smp_train import cli
from smp_train.run import stop
stop.REPEAT_SECONDS = 600.0  # all signals are one request, however slow the machine
sys.exit(cli.main(sys.argv[1:]))
"""


def test_interrupted_until_the_process_has_ended_it_still_ends_well(tmp_path: Path) -> None:
    """A second ^C may come when all is saved and the interpreter shuts down: that is no failure."""
    with subprocess.Popen([sys.executable, "-c", IMPATIENT, *command_line(tmp_path)], stdout=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 300
        while last_step(tmp_path) < 1 and run.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        while run.poll() is None and time.monotonic() < deadline:
            run.send_signal(signal.SIGINT)
            time.sleep(0.005)
        run.kill()
    assert run.returncode == 0
    assert (tmp_path / f"checkpoints/run/llama_v2-{stopped_step(tmp_path)}steps/COMMITTED").exists()


@pytest.mark.core
def test_interrupted_alone_it_says_so_at_once_saves_and_ends_well(tmp_path: Path) -> None:
    with warm(tmp_path, *command_line(tmp_path)) as command:
        command.until(lambda: last_step(tmp_path) >= 3, "step 3")
        command.signal(signal.SIGINT)
        command.until(lambda: "SIGINT: asked to stop" in command.out, "word of the request")
        assert command.code() == 0, command.err
    assert (tmp_path / f"checkpoints/run/llama_v2-{stopped_step(tmp_path)}steps/COMMITTED").exists()
