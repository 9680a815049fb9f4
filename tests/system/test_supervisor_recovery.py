"""Supervisors replace what dies: processes, several at once, in a recovery, and nodes. The workers here only wait."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness import free_port
from tests.system.command import Command, warm

pytestmark = [pytest.mark.system, pytest.mark.slow]

AGENT = """
import sys
from pathlib import Path
from smp_train.launch.coordinator import Recovery
from smp_train.launch.node import Node
from smp_train.launch.supervisor import supervise

processes, nodes, node_rank, port, spares, patience = map(int, sys.argv[1:7])
node = Node(processes, nodes, node_rank, "127.0.0.1", port, spares, patience)
command = [sys.executable, *sys.argv[7:]]
sys.exit(supervise(command, node, log_dir=Path("logs"), grace_seconds=0.2, recovery=Recovery(node))[0])
"""
WORKER = """
import os, signal, sys, time
if "SMP_TRAIN_JOB" in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: None)
me = os.environ["RANK"] + "-" + os.environ["SMP_TRAIN_GENERATION"]
open("new-" + me, "w").write(f"{os.getpid()} {os.environ['GROUP_RANK']} {os.environ['LOCAL_RANK']}")
os.rename("new-" + me, "began-" + me)
print("here", me, flush=True)
code = ""
while not code:
    for name in ("end", "end-" + me):
        if os.path.exists(name):
            code = open(name).read()
    time.sleep(0.01)
if os.path.exists("lost-" + me):
    open(os.environ["SMP_TRAIN_CAUSE_FILE"], "w").write("lost-peer")
sys.exit(int(code))
"""


class Run:
    """A run of agents on this machine, with a client of their store. Leaving the block kills what is left."""

    def __init__(
        self, folder: Path, processes: int, nodes: int = 1, spares: int = 0, *, patience: int = 0, module: bool = False
    ) -> None:  # fmt: skip
        self.folder, port = folder, free_port()
        (folder / "logs").mkdir()
        (folder / "agent.py").write_text(AGENT)
        (folder / "worker.py").write_text(WORKER)
        command = ["-m", "worker"] if module else ["worker.py"]
        environ = {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}

        def start(node: int) -> Command:
            numbers = map(str, (processes, nodes, node, port, spares, patience))
            return warm(folder, "agent.py", *numbers, *command, environ=environ)

        self.start = start
        self.agents = [start(node) for node in range(nodes + spares)]
        import torch.distributed as dist

        limit = timedelta(seconds=300)
        store = dist.TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
        self.store = dist.PrefixStore("recovery", store)
        for rank in range(processes * nodes):
            self.pid(rank)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
        for path in self.folder.glob("began-*"):  # a stopped agent's worker, of a test that failed
            with suppress(ProcessLookupError):
                os.kill(int(path.read_text().split()[0]), signal.SIGKILL)

    @property
    def main(self) -> Command:
        return self.agents[0]

    def began(self, rank: int, generation: int = 1) -> list[int]:
        """Wait for a rank's process of a generation; return its process id, node rank and local rank."""
        path = self.folder / f"began-{rank}-{generation}"
        self.main.until(path.exists, path.name)
        return [int(word) for word in path.read_text().split()]

    def pid(self, rank: int, generation: int = 1) -> int:
        return self.began(rank, generation)[0]

    def kill(self, rank: int, generation: int = 1) -> None:
        os.kill(self.pid(rank, generation), signal.SIGKILL)

    def finish(self, code: int = 0, worker: str = "end") -> None:
        """Let all workers, or one, end with an exit code."""
        (self.folder / "new").write_text(str(code))
        (self.folder / "new").rename(self.folder / worker)

    def train(self, **keys: Any) -> None:
        """Begin training."""
        for key, value in ({"training": "x"} | keys).items():
            self.store.set(key, str(value))

    def codes(self) -> list[int]:
        return [agent.code() for agent in self.agents]


def test_ranks_that_die_are_replaced(tmp_path: Path) -> None:
    """Rank 0, another, two at once, and one that dies before it has recovered."""
    with Run(tmp_path, 3) as run:
        run.train()
        run.kill(0)
        assert run.began(0, 2)[1:] == [0, 0]
        os.kill(run.pid(0, 2), signal.SIGTERM)  # a request to stop, before it can handle one
        run.train(step=5)
        run.kill(1)
        run.kill(1, 3)
        run.pid(1, 4)
        run.train(step=6)
        run.kill(0, 2)
        run.kill(2)
        run.main.until(lambda: len([*tmp_path.glob("began-[02]-[56]")]) == 2, "two replacements")
        assert run.store.check(["generation/5"])
        assert len([*tmp_path.glob("began-1-*")]) == 3
        run.finish()
        assert run.codes() == [0], run.main.err
    assert (tmp_path / "logs/rank-0.log").read_text().split()[:4] == ["here", "0-1", "here", "0-2"]


@pytest.mark.parametrize("code", [2, 3, 4])
def test_mistakes_of_the_user_end_the_run(code: int, tmp_path: Path) -> None:
    with Run(tmp_path, 2) as run:
        run.train()
        run.finish(code, "end-1-1")
        assert run.codes() == [code]
        assert f"rank=1 rc={code} cause=" in run.main.err


@pytest.mark.parametrize(
    ("keys", "why"),
    [({}, "training has not begun"), ({"training": 1, "refused": "streams cannot"}, "streams cannot")],
)
def test_a_run_that_cannot_be_recovered_ends(keys: dict[str, Any], why: str, tmp_path: Path) -> None:
    with Run(tmp_path, 2) as run:
        for key, value in keys.items():
            run.store.set(key, str(value))
        run.kill(1)
        assert run.codes() == [137]
        assert f"no process is replaced: {why}\n" in run.main.err
        assert "rank=1 rc=137 cause=killed" in run.main.err


def test_recoveries_without_progress_end_the_run(tmp_path: Path) -> None:
    with Run(tmp_path, 2) as run:
        for generation in range(1, 5):
            pid = run.pid(1, generation)
            run.train(step=10)
            os.kill(pid, signal.SIGKILL)
        assert run.codes() == [137]
        assert "3 recoveries brought no progress" in run.main.err


def test_a_death_after_a_request_to_stop_ends_the_run(tmp_path: Path) -> None:
    """Of one rank by the request itself: a worker here does not handle it."""
    with Run(tmp_path, 2) as run:
        run.train()
        run.main.signal(signal.SIGTERM)
        assert run.codes() == [143]
        assert "cause=stopped-before-saving" in run.main.err


def test_a_spare_node_takes_the_place_of_a_lost_one(tmp_path: Path) -> None:
    """The lost node's agent is killed, and its workers with it."""
    with Run(tmp_path, 2, nodes=2, spares=2) as run:
        run.train()
        run.agents[1].signal(signal.SIGKILL)
        assert run.began(2, 2)[1:] == [1, 0]
        assert run.began(3, 2)[1:] == [1, 1]
        assert "node 1 (" in run.main.err
        run.train(step=5)
        run.kill(3, 2)
        run.began(3, 3)
        run.agents[2].until(lambda: "here 3-3" in run.agents[2].out, "its output")
        run.finish()
        assert run.codes() == [0, -signal.SIGKILL, 0, 0], [agent.err for agent in run.agents]


def test_a_node_that_wakes_up_after_it_was_replaced_ends_its_ranks(tmp_path: Path) -> None:
    with Run(tmp_path, 1, nodes=2, spares=1) as run:
        run.train()
        zombie = run.agents[1]
        zombie.signal(signal.SIGSTOP)
        os.kill(run.pid(1), signal.SIGSTOP)
        run.began(1, 2)
        zombie.signal(signal.SIGCONT)
        assert zombie.code() == 1
        with pytest.raises(ProcessLookupError):
            os.kill(run.pid(1), 0)
        assert "another node has taken this one's place" in zombie.err
        run.finish()
        assert run.codes() == [0, 1, 0]


def test_a_lost_node_without_a_spare_one_ends_the_run(tmp_path: Path) -> None:
    with Run(tmp_path, 1, nodes=3) as run:
        run.train()
        run.agents[1].signal(signal.SIGKILL)
        assert run.codes() == [75, -signal.SIGKILL, 75]
        for agent in (run.agents[0], run.agents[2]):
            assert "no process is replaced: no spare node is left" in agent.err
            assert "rank=1 rc=75 cause=node" in agent.err


def test_a_lost_node_that_is_started_again_gets_its_ranks_back(tmp_path: Path) -> None:
    """Twice, and meanwhile a rank of another node dies."""
    with Run(tmp_path, 2, nodes=2, patience=300) as run:
        run.train()
        run.agents[1].signal(signal.SIGKILL)
        run.main.until(lambda: run.store.check(["generation/2"]), "a generation that waits")
        run.kill(0)
        run.pid(0, 3)
        assert not [*tmp_path.glob("began-[23]-[23]")]
        run.agents.append(run.start(1))
        assert run.began(2, 4)[1:] == [1, 0]
        assert run.began(3, 4)[1:] == [1, 1]
        assert "waiting up to 300 s" in run.main.err
        run.train(step=5)
        run.agents.append(run.start(1))  # before the loss of its predecessor is known
        run.agents[2].signal(signal.SIGKILL)
        run.pid(2, 5), run.pid(3, 5)
        run.finish()
        assert run.codes() == [0, -signal.SIGKILL, -signal.SIGKILL, 0], [agent.err for agent in run.agents]


def test_a_run_goes_on_without_a_lost_node_and_takes_it_back(tmp_path: Path) -> None:
    """A rank that dies meanwhile is known by its new number; so is the place of a node that is started again."""
    with Run(tmp_path, 1, nodes=3, patience=300) as run:
        run.train(sizes="[1, 2, 3]")
        run.agents[1].signal(signal.SIGKILL)
        run.main.until(lambda: run.store.check(["generation/2"]), "a smaller generation")
        assert "2 ranks go on" in run.main.err
        run.kill(2)
        assert run.began(1, 3)[1:] == [1, 0]
        assert "rank 1 on " in run.main.err
        run.agents.append(run.start(1))
        run.train(step=5)
        assert run.began(2, 4)[1:] == [2, 0]
        run.agents[0].until(lambda: "joins: 3 ranks go on" in run.main.err, "the larger generation")
        run.finish()
        assert run.codes() == [0, -signal.SIGKILL, 0, 0], [agent.err for agent in run.agents]


def test_a_rank_with_a_new_number_reports_its_own_cause(tmp_path: Path) -> None:
    with Run(tmp_path, 1, nodes=3) as run:
        run.train(sizes="[1, 2, 3]")
        run.agents[1].signal(signal.SIGKILL)
        run.main.until(lambda: run.store.check(["generation/2"]), "a smaller generation")
        run.store.set("refused", "no more")
        (tmp_path / "lost-2-1").touch()
        run.finish(1, "end-2-1")
        assert run.codes()[0] == 1
        assert "rank=1 rc=1 cause=lost-peer" in run.main.err


def test_a_node_that_joins_and_fails_is_sent_away(tmp_path: Path) -> None:
    """Its supervisor stays until the end of the run, so that nobody starts it again and again."""
    with Run(tmp_path, 1, nodes=2, patience=300) as run:
        run.train(sizes="[1, 1, 2]", step=5)
        run.agents[1].signal(signal.SIGKILL)
        run.main.until(lambda: run.store.check(["generation/2"]), "a smaller generation")
        run.agents.append(run.start(1))
        run.train(step=5)
        run.pid(1, 3)
        run.finish(4, "end-1-3")
        run.main.until(lambda: run.store.check(["generation/4"]), "a smaller generation again")
        assert "is sent away" in run.main.err
        run.finish()
        assert run.codes() == [0, -signal.SIGKILL, 0], [agent.err for agent in run.agents]


def test_a_lost_node_that_wakes_up_while_it_is_awaited_goes_on(tmp_path: Path) -> None:
    with Run(tmp_path, 1, nodes=2, patience=300) as run:
        run.train()
        old = run.pid(1)
        run.agents[1].signal(signal.SIGSTOP)
        run.main.until(lambda: run.store.check(["generation/2"]), "a generation that waits")
        run.agents[1].signal(signal.SIGCONT)
        run.pid(1, 2)
        with pytest.raises(ProcessLookupError):
            os.kill(old, 0)
        run.finish()
        assert run.codes() == [0, 0]


def test_a_lost_node_is_awaited_for_a_limited_time(tmp_path: Path) -> None:
    with Run(tmp_path, 1, nodes=2, patience=7) as run:
        run.train()
        run.agents[1].signal(signal.SIGKILL)
        assert run.codes() == [75, -signal.SIGKILL]
        assert "generation 2: node 1 (" in run.main.err
        assert "no process is replaced: no spare node is left" in run.main.err


def test_pods_are_to_be_started_again_after_a_request_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """One pod is asked to stop; all ranks save and end with 0. A pod that ended with 0 would not be started again."""
    monkeypatch.setenv("SMP_TRAIN_JOB", "namespace/name")
    with Run(tmp_path, 1, nodes=2) as run:
        run.train()
        run.agents[1].signal(signal.SIGTERM)
        run.finish()
        assert run.codes() == [143, 143]


def test_the_loss_of_the_coordinator_ends_the_run(tmp_path: Path) -> None:
    with Run(tmp_path, 1, nodes=2) as run:
        run.train()
        run.agents[0].signal(signal.SIGKILL)
        assert run.agents[1].code() == 1
        assert "the coordinator on node 0, at 127.0.0.1:" in run.agents[1].err
        assert "rank=1 rc=1 cause=lost-peer" in run.agents[1].err


def test_a_warm_process_becomes_the_rank(tmp_path: Path) -> None:
    checks = """
import os, sys
if os.environ["SMP_TRAIN_GENERATION"] == "2":
    print(sys.argv, sys.modules["torch"].cuda.is_initialized(), "transformers" in sys.modules)
    print([*os.listdir("/proc/self/task")] == [str(os.getpid())], os.getsid(0) == os.getpid(), file=sys.stderr)
"""
    with Run(tmp_path, 2, module=True) as run:
        (tmp_path / "worker.py").write_text(checks + WORKER)
        run.train()
        children = [sys.executable, "-m", "smp_train.launch.spare"]
        warm_process = run.main.until(lambda: _child(run.main.pid, children), "warm process")
        run.kill(1)
        assert run.pid(1, 2) == warm_process
        os.kill(warm_process, signal.SIGTERM)
        run.finish()
        assert run.codes() == [0], run.main.err
    log = (tmp_path / "logs/rank-1.log").read_text()
    assert f"['{tmp_path}/worker.py'] False True" in log
    assert "True True" in log


def _child(pid: int, command: list[str]) -> int | None:
    import psutil

    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):
            if child.cmdline() == command:
                return int(child.pid)
    return None
